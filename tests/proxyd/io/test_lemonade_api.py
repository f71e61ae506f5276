"""The routes that clients of Lemonade Server know, over real HTTP and a real bus; launcherd is scripted."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from typing import Any

import openai
import pytest

from services.proxyd.io.lemonade_work import MIRROR_SECONDS
from shared.errors import RequestRefused
from shared.ids import ModelName
from shared.messages.downloads import (
    DeleteModel,
    PullModel,
    RegisteredModel,
    RegistryChanged,
)
from shared.messages.models import (
    DeviceChanged,
    InventoryChanged,
    LimitsChanged,
    LoadModel,
    PinModel,
    SetMaxLoadedModels,
    UnloadModel,
)
from tests.proxyd.plane import Plane
from tests.proxyd.raw_upstream import RawUpstream
from tests.proxyd.scripted_launcherd import Scripted, ask
from tests.proxyd.wire import in_background
from tests.waiting import wait_until

PREFIXES = ("/v1", "/api/v1", "/v0", "/api/v0")
BELOW_SECONDS = 0.05


# -- what is shown -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_view_under_every_prefix(plane: Plane, launcherd: Scripted, prefix: str) -> None:
    """docs/spec/lemonade.md 1 and 3."""
    launcherd.say(DeviceChanged(device="cpu", vram_bytes=1, total_bytes=1, reserve_bytes=0, engine="llama.cpp b1"))
    registered = RegisteredModel(name=ModelName("known"), checkpoint="org/known:Q4", size_bytes=5)
    launcherd.say(RegistryChanged(models=(registered,)))
    plane.slot("here", "ready")
    status, health = ask(plane, "GET", f"{prefix}/health")
    assert (status, health["status"], health["model_loaded"]) == (200, "ok", "here")
    assert health["all_models_loaded"][0]["model_name"] == "here"
    assert health["max_models"]["llm"] == 1
    assert ask(plane, "GET", f"{prefix}/stats")[1]["output_tokens"] is None
    info = ask(plane, "GET", f"{prefix}/system-info")[1]
    assert info["devices"]["cpu"]["threads"] >= 1
    assert info["recipes"]["llamacpp"]["backends"]["default"]["version"] == "llama.cpp b1"
    listed = [entry["id"] for entry in ask(plane, "GET", f"{prefix}/models?show_all=true")[1]["data"]]
    assert listed == (["here"] if prefix == "/v1" else ["here", "known"])
    status, entry = ask(plane, "GET", f"{prefix}/models/here")
    assert (status, entry["id"], entry["recipe"], entry["downloaded"]) == (200, "here", "llamacpp", True)
    status, error = ask(plane, "GET", f"{prefix}/models/her")
    assert (status, error["error"]["type"]) == (404, "not_found_error")
    assert "here" in error["error"]["message"]
    assert launcherd.asked == []


def test_the_root_health_stays_what_it_is(plane: Plane, launcherd: Scripted) -> None:
    assert "requests_active" in ask(plane, "GET", "/health")[1]
    assert "all_models_loaded" not in ask(plane, "GET", "/health")[1]


def test_views_never_wait_for_launcherd(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 7: not while a load waits, nor while launcherd is away."""
    launcherd.hold = asyncio.Event()
    result = in_background(lambda: ask(plane, "POST", "/api/v1/load", {"model_name": "here"}))
    wait_until(lambda: launcherd.of(LoadModel), 5, "the load waits")
    plane.slot("here", "queued", "waits for busy models")
    for path in ("health", "stats", "models", "system-info"):
        seconds = []
        for _ in range(5):  # The first one measures the machine; others may be held up by whatever else runs here.
            started = time.monotonic()
            assert ask(plane, "GET", f"/api/v1/{path}")[0] == 200
            seconds.append(time.monotonic() - started)
        assert min(seconds) < BELOW_SECONDS, path
    assert ask(plane, "GET", "/v1/health")[1]["models_loading"][0]["reason"] == "waits for busy models"
    assert not result
    launcherd.release()
    wait_until(lambda: result, 5, "it is answered")


