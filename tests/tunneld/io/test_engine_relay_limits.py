"""Peers that send too much or stay too long, engines that stop: nothing holds a lease, nothing fills memory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.tunneld.framing import FrameReader, StreamType, encode_opening
from services.tunneld.io import engine_relay
from services.tunneld.io.enrolment import read_frame
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.errors import StreamLost
from shared.ids import ModelName
from shared.messages.tunnel import StreamOpened
from shared.multiaddrs import Transport
from shared.paths import NodePaths
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script
from tests.launcherd.launcher_node import LauncherNode, change_script, launcher_node
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import read_all
from tests.tunneld.tunnel_scene import Answer, Scene, read_message, tunnel_scene

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b"
EMBEDDINGS = b"POST /v1/embeddings HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b"
MIB = 1024 * 1024


def chat(*, stream: bool = True) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": stream}).encode()
    return CHAT % (len(body), body)


@pytest.fixture(scope="module")
def node() -> Iterator[LauncherNode]:
    home = Path(tempfile.mkdtemp(prefix="limits-", dir="/tmp"))
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


def requests_seen(node: LauncherNode) -> int:
    seen = node.home / "seen"
    return len(seen.read_text().splitlines()) if seen.exists() else 0


async def ask(scene: Scene) -> TunnelStream:
    """A stream of its own, without the asking tunneld's manners."""
    stream = await scene.connection.open_stream()
    header = {"model": "alpha", "request_id": "r", "deadline_seconds": 20}
    await stream.write(encode_opening(StreamType.TUNNEL_HTTP, header))
    return stream


async def answer_of(stream: TunnelStream) -> codec.Message:
    return codec.decode(await read_frame(stream, FrameReader(16 * 1024)))


async def flood(stream: TunnelStream) -> None:
    """Returns when the other side has cut it."""
    try:
        while True:
            await stream.write(b"x" * 65_536)
    except StreamLost:
        return


def in_use(scene: Scene) -> int:
    return sum(held.in_use for held in scene.leases.held())


@pytest.mark.parametrize("transport", ["tcp", "quic"])
@bounded
async def test_bytes_beyond_the_request_end_it(transport: Transport, node: LauncherNode) -> None:
    """They would fill the queue, and behind a full queue nobody sees the asker leave."""
    await script(node, first_token_seconds=25.0)
    try:
        async with tunnel_scene(node.home, transport) as scene:
            before = requests_seen(node)
            stream = await ask(scene)
            assert isinstance(await answer_of(stream), StreamOpened)
            await stream.write(chat())
            await until(lambda: requests_seen(node) > before)
            assert in_use(scene) == 1
            began = asyncio.get_running_loop().time()
            await flood(stream)
            await until(lambda: in_use(scene) == 0)
            assert asyncio.get_running_loop().time() - began < 1
            assert scene.counts["tunnel_requests_refused"] == 1
    finally:
        await script(node, first_token_seconds=0.0)


