"""Lemonade's routes with the real launcherd and the embedded engine: what its clients do in a session."""

from __future__ import annotations

import json
import shutil
import socket
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
from tests.hub.fake_hub import FakeHub, fake_hub
from tests.proxyd.plane import Plane, running_plane
from tests.proxyd.wire import read_until
from tests.waiting import wait_until

pytest.importorskip("xllamacpp", reason="the embedded engine is not installed on this platform")


REPO = "tiny/Real-GGUF"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    file = tmp_path_factory.mktemp("hub") / "Real-Q8_0.gguf"
    write_llm(file)
    with fake_hub() as running:
        running.repos[REPO] = {file.name: file.read_bytes()}
        yield running


@pytest.fixture(scope="module")
def models_folder() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="mesh-", dir="/tmp"))
    (home / "models").mkdir()
    yield home / "models"
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def plane(hub: FakeHub, models_folder: Path) -> Iterator[Plane]:
    models, home = models_folder, models_folder.parent
    write_llm(models / "one.gguf")
    write_llm(models / "two.gguf")
    write_embedding(models / "embed.gguf")
    engine = 'path = "embedded"\nthreads = 1\nparallel = 2\ncontext_tokens = 512\n'
    (home / "mesh.toml").write_text(f'[models]\nfolders = ["{models}"]\n[engine]\n{engine}')
    launcherd = start_daemon_process("launcherd", home, HF_ENDPOINT=hub.endpoint)
    try:
        with running_plane(home, own_launcherd=False) as running:
            running.place_error = DaemonUnreachable("there is no electiond in this test")
            launcherd.wait_ready()
            wait_until(lambda: running.call(lambda: running.local.settled and running.view.settled), 20, "models known")
            yield running
    finally:
        print(launcherd.log())
        launcherd.end()


def test_a_file_that_has_just_come_can_be_loaded_at_once(plane: Plane, models_folder: Path) -> None:
    """docs/spec/lemonade.md 16: a load looks again before it says that there is no such model."""
    write_llm(models_folder / "fresh.gguf", seed=3)
    status, answer = ask(plane, "POST", "load", {"model_name": "fresh"})
    assert (status, answer["model_name"]) == (200, "fresh"), answer
    assert ask(plane, "POST", "unload", {"model_name": "fresh"})[0] == 200


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
    assert ask(plane, "POST", "internal/set", {"max_loaded_models": 1})[0] == 200
    assert ask(plane, "POST", "unload", {"model_name": "two"})[0] == 200
    status, answer = ask(plane, "POST", "load", {"model_name": "two"})
    assert (status, answer["error"]["code"]) == (409, "slots_pinned_error"), answer
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


def pulled(plane: Plane, **body: Any) -> list[tuple[str, Any]]:
    """The events of a streamed pull."""
    status, headers, text = plane.request("POST", "/api/v1/pull", {"stream": True, **body}, timeout=60)
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    lines = [line.partition(": ") for line in text.decode().split("\n") if line.startswith(("event:", "data:"))]
    names, data = lines[::2], lines[1::2]
    return [(name, json.loads(told)) for (_, _, name), (_, _, told) in zip(names, data, strict=True)]


def test_a_model_is_pulled_loaded_asked_and_deleted(plane: Plane, hub: FakeHub) -> None:
    """docs/spec/lemonade.md 16, 19: progress comes as events, the last one `complete` or `error`."""
    events = pulled(plane, model_name="user.real", checkpoint=f"{REPO}:Q8_0", recipe="llamacpp", reasoning=True)
    assert [name for name, _ in events[-1:]] == ["complete"]
    assert {name for name, _ in events[:-1]} <= {"progress"}
    assert events[-1][1]["percent"] == 100
    shown = ask(plane, "GET", "models/user.real")[1]
    assert (shown["downloaded"], shown["labels"], shown["checkpoint"]) == (True, ["reasoning"], f"{REPO}:Q8_0")
    assert shown["size_bytes"] > 0
    assert ask(plane, "POST", "load", {"model_name": "user.real", "ctx_size": 256})[0] == 200
    assert loaded(plane)["user.real"]["checkpoint"] == f"{REPO}:Q8_0"
    assert ask(plane, "POST", "completions", {"model": "user.real", "prompt": "a", "max_tokens": 3})[0] == 200
    assert ask(plane, "POST", "delete", {"model_name": "user.real"})[0] == 200
    assert loaded(plane) == {}
    assert ask(plane, "GET", "models/user.real")[0] == 404
    assert ask(plane, "POST", "delete", {"model_name": "user.real"})[0] == 404


def test_a_load_downloads_what_it_registers(plane: Plane, hub: FakeHub) -> None:
    """docs/spec/lemonade.md 16."""
    body = {"model_name": "user.other", "checkpoint": f"{REPO}:Q8_0", "recipe": "llamacpp", "ctx_size": 256}
    status, answer = ask(plane, "POST", "load", body)
    assert (status, answer["model_name"], answer["checkpoint"]) == (200, "user.other", f"{REPO}:Q8_0"), answer
    assert loaded(plane)["user.other"]["recipe_options"]["ctx_size"] == 256
    assert ask(plane, "POST", "delete", {"model_name": "user.other"})[0] == 200


def test_who_leaves_a_streamed_pull_cancels_it(plane: Plane, hub: FakeHub) -> None:
    """docs/spec/lemonade.md 21: what is there stays for the next time."""
    hub.fault("stall", at=100_000, file="Real-Q8_0")
    body = json.dumps({"model_name": "user.half", "checkpoint": f"{REPO}:Q8_0", "stream": True}).encode()
    head = b"POST /api/v1/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)

    def state() -> str:
        found = plane.call(lambda: plane.local.download_of("user.half"))
        return found.state if found is not None else ""

    with socket.create_connection(("127.0.0.1", plane.port), timeout=20) as connection:
        connection.sendall(head + body)
        read_until(connection, b"event: progress")
        wait_until(lambda: state() == "downloading", 10, "bytes come")
    wait_until(lambda: state() == "cancelled", 10, "launcherd was told")
    assert pulled(plane, model_name="user.half", checkpoint=f"{REPO}:Q8_0")[-1][0] == "complete"
    assert ask(plane, "POST", "delete", {"model_name": "user.half"})[0] == 200


def test_what_cannot_be_pulled_is_told_in_words(plane: Plane, hub: FakeHub) -> None:
    """docs/spec/lemonade.md 5, 19."""
    [(name, told)] = [event for event in pulled(plane, model_name="tiny/Nothing-GGUF:Q8_0") if event[0] != "progress"]
    assert name == "error"
    assert "tiny/Nothing-GGUF" in told["error"]
    status, answer = ask(plane, "POST", "pull", {"model_name": f"{REPO}:Q2_K"})
    assert (status, answer["error"]["code"]) == (404, "quantization_not_found")
    assert "Q8_0" in answer["error"]["message"]
    assert ask(plane, "POST", "pull", {"model_name": "no such model"})[0] in (400, 404)