def test_stats_are_of_the_newest_request_and_never_mixed(
    plane: Plane, launcherd: Scripted, upstream: RawUpstream
) -> None:
    """docs/spec/lemonade.md 11, TRAPS 27: one record, whole, that no other request and no unload changes."""

    def reply(peer: Any, request: Any) -> None:
        count = int(json.loads(request.body)["count"])
        timings = {"cache_n": count, "prompt_n": count, "prompt_ms": count * 1000, "predicted_per_second": count}
        usage = {"prompt_tokens": 2 * count, "completion_tokens": count}
        peer.json({"usage": usage, "timings": timings})

    upstream.handler = reply
    plane.serve_model("m", upstream.port)
    seen: list[Any] = []
    end = threading.Event()

    def watch() -> None:
        while not end.is_set():
            seen.append(ask(plane, "GET", "/api/v1/stats")[1])

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [
        threading.Thread(target=lambda start=start: [plane.chat("m", count=start + step) for step in range(8)])
        for start in (10, 20, 30, 40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    end.set()
    watcher.join(5)
    plane.slot("m", "unloaded")
    plane.chat("unknown")
    seen.append(ask(plane, "GET", "/api/v1/stats")[1])
    told = [entry for entry in seen if entry["output_tokens"] is not None]
    assert told[-1] is seen[-1], "it outlives the model and a request that failed"
    for entry in told:
        count = entry["output_tokens"]
        assert (entry["prompt_tokens"], entry["input_tokens"], entry["cache_tokens"]) == (2 * count, count, count)
        assert entry["tokens_per_second"] == count
        assert count <= entry["time_to_first_token"] < count + 1


def test_a_model_is_busy_while_its_request_runs(plane: Plane, launcherd: Scripted, upstream: RawUpstream) -> None:
    """docs/spec/lemonade.md 9."""
    answered = threading.Event()

    def reply(peer: Any, _request: Any) -> None:
        answered.wait(10)
        peer.json({})

    upstream.handler = reply
    plane.serve_model("m", upstream.port)
    assert ask(plane, "GET", "/api/v1/health")[1]["all_models_loaded"][0]["is_busy"] is False
    result = in_background(lambda: plane.chat("m"))
    wait_until(lambda: upstream.requests, 5, "the engine has it")
    before = time.time()
    loaded = ask(plane, "GET", "/api/v1/health")[1]["all_models_loaded"][0]
    assert loaded["is_busy"] is True
    assert loaded["last_use"] >= round(before, 3) - 0.002
    answered.set()
    wait_until(lambda: result, 5, "it is answered")
    assert ask(plane, "GET", "/api/v1/health")[1]["all_models_loaded"][0]["is_busy"] is False


# -- inference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_engine_sees_the_v1_path_and_the_body_byte_for_byte(
    plane: Plane, launcherd: Scripted, upstream: RawUpstream, prefix: str
) -> None:
    """docs/spec/lemonade.md 1."""
    plane.serve_model("m", upstream.port)
    body = b'{ "model" : "m",\t"messages":[],  "x": 1e3 }'
    assert plane.request("POST", f"{prefix}/chat/completions?a=%20", body)[0] == 200
    assert upstream.requests[0].line == b"POST /v1/chat/completions?a=%20 HTTP/1.1"
    assert upstream.requests[0].body == body


def test_the_openai_client_on_lemonades_address(plane: Plane, launcherd: Scripted, upstream: RawUpstream) -> None:
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "lemon"}, "finish_reason": "stop"}]}  # fmt: skip
    upstream.handler = lambda peer, _request: peer.json(answer)
    plane.serve_model("m", upstream.port)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{plane.port}/api/v1", api_key="none", max_retries=0)
    try:
        told = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert told.choices[0].message.content == "lemon"
        assert [model.id for model in client.models.list()] == ["here"]
        assert client.models.retrieve("here").owned_by == "lemonade"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nothing")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nothing", messages=[])
    finally:
        client.close()