@bounded
async def test_bytes_that_come_with_the_body_and_are_too_many_end_it(node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        stream = await ask(scene)
        await answer_of(stream)
        await stream.write(chat() + b"x")
        with pytest.raises(StreamLost, match="Content-Length"):
            await read_all(stream)
        await until(lambda: in_use(scene) == 0)
        assert scene.counts["tunnel_requests_refused"] == 1


@bounded
async def test_a_flood_while_the_request_waits_gives_up_its_place(node: LauncherNode) -> None:
    await script(node, first_token_seconds=25.0)
    try:
        async with tunnel_scene(node.home) as scene:
            before = requests_seen(node)
            busy = [await ask(scene) for _ in range(2)]
            for stream in busy:
                assert isinstance(await answer_of(stream), StreamOpened)
                await stream.write(chat())
            await until(lambda: requests_seen(node) == before + 2)
            waiting = await ask(scene)
            await until(lambda: scene.leases.waiting(ModelName("alpha")) == 1)
            flooding = asyncio.ensure_future(flood(waiting))
            await until(lambda: scene.leases.waiting(ModelName("alpha")) == 0, 1)
            with pytest.raises(StreamLost, match="before there was a place"):
                await answer_of(waiting)
            assert scene.counts["tunnel_requests_refused"] == 1
            for stream in (waiting, *busy):
                stream.abort("over")
            await flooding
            await until(lambda: in_use(scene) == 0)
    finally:
        await script(node, first_token_seconds=0.0)


@bounded
async def test_who_waited_is_told_how_long(node: LauncherNode) -> None:
    await script(node, first_token_seconds=25.0)
    try:
        async with tunnel_scene(node.home) as scene:
            began = asyncio.get_running_loop().time()
            busy = [await ask(scene) for _ in range(2)]
            for stream in busy:
                assert isinstance(await answer_of(stream), StreamOpened)
            waiting = await ask(scene)
            await until(lambda: scene.leases.waiting(ModelName("alpha")) == 1)
            seen_waiting_at = asyncio.get_running_loop().time()
            busy[0].abort("over")
            cut_at = asyncio.get_running_loop().time()
            opened = await answer_of(waiting)
            assert isinstance(opened, StreamOpened)
            assert cut_at - seen_waiting_at <= opened.queue_seconds <= asyncio.get_running_loop().time() - began
            assert opened.queue_seconds > 0
            for stream in (waiting, busy[1]):
                stream.abort("over")
            await until(lambda: in_use(scene) == 0)
    finally:
        await script(node, first_token_seconds=0.0)


@bounded
async def test_the_lease_ends_with_the_answer_however_long_the_asker_stays(node: LauncherNode) -> None:
    async with tunnel_scene(node.home) as scene:
        stream = await ask(scene)
        await answer_of(stream)
        await stream.write(chat())
        assert (await read_all(stream)).endswith(b"0\r\n\r\n")
        # Its own direction is still open.
        await until(lambda: in_use(scene) == 0, 1)
        stream.abort("over")


@bounded
async def test_an_engine_that_stops_taking_a_body_is_probed(
    node: LauncherNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_relay, "SILENT_SECONDS", 0.2)
    async with tunnel_scene(node.home) as scene:
        suspected: list[str] = []
        suspect = scene.leases.suspect

        def note(lease: Any, detail: str, *, broken: bool) -> None:
            suspected.append(detail)
            suspect(lease, detail, broken=broken)

        monkeypatch.setattr(scene.leases, "suspect", note)
        stream = await ask(scene)
        await answer_of(stream)
        engines = node.engines()
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        try:
            await stream.write(CHAT % (64 * MIB, b""))
            sending = asyncio.ensure_future(flood(stream))
            await until(lambda: suspected)
        finally:
            for pid in engines:
                os.kill(pid, signal.SIGCONT)
        stream.abort("over")
        await sending
        await until(lambda: in_use(scene) == 0)


@pytest.mark.parametrize(("transport", "texts", "most"), [("tcp", 500_000, 16 * MIB), ("quic", 100_000, 2 * MIB)])
@bounded
async def test_what_nobody_reads_stays_at_the_engine(
    transport: Transport, texts: int, most: int, node: LauncherNode
) -> None:
    """TRAPS 39. ``most`` is what sockets of the kernel hold on the way, and our buffers."""
    async with tunnel_scene(node.home, transport) as scene:
        reader, writer = await scene.open()
        await read_message(reader)
        body = json.dumps({"input": [""] * texts}, separators=(",", ":")).encode()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(EMBEDDINGS % (len(body), body))
        sent = [0, 0, 0, 0]

        def still() -> bool:
            sent.append(scene.served[-1].bytes_sent)
            return sent[-1] > 100_000 and len(set(sent[-60:])) == 1

        await until(still)
        stopped_at = sent[-1]
        assert stopped_at < most
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        answer = Answer()
        while not answer.complete:
            answer.feed(await reader.read(MIB))
        assert len(json.loads(answer.body)["data"]) == texts
        assert len(answer.body) > stopped_at
        writer.close()
        await until(lambda: in_use(scene) == 0)


@bounded
async def test_a_killed_engine_is_a_loss_and_no_end(node: LauncherNode) -> None:
    """Last in this file: launcherd starts the engine anew."""
    await script(node, crash_after_tokens=3)
    async with tunnel_scene(node.home) as scene:
        stream = await ask(scene)
        await answer_of(stream)
        await stream.write(chat())
        with pytest.raises(StreamLost, match="engine"):
            await read_all(stream)
        await until(lambda: in_use(scene) == 0)
        assert scene.counts["engines_failed"] == 1
