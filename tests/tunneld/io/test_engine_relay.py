"""Requests of other nodes at a real engine under real leases. Rules: docs/spec/tunnel_http.md."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.tunneld.framing import StreamType, encode_opening
from services.tunneld.io.engine_relay import EngineRelay
from shared.errors import SchemaError, StreamLost
from shared.messages.daemon import Refused
from shared.messages.tunnel import StreamOpened
from shared.multiaddrs import Transport
from shared.paths import NodePaths
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script
from tests.launcherd.launcher_node import LauncherNode, change_script, launcher_node
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import read_all
from tests.tunneld.tunnel_scene import Answer, read_message, tunnel_scene

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def chat(**fields: Any) -> bytes:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **fields}
    return json.dumps(body).encode()


@pytest.fixture(scope="module")
def node() -> Iterator[LauncherNode]:
    """A launcherd with a scripted engine, shared: each test leaves the script as it found it."""
    home = Path(tempfile.mkdtemp(prefix="relay-", dir="/tmp"))  # Short: unix sockets live below it.
    NodePaths(home).prepare()
    folder = home / "models"
    folder.mkdir()
    tiny_models.write_llm(folder / "alpha.gguf", name="alpha")
    with launcher_node(home, folder) as running:
        running.use_script(Script(tokens=8, record_file=str(home / "seen")))
        running.start()
        yield running
    shutil.rmtree(home, ignore_errors=True)


async def script(node: LauncherNode, **changes: object) -> None:
    """Make the engine behave otherwise from now on."""

    def change() -> None:
        lease = node.acquire("alpha", holder="test")
        change_script(lease, **changes)
        node.give_back(lease, holder="test")

    await asyncio.to_thread(change)


def seen(node: LauncherNode) -> dict[str, Any]:
    return dict(json.loads((node.home / "seen").read_text().splitlines()[-1]))


@pytest.mark.parametrize("transport", ["tcp", "quic"])
@bounded
async def test_a_request_is_loaded_leased_and_answered(node: LauncherNode, transport: Transport) -> None:
    async with tunnel_scene(node.home, transport) as scene:
        answer = await scene.request(HEAD + b"authorization: Bearer mine\r\nx-request-id: r7\r\n", chat())
        assert isinstance(answer.opened, StreamOpened)
        assert (answer.status, answer.complete) == (200, True)
        assert json.loads(answer.body)["choices"][0]["message"]["content"].startswith("w0 w1")
        names = {name.lower(): value for name, value in seen(node)["headers"]}
        assert names["x-request-id"] == "r7"
        assert names["authorization"] != "Bearer mine"
        assert seen(node)["body"].encode() == chat()
        assert scene.counts["tunnel_requests"] == 1
        await until(lambda: not any(held.in_use for held in scene.leases.held()))


@bounded
async def test_streams_flow_and_connections_are_used_again(node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        for _ in range(20):
            answer = await scene.request(HEAD, chat(stream=True))
            assert answer.complete
            assert answer.body.endswith(b"data: [DONE]\n\n")
        assert scene.connection.counters.streams_opened == 20
        assert scene.connection.open_streams == 0


@bounded
async def test_many_at_once(node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        answers = await asyncio.gather(*(scene.request(HEAD, chat(stream=number % 2 == 0)) for number in range(24)))
        assert all(answer.complete and answer.status == 200 for answer in answers)


@pytest.mark.parametrize("path", [b"/props", b"/slots", b"/health", b"/v1/models", b"/scripted"])
@bounded
async def test_only_inference_reaches_an_engine(node: LauncherNode, path: bytes) -> None:
    """Only a POST to a path of the inference list goes to an engine; everything else is refused and counted."""
    async with tunnel_scene(node.home) as scene:
        before = (node.home / "seen").read_text() if (node.home / "seen").exists() else ""
        answer = await scene.request(b"POST " + path + b" HTTP/1.1\r\n")
        assert (answer.status, answer.complete) == (0, False)
        await until(lambda: scene.counts["tunnel_requests_refused"] == 1)
        assert ((node.home / "seen").read_text() if (node.home / "seen").exists() else "") == before


@bounded
async def test_a_refusal_of_launcherd_arrives_as_it_was_said(node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        reader, writer = await scene.open("no-such-model")
        refused = await read_message(reader)
        assert isinstance(refused, Refused)
        assert "no-such-model" in refused.detail
        assert await reader.read() == b""
        writer.close()
        await until(lambda: scene.connection.open_streams == 0)


@bounded
async def test_a_client_that_leaves_is_noticed_at_the_engine_within_a_second(node: LauncherNode) -> None:
    """TRAPS 26: during prefill no byte flows that could fail."""
    await script(node, first_token_seconds=20.0)
    try:
        async with tunnel_scene(node.home) as scene:
            reader, writer = await scene.open()
            assert isinstance(await read_message(reader), StreamOpened)
            body = chat(stream=True)
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: any(held.in_use for held in scene.leases.held()))
            await until(lambda: seen(node)["body"].encode() == body)
            began = asyncio.get_running_loop().time()
            writer.transport.abort()
            await until(lambda: not any(held.in_use for held in scene.leases.held()))
            assert asyncio.get_running_loop().time() - began < 1
    finally:
        await script(node, first_token_seconds=0.0)


@bounded
async def test_a_cut_answer_is_never_complete(node: LauncherNode) -> None:
    """An answer that ends before its HTTP says so is cut, never ended."""
    await script(node, cut_after_tokens=3)
    try:
        async with tunnel_scene(node.home) as scene:
            for stream in (True, False):
                answer = await scene.request(HEAD, chat(stream=stream))
                assert not answer.complete
            assert scene.counts["engines_failed"] == 2
    finally:
        await script(node, cut_after_tokens=None)


@bounded
async def test_a_slow_reader_holds_the_engine_back(node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        reader, writer = await scene.open()
        await read_message(reader)
        body = chat(stream=True, max_tokens=20_000)
        script_tokens = 20_000
        await script(node, tokens=script_tokens)
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer = Answer()
        while data := await reader.read(16_384):
            answer.feed(data)
            await asyncio.sleep(0)
        assert answer.complete
        assert answer.body.count(b"data: ") > script_tokens
        writer.close()
    await script(node, tokens=8)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"model": "alpha"},
        {"model": 1, "request_id": "r", "deadline_seconds": 1},
        {"model": "", "request_id": "r", "deadline_seconds": 1},
        {"model": "alpha", "request_id": "r", "deadline_seconds": -1},
        {"model": "alpha" * 100, "request_id": "r", "deadline_seconds": 1},
    ],
)
@bounded
async def test_a_header_that_says_nothing_usable_is_refused(header: dict[str, Any], node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        stream = await scene.connection.open_stream()
        relay = EngineRelay(scene.leases, lambda _what: None)
        with pytest.raises(SchemaError):
            await relay.serve(stream, header, b"", scene.connection.peer)
        stream.abort("")


@bounded
async def test_an_asker_that_ends_its_direction_early_has_given_up(node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        stream = await scene.connection.open_stream()
        header = {"model": "alpha", "request_id": "r", "deadline_seconds": 5}
        await stream.write(encode_opening(StreamType.TUNNEL_HTTP, header))
        await stream.finish()
        with pytest.raises(StreamLost):
            await read_all(stream)
        await until(lambda: not any(held.in_use for held in scene.leases.held()))


