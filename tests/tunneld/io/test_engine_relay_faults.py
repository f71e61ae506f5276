"""Engines and asking nodes that misbehave. Rules: docs/spec/tunnel_http.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from services.tunneld.framing import FrameReader, StreamType, encode_opening
from services.tunneld.io import engine_relay
from services.tunneld.io.connection import Connection
from services.tunneld.io.engine_relay import EngineRelay
from services.tunneld.io.enrolment import read_frame
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.credit_events import Held
from shared.errors import StreamLost
from shared.ids import ModelName, SlotId
from shared.io.drive import Tasks
from shared.io.lease_client import Lease, LeaseClient
from shared.messages.tunnel import StreamOpened
from shared.paths import NodePaths
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script
from tests.launcherd.launcher_node import LauncherNode, launcher_node, pid_of
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import TestMesh, end_nodes, read_all
from tests.tunneld.tunnel_scene import Answer, Scene, read_message, tunnel_scene

MESH = TestMesh()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
ASKED = {"model": "alpha", "request_id": "r", "deadline_seconds": 20}
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10_000, "stream": True}).encode()
REQUEST = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


# -- a real launcherd with a scripted engine -------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[LauncherNode]:
    home = Path(tempfile.mkdtemp(prefix="relay-", dir="/tmp"))  # Short: unix sockets live below it.
    NodePaths(home).prepare()
    (home / "models").mkdir()
    tiny_models.write_llm(home / "models" / "alpha.gguf", name="alpha")
    with launcher_node(home, home / "models") as running:
        running.use_script(Script(tokens=10_000, token_seconds=0.005))
        running.start()
        yield running
    shutil.rmtree(home, ignore_errors=True)


async def opened(scene: Scene) -> tuple[TunnelStream, StreamOpened]:
    """A stream as a node's tunneld opens it, with its lease."""
    stream = await scene.connection.open_stream()
    await stream.write(encode_opening(StreamType.TUNNEL_HTTP, ASKED))
    answer = codec.decode(await read_frame(stream, FrameReader()))
    assert isinstance(answer, StreamOpened)
    return stream, answer


@bounded
async def test_an_engine_killed_in_mid_answer_is_a_loss_at_both_ends(node: LauncherNode) -> None:
    """An answer that ends before its HTTP says so is cut, never ended; launcherd is told to probe the engine."""
    async with tunnel_scene(node.home) as scene:
        stream, _ = await opened(scene)
        reader, writer = await scene.open()
        assert isinstance(await read_message(reader), StreamOpened)
        await stream.write(REQUEST)
        writer.write(REQUEST)
        assert (await stream.read()).startswith(b"HTTP/1.1 200")
        answer = Answer()
        answer.feed(await reader.read(65536))
        engine = psutil.Process(await asyncio.to_thread(pid_of, node, "alpha"))
        engine.send_signal(signal.SIGKILL)
        with pytest.raises(StreamLost, match="engine"):
            await read_all(stream)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                answer.feed(data)
        writer.close()
        assert not answer.complete
        assert scene.counts["engines_failed"] == 2
        await until(lambda: not any(held.in_use for held in scene.leases.held()))


# -- an engine that is nothing but a socket, under leases that always are there --------------------------------------


class Places:
    """Plays the lease client: every request gets a lease on ``base_url``."""

    def __init__(self, base_url: str) -> None:
        self._held = Held(SlotId("s"), ModelName("alpha"), base_url, "key", parallel=8)
        self.given = 0
        self.suspected: list[str] = []

    def try_acquire(self, _model: ModelName) -> Lease:
        self.given += 1
        return Lease(self._held)

    def release(self, lease: Lease) -> None:
        self.given -= not lease.released
        lease.released = True

    def suspect(self, _lease: Lease, detail: str, *, broken: bool) -> None:
        self.suspected.append(f"{detail} {broken}")


class Bench:
    """``connection`` leads to a relay whose engine is served by the test."""

    def __init__(self, connection: Connection, places: Places, counts: Counter[str]) -> None:
        self.connection = connection
        self.places = places
        self.counts = counts

    async def ask(self, request: bytes) -> TunnelStream:
        stream = await self.connection.open_stream()
        await stream.write(encode_opening(StreamType.TUNNEL_HTTP, ASKED))
        await read_frame(stream, FrameReader())
        await stream.write(request)
        return stream


@contextlib.asynccontextmanager
async def bench(answer: bytes | None) -> AsyncIterator[Bench]:
    """The engine reads a request's head, answers this and closes; None: it waits for more."""
    tasks, counts = Tasks(), Counter[str]()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    places = Places(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    def count(what: str) -> None:
        counts[what] += 1

    relay = EngineRelay(cast(LeaseClient, places), count)
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)

        async def serve() -> None:
            while True:
                came, stream = await b.streams.get()
                await stream.read()
                tasks.start(relay.serve(stream, ASKED, b"", came.peer), "serve")

        tasks.start(serve(), "accept")
        try:
            yield Bench(connection, places, counts)
        finally:
            await tasks.cancel()
            server.close()


EMPTY = HEAD + b"content-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ],
)
@bounded
async def test_a_whole_answer_arrives_byte_for_byte_and_ends(answer: bytes) -> None:
    async with bench(answer) as here:
        stream = await here.ask(EMPTY)
        assert await read_all(stream) == answer
        await stream.finish()
        await until(lambda: here.places.given == 0)
        assert here.places.suspected == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"no HTTP at all\r\n\r\n",
    ],
)
@bounded
async def test_a_broken_answer_is_a_loss_and_launcherd_hears_of_it(answer: bytes) -> None:
    async with bench(answer) as here:
        stream = await here.ask(EMPTY)
        with pytest.raises(StreamLost, match="the engine"):
            await read_all(stream)
        await until(lambda: here.places.given == 0)
        assert [words.endswith("True") for words in here.places.suspected] == [True]


@bounded
async def test_an_answer_whose_end_could_not_be_told_from_a_loss_is_not_passed_on() -> None:
    async with bench(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: half") as here:
        stream = await here.ask(EMPTY)
        with pytest.raises(StreamLost, match="where it ends"):
            await stream.read()
        assert here.counts["answers_without_length"] == 1
        await until(lambda: here.places.given == 0)


@bounded
async def test_a_request_that_stops_coming_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_relay, "BODY_SILENT_SECONDS", 0.05)
    async with bench(None) as here:
        stream = await here.ask(HEAD + b"content-length: 10\r\n\r\nhalf")
        with pytest.raises(StreamLost, match="nothing of the request came"):
            await stream.read()
        await until(lambda: here.places.given == 0)
        assert here.places.suspected == []


@bounded
async def test_a_whole_answer_is_not_cut_because_its_reader_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_relay, "END_SECONDS", 0.05)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000
    async with bench(answer) as here:
        stream = await here.ask(EMPTY)
        first = await stream.read()
        # The engine is done and the lease is back; the rest waits between the two nodes.
        await until(lambda: here.places.given == 0)
        now = asyncio.get_running_loop().time
        began = now()
        await until(lambda: now() - began > 0.2)
        assert first + await read_all(stream) == answer
        await stream.finish()
        await until(lambda: here.connection.open_streams == 0)
