"""A real node: the command line over the environment over mesh.toml, and what a load says over all of them.

Rules quoted from docs/spec/options.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import tiny_models
from tests.engines.scripted_engine import Script, write_engine
from tests.processes.node import Node, private_home

MODEL = "tiny-a"


@pytest.fixture
def node() -> Iterator[Node]:
    with private_home() as home:
        (home / "mine").mkdir()
        tiny_models.write_llm(home / "mine" / f"{MODEL}.gguf", seed=1, name=MODEL)
        (home / "builds").mkdir()
        first, second = (write_engine(_folder(home, name) / "llama-server", Script()) for name in ("one", "two"))
        (home / "mesh.toml").write_text(
            f'[models]\nfolders = ["{home / "mine"}"]\n\n[engine]\npath = "{first}"\ncontext_tokens = 1000\n'
            f'backends = {{ other = "{second}" }}\n'
        )
        node = Node(home)
        try:
            yield node
        except BaseException:
            print(node.logs())
            raise
        finally:
            node.down()


def _folder(home: Path, name: str) -> Path:
    folder = home / "builds" / name
    folder.mkdir()
    return folder


def loaded(node: Node) -> dict[str, Any]:
    """The model as `/health` shows it."""
    return next(row for row in node.request("GET", "/v1/health").json()["all_models_loaded"])


def configured(node: Node, key: str) -> Any:
    return json.loads(node.meshctl("config", "show", key, "--json").stdout)["value"]


def context_tokens(node: Node) -> int:
    """What the model would be loaded with, by the running launcherd."""
    shown = json.loads(node.meshctl("models", "show", MODEL, "--json").stdout)
    return int(shown["context_tokens"])


def test_who_decides_an_option(node: Node) -> None:
    """1. An option is taken from the first that names it: the request, the command line, the environment, mesh.toml.

    3. The command line counts more than the variable for the same option as long as this start of the node lasts, also
    when it is given to a running node; `meshctl up` says so. The next start of the node without that option heeds the
    variable again.
    4. A load is declarative: with equal resolved options, the build among them, the engine keeps running.
    5. The builds are `embedded`, `path` and the names of `engine.backends`; an unknown name is refused with those there
    are.
    """
    node.environment = {"MESH_CTX_SIZE": "2000", "MESH_MAX_LOADED_MODELS": "7"}
    node.up()
    assert context_tokens(node) == 2000, "the environment over mesh.toml"

    again = node.meshctl("up", "--ctx-size", "3000", "--max-loaded-models", "2")
    assert "MESH_CTX_SIZE is set too" in again.stderr
    assert "MESH_MAX_LOADED_MODELS is set too" in again.stderr
    assert context_tokens(node) == 3000, "the command line over the environment, on a running node"
    assert configured(node, "models.max_loaded_models") == [2]

    node.meshctl("load", MODEL, "--pin")
    first = loaded(node)
    assert (first["recipe_options"]["ctx_size"], first["pinned"]) == (3000, True)
    assert first["recipe_options"]["llamacpp_backend"] == "path"
    node.meshctl("load", MODEL, "--ctx-size", "3000", "--llamacpp-args", "", "--llamacpp-backend", "path")
    assert loaded(node)["pid"] == first["pid"], "equal resolved options"

    node.meshctl("load", MODEL, "--ctx", "4000", "--llamacpp-args", "--seed '5'", "--no-pin")
    asked = loaded(node)
    assert asked["pid"] != first["pid"]
    assert (asked["recipe_options"]["ctx_size"], asked["pinned"]) == (4000, False)
    assert asked["recipe_options"]["llamacpp_args"] == "--seed 5"

    node.meshctl("load", MODEL, "--llamacpp-backend", "other")
    other = loaded(node)
    assert other["recipe_options"]["llamacpp_backend"] == "other"
    assert other["pid"] != asked["pid"]
    refused = node.meshctl("load", MODEL, "--llamacpp-backend", "vulkan", check=False)
    assert (refused.returncode, "known: embedded, path, other" in refused.stderr) == (1, True)
    refused = node.meshctl("load", MODEL, "--llamacpp-args", "-c 5 --api_key x", check=False)
    assert (refused.returncode, "ctx_size; --api_key: meshd makes the engine's key" in refused.stderr) == (1, True)
    assert loaded(node)["pid"] == other["pid"], "a refused load changes nothing"

    node.down()
    node.forget_address()
    node.up("--ctx-size", "5000")
    assert context_tokens(node) == 5000, "the command line over the environment, at a start"
    assert configured(node, "models.max_loaded_models") == [7], "that start is over"
    node.down()
    node.up()
    assert context_tokens(node) == 2000, "the environment again"