def test_a_form_in_segments_of_one_byte_finds_its_model(
    plane: Plane, launcherd: Scripted, upstream: RawUpstream
) -> None:
    """docs/spec/lemonade.md 1; a transcription names its model in a field of a form."""
    plane.serve_model("whisper", upstream.port, type="audio")
    audio = b"\x00\r\n--not the boundary\xff" * 3
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + audio
        + b'\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--B--\r\n'
    )  # fmt: skip
    head = (
        b"POST /api/v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: multipart/form-data; boundary=B\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection(("127.0.0.1", plane.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head + body:
            connection.sendall(bytes((byte,)))
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200")
    assert upstream.requests[0].body == body
    assert upstream.requests[0].line == b"POST /v1/audio/transcriptions HTTP/1.1"


# -- what is done --------------------------------------------------------------------------------------------


def test_a_load_and_its_answer(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 14."""
    plane.slot("here", "ready")
    body = {"model_name": "here", "ctx_size": 4096, "llamacpp_args": "--no-mmap -b 512", "pinned": True}
    status, answer = ask(plane, "POST", "/api/v1/load", {**body, "temperature": 1})
    assert (status, answer["status"], answer["model_name"], answer["recipe"]) == (200, "success", "here", "llamacpp")
    assert answer["ignored"] == ["temperature"]
    assert launcherd.asked == [
        LoadModel(
            model=ModelName("here"), context_tokens=4096, extra_args=("--no-mmap", "-b", "512"), pinned=True
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "status"),
    [("backend_unknown", 400), ("model_not_found", 404), ("unloaded", 409), ("engine_exited", 500), ("idle", 503)],
)
def test_what_launcherd_refuses_is_told_in_its_words(
    plane: Plane, launcherd: Scripted, code: str, status: int
) -> None:
    """docs/spec/lemonade.md 5 and 17."""
    launcherd.refuse = RequestRefused(code, "because; installed are cpu, vulkan")
    got, answer = ask(plane, "POST", "/v0/load", {"model_name": "here"})
    assert got == status
    assert set(answer["error"]) == {"message", "type", "code", "param"}
    assert (answer["error"]["code"], answer["error"]["message"]) == (code, launcherd.refuse.detail)


def test_a_registered_model_is_downloaded_before_it_is_loaded(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 16 and 23."""
    launcherd.say(RegistryChanged(models=(RegisteredModel(name=ModelName("known"), checkpoint="org/known:Q4"),)))
    plane.slot("known", "ready")
    assert ask(plane, "POST", "/api/v1/load", {"model_name": "known"}, x_from="elsewhere")[0] == 401
    assert launcherd.asked == []
    assert ask(plane, "POST", "/api/v1/load", {"model_name": "known"})[0] == 200
    assert launcherd.asked == [PullModel(model="known"), LoadModel(model=ModelName("known"))]


def test_a_load_may_register_a_model_that_launcherd_gives_another_name(plane: Plane, launcherd: Scripted) -> None:
    launcherd.subject = "mine-Q4"
    plane.slot("mine-Q4", "ready")
    body = {"model_name": "user.mine", "checkpoint": "me/mine:Q4", "recipe": "llamacpp", "vision": True}
    assert ask(plane, "POST", "/api/v1/load", body)[1]["model_name"] == "mine-Q4"
    pull, load = launcherd.asked
    assert isinstance(pull, PullModel)
    assert (pull.model, pull.checkpoint, pull.labels) == ("user.mine", "me/mine:Q4", ("vision",))
    assert load == LoadModel(model=ModelName("mine-Q4"))


def test_a_client_that_leaves_ends_its_wait_and_not_the_load(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 21."""
    launcherd.hold = asyncio.Event()
    body = b'{"model_name":"here"}'
    with socket.create_connection(("127.0.0.1", plane.port), timeout=10) as connection:
        head = b"POST /api/v1/load HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        wait_until(lambda: launcherd.of(LoadModel), 5, "the load waits")
        assert plane.call(lambda: len(plane._client._pending)) == 1
    wait_until(lambda: plane.call(lambda: len(plane._client._pending)) == 0, 5, "nobody waits any more")
    assert launcherd.of(UnloadModel) == []
    launcherd.release()


def test_unload(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 18."""
    status, answer = ask(plane, "POST", "/api/v1/unload", {"model_name": "here"})
    assert (status, answer["error"]["code"]) == (404, "not_loaded")
    plane.slot("here", "draining")
    plane.slot("here", "failed")
    assert ask(plane, "POST", "/api/v1/unload", {"model_name": "here"})[0] == 200
    assert ask(plane, "POST", "/api/v1/unload")[1]["status"] == "success"
    assert launcherd.asked == [UnloadModel(model=ModelName("here")), UnloadModel()]
    assert ask(plane, "POST", "/api/v1/unload", b"nonsense")[0] == 400
    assert len(launcherd.asked) == 2


def test_delete_pin_and_limits(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 4 and 20."""
    plane.call(lambda: setattr(plane.launcherd, "other", launcherd.answer))
    result = in_background(lambda: ask(plane, "POST", "/api/v1/delete", {"model_name": "here"}))
    wait_until(lambda: launcherd.of(DeleteModel), 5, "it is asked")
    launcherd.say(InventoryChanged(models=()))
    wait_until(lambda: result, 5, "it is answered")
    assert result[0] == (200, {"status": "success", "message": "Deleted model: here", "model_name": "here"})
    for path in ("/internal/pin", "/api/v1/internal/pin"):
        assert ask(plane, "POST", path, {"model": "x", "pinned": True})[1]["pinned"] is True
    limits = in_background(lambda: ask(plane, "POST", "/internal/set", {"max_loaded_models": -1}))
    wait_until(lambda: launcherd.of(SetMaxLoadedModels), 5, "it is asked")
    launcherd.say(LimitsChanged(max_loaded_models=(-1, -1, -1, -1, -1)))
    wait_until(lambda: limits, 5, "it is answered")
    assert limits[0] == (200, {"status": "success", "updated": {"max_loaded_models": -1}})
    assert ask(plane, "GET", "/api/v1/health")[1]["max_models"]["image"] == -1
    began = time.monotonic()
    assert ask(plane, "POST", "/internal/set", {"max_loaded_models": [-1, -1, -1, -1, -1]})[0] == 200
    assert time.monotonic() - began < MIRROR_SECONDS, "what is so already is not waited for"
    assert launcherd.of(PinModel) == [PinModel(model=ModelName("x"), pinned=True)] * 2
    for wrong in ({"max_loaded_models": 0}, {"max_loaded_models": -2}, {"port": 1}):
        assert ask(plane, "POST", "/v0/internal/set", wrong)[0] == 400
    assert launcherd.of(SetMaxLoadedModels)[0] == SetMaxLoadedModels(limits=(-1,))
    assert len(launcherd.of(SetMaxLoadedModels)) == 2


@pytest.mark.parametrize("path", ["pull", "delete", "internal/set", "internal/pin"])
def test_what_changes_the_machine_is_checked_before_the_body_is_read(
    plane: Plane, launcherd: Scripted, path: str
) -> None:
    """docs/spec/lemonade.md 23."""
    status, answer = ask(plane, "POST", f"/api/v1/{path}", b"nonsense", x_from="elsewhere")
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (401, "token_required", "authentication_error")
    assert launcherd.asked == []


def test_a_body_is_bounded(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 6."""
    large = b'{"model_name":"here","x":"' + b"x" * 1024 * 1024 + b'"}'
    assert ask(plane, "POST", "/api/v1/load", large)[0] == 413
    connection = http.client.HTTPConnection("127.0.0.1", plane.port, timeout=10)
    connection.request("POST", "/api/v1/load", iter([large]), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert launcherd.asked == []


def test_without_launcherd_it_is_said(plane: Plane, launcherd: Scripted) -> None:
    launcherd.refuse = RequestRefused("starting", "launcherd has just started", 1.0)
    status, headers, _ = plane.request("POST", "/api/v1/load", {"model_name": "here"})
    assert (status, headers["retry-after"]) == (503, "1")


def test_an_idle_node_loads_nothing(plane: Plane, launcherd: Scripted) -> None:
    plane.is_idle = True
    assert ask(plane, "POST", "/api/v1/load", {"model_name": "here"})[1]["error"]["code"] == "idle"
    assert ask(plane, "GET", "/api/v1/health")[0] == 200


# -- the walk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
def test_another_method_is_405_with_allow_and_another_path_404(
    plane: Plane, launcherd: Scripted, prefix: str
) -> None:
    """docs/spec/lemonade.md 2 and 5."""
    for path in ("load", "unload", "pull", "delete", "internal/set", "internal/pin", "chat/completions", "rerank"):
        for method in ("GET", "PUT", "DELETE"):
            status, headers, body = plane.request(method, f"{prefix}/{path}")
            assert (status, headers["allow"]) == (405, "POST, OPTIONS"), (method, path)
            assert set(json.loads(body)["error"]) == {"message", "type", "code", "param"}
    for path in ("health", "stats", "models", "models/x", "system-info"):
        status, headers, _ = plane.request("POST", f"{prefix}/{path}", {})
        assert (status, headers["allow"]) == (405, "GET, HEAD, OPTIONS"), path
    for path in ("health", "stats", "models", "models/here", "system-info"):
        status, _, body = plane.request("HEAD", f"{prefix}/{path}")
        assert (status, body) == (200, b""), path
    for path in ("params", "log-level", "internal/shutdown", "internal/config", "downloads"):
        assert plane.request("GET", f"{prefix}/{path}")[0] == 404
        assert plane.request("POST", f"{prefix}/{path}", {})[0] == 404
    assert launcherd.asked == []


def test_host_and_origin_are_checked_here_too(plane: Plane, launcherd: Scripted) -> None:
    """docs/spec/lemonade.md 22."""
    assert ask(plane, "POST", "/api/v1/unload", {}, Host="evil.example")[0] == 403
    assert launcherd.asked == []
