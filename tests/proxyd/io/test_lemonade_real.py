"""Lemonade's routes with the real launcherd and the embedded engine: what its clients do in a session."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from shared.errors import DaemonUnreachable
from tests.daemons import start_daemon_process
from tests.engines.tiny_models import write_embedding, write_llm
from tests.proxyd.plane import Plane, running_plane
from tests.waiting import wait_until

pytest.importorskip("xllamacpp", reason="the embedded engine is not installed on this platform")


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    home = Path(tempfile.mkdtemp(prefix="mesh-", dir="/tmp"))
    models = home / "models"
    models.mkdir()
    write_llm(models / "one.gguf")
    write_llm(models / "two.gguf")
    write_embedding(models / "embed.gguf")
    engine = 'path = "embedded"\nthreads = 1\nparallel = 2\ncontext_tokens = 512\n'
    (home / "mesh.toml").write_text(f'[models]\nfolders = ["{models}"]\n[engine]\n{engine}')
    launcherd = start_daemon_process("launcherd", home)
    try:
        with running_plane(home, own_launcherd=False) as running:
            running.place_error = DaemonUnreachable("there is no electiond in this test")
            launcherd.wait_ready()
            wait_until(lambda: running.call(lambda: running.local.settled and running.view.settled), 20, "models known")
            yield running
    finally:
        print(launcherd.log())
        launcherd.end()
        shutil.rmtree(home, ignore_errors=True)


def ask(plane: Plane, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, _, answer = plane.request(method, f"/api/v1/{path}", body, timeout=60)
    return status, json.loads(answer)


def loaded(plane: Plane) -> dict[str, Any]:
    return {model["model_name"]: model for model in ask(plane, "GET", "health")[1]["all_models_loaded"]}


def test_a_session_of_a_lemonade_client(plane: Plane) -> None:
    """docs/spec/lemonade.md 8, 11, 14, 17, 18: declarative loads, one record of statistics, unloads."""
    assert {entry["id"] for entry in ask(plane, "GET", "models")[1]["data"]} >= {"one", "two", "embed"}
    status, answer = ask(plane, "POST", "load", {"model_name": "one", "ctx_size": 256, "temperature": 0.1})
    assert (status, answer["status"], answer["ignored"]) == (200, "success", ["temperature"])
    one = loaded(plane)["one"]
    assert (one["status"], one["recipe"], one["recipe_options"]["ctx_size"]) == ("ready", "llamacpp", 256)
    assert psutil.pid_exists(one["pid"])
    assert one["device"] in ("cpu", "gpu")

    assert ask(plane, "POST", "load", {"model_name": "one", "ctx_size": 256})[0] == 200
    assert loaded(plane)["one"]["pid"] == one["pid"], "the same options: nothing was done"
    assert ask(plane, "POST", "load", {"model_name": "one", "ctx_size": 512})[0] == 200
    assert loaded(plane)["one"]["pid"] != one["pid"], "other options: another engine"

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}/api/v1", api_key="none", max_retries=0)
    told = client.completions.create(model="one", prompt="a", max_tokens=5)
    client.close()
    assert told.usage is not None
    stats = ask(plane, "GET", "stats")[1]
    assert (stats["output_tokens"], stats["prompt_tokens"]) == (told.usage.completion_tokens, told.usage.prompt_tokens)
    assert stats["tokens_per_second"] > 0
    assert stats["time_to_first_token"] > 0

    assert ask(plane, "POST", "load", {"model_name": "two"})[0] == 200
    assert set(loaded(plane)) == {"two"}, "one llm at a time: the other was evicted"
    assert ask(plane, "GET", "stats")[1]["output_tokens"] == stats["output_tokens"], "statistics outlive the model"
    assert ask(plane, "POST", "unload", {"model_name": "one"})[0] == 404
    assert ask(plane, "POST", "unload", {"model_name": "two"})[0] == 200
    assert loaded(plane) == {}
    assert ask(plane, "POST", "unload")[0] == 200


def test_limits_and_pins_live(plane: Plane) -> None:
    """docs/spec/lemonade.md 10 and 20."""
    assert ask(plane, "GET", "health")[1]["max_models"]["llm"] == 1
    assert ask(plane, "POST", "internal/set", {"max_loaded_models": [2, -1]})[0] == 200
    limits = ask(plane, "GET", "health")[1]["max_models"]
    assert (limits["llm"], limits["embedding"], limits["image"]) == (2, -1, 1)
    for model in ("one", "two", "embed"):
        assert ask(plane, "POST", "load", {"model_name": model, "pinned": model == "one"})[0] == 200
    health = ask(plane, "GET", "health")[1]
    assert {model["model_name"]: model["pinned"] for model in health["all_models_loaded"]} == {
        "one": True, "two": False, "embed": False,
    }  # fmt: skip
    assert health["model_loaded"] == "two", "the llm loaded last"
    assert ask(plane, "POST", "internal/pin", {"model_name": "one", "pinned": False})[0] == 200
    wait_until(lambda: not loaded(plane)["one"]["pinned"], 5, "it is unpinned")
    assert ask(plane, "POST", "unload")[0] == 200
    assert loaded(plane) == {}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model_name": "nothing"}, 404, "nothing"),
        ({"model_name": "one", "llamacpp_args": "--port 1"}, 400, "--port"),
        ({"model_name": "one", "llamacpp_backend": "quantum"}, 400, "quantum"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_words(
    plane: Plane, body: dict[str, Any], status: int, words: str
) -> None:
    """docs/spec/lemonade.md 17."""
    got, answer = ask(plane, "POST", "load", body)
    assert (got, set(answer["error"])) == (status, {"message", "type", "code", "param"}), answer
    assert words in answer["error"]["message"]
