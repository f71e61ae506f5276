"""A whole node whose models are run by every recipe: pulled, asked on the inference port, unloaded.

The programs are stand-ins that take the real ones' command lines and speak their HTTP. Rules quoted from
docs/spec/recipes.md.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from services.launcherd.recipes import FirstRequest, first_request
from shared.messages.models import ModelType
from shared.recipes import BUILTIN_RECIPES
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script, write_engine
from tests.processes.node import Node, private_home, wait_for

OWN = """
[recipes.mine]
program = "{program}"
arguments = ["--model", "{{model}}", "--host", "{{host}}", "--port", "{{port}}", "--alias", "{{name}}"]
processors = ["cpu"]
endpoints = ["/v1/chat/completions"]
key_variable = "LLAMA_API_KEY"
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with private_home() as home:
        programs = home / "programs"
        for folder in (programs, home / "mine"):
            folder.mkdir()
        for name in ("llama-server", "whisper-server", "sd-server", "flm", "ryzenai-server"):
            write_engine(programs / name, Script(tokens=3))
        own = write_engine(home / "my-own-server", Script(tokens=3))
        tiny_models.write_llm(home / "mine" / "tiny-a.gguf", seed=1, name="tiny-a")
        (home / "mesh.toml").write_text(
            f'[models]\nfolders = ["{home / "mine"}"]\nmax_loaded_models = -1\n' + OWN.format(program=own)
        )
        node = Node(home, environment={"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"})
        try:
            node.up()
            yield node
        except BaseException:
            print(node.logs())
            raise
        finally:
            node.down()


def register(node: Node, name: str, recipe: str, *labels: str, checkpoint: str = "") -> None:
    """A model that is no GGUF: a folder for an llm, else a file; flm keeps its models itself."""
    path = node.home / "mine" / name
    if not checkpoint and BUILTIN_RECIPES.get(recipe, BUILTIN_RECIPES["oga-cpu"]).types[0] == "llm":
        path.mkdir()
        (path / "genai_config.json").write_text("{}")
    elif not checkpoint:
        path.write_bytes(b"weights")
    body = {"model_name": name, "checkpoint": checkpoint or str(path), "recipe": recipe, "labels": labels}
    pulled = node.request("POST", "/api/v1/pull", body)
    assert pulled.status == 200, pulled.body


def ask(node: Node, path: str, content_type: str, body: bytes) -> Any:
    address = urlsplit(node.api)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        connection.request("POST", path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, answer
        return json.loads(answer)
    finally:
        connection.close()


def asked_for(type: ModelType, recipe: str, name: str) -> FirstRequest:
    if type == "llm":
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        return FirstRequest("/v1/chat/completions", "application/json", json.dumps(body).encode())
    if type == "image":
        body = {"model": name, "prompt": "a red square"}
        return FirstRequest("/v1/images/generations", "application/json", json.dumps(body).encode())
    request = first_request(BUILTIN_RECIPES[recipe], type, name)
    assert request is not None
    return request


def loaded(node: Node) -> dict[str, dict[str, Any]]:
    return {row["model_name"]: row for row in node.request("GET", "/api/v1/health").json()["all_models_loaded"]}


@pytest.mark.parametrize(
    ("recipe", "name", "labels", "type", "device"),
    [
        ("oga-hybrid", "hybrid-model", (), "llm", "gpu npu"),
        ("oga-npu", "npu-model", (), "llm", "npu"),
        ("oga-cpu", "cpu-model", (), "llm", "cpu"),
        ("ryzenai-llm", "ryzen-model", (), "llm", "npu"),
        ("flm", "gemma3:4b", (), "llm", "npu"),
        ("flm", "embed-gemma:300m", ("embeddings",), "embedding", "npu"),
        ("flm", "whisper-v3:turbo", ("transcription",), "audio", "npu"),
        ("whispercpp", "whisper-base", (), "audio", "cpu"),
        ("sd-cpp", "sd-turbo", (), "image", "cpu"),
        ("mine", "my-model", (), "llm", "cpu"),
    ],
)
def test_a_model_of_each_recipe_is_pulled_asked_and_unloaded(
    node: Node, recipe: str, name: str, labels: tuple[str, ...], type: ModelType, device: str
) -> None:
    """8. A model's recipe chooses its program and its command line. 5. `[recipes.NAME]` adds a recipe.

    The request itself loads the model: what it says arrives as it was sent, and the answer comes back.
    """
    register(node, name, recipe, *labels, checkpoint=name if recipe == "flm" else "")
    asked = asked_for(type, recipe, name)
    answer = ask(node, asked.path, asked.content_type, asked.body)
    if type == "llm":
        assert answer["choices"][0]["message"]["content"] == "w0 w1 "
    elif type == "embedding":
        assert len(answer["data"][0]["embedding"]) == 3
    elif type == "audio":
        assert answer["text"] == "w0 w1 w2"
    else:
        assert answer["data"][0]["b64_json"]
    row = loaded(node)[name]
    assert (row["recipe"], row["type"], row["device"]) == (recipe, type, device)
    assert "llamacpp_backend" not in row["recipe_options"]
    node.meshctl("unload", name)
    assert name not in loaded(node)
    wait_for(lambda: not psutil.pid_exists(row["pid"]), 10, "the end of its engine")


def test_a_program_that_is_missing_refuses_only_its_models_until_it_comes(node: Node) -> None:
    """9. A program is looked for on the PATH when a model needs it. While it is missing, models of its recipe are
    refused with code `engine_missing` and the words how to get it, before anything is unloaded for them; models of
    other recipes load."""
    program = node.home / "programs" / "whisper-server"
    gone = program.rename(program.with_name("renamed"))
    register(node, "late-whisper", "whispercpp")
    node.meshctl("load", "tiny-a")
    try:
        refused = node.meshctl("load", "late-whisper", check=False)
        assert refused.returncode == 1
        assert "whisper.cpp's whisper-server, from github.com/ggml-org/whisper.cpp" in refused.stderr
        assert "tiny-a" in loaded(node)
    finally:
        gone.rename(Path(program))
    node.meshctl("load", "late-whisper")
    rows = loaded(node)
    assert {row["recipe"] for row in rows.values()} >= {"llamacpp", "whispercpp"}
    node.meshctl("unload", "late-whisper")
