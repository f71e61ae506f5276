"""proxyd's way into the tunnel: what it may say, what it hears, what happens when it leaves."""

from __future__ import annotations

import asyncio
import stat
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.tunneld.framing import OpeningReader, encode_frame
from services.tunneld.io.data_socket import MESSAGE_LIMIT_BYTES, DataSocket
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.errors import PeerUnreachable, StreamLost
from shared.ids import ModelName, PeerId, RequestId
from shared.io.drive import Tasks
from shared.messages.daemon import Done, Refused
from shared.messages.tunnel import OpenHttp, StreamOpened
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import EndNode, TestMesh, end_nodes, read_all
from tests.tunneld.tunnel_scene import read_message

MESH = TestMesh()


class Door:
    """A data socket of ``a`` with a connection to ``b``, whose streams the test serves."""

    def __init__(self, path: Path, b: EndNode, counts: Counter[str], silent: list[float]) -> None:
        self.silent = silent
        self.path = path
        self.b = b
        self.counts = counts

    async def ask(self, peer: PeerId | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        request = OpenHttp(
            peer_id=peer or self.b.peer_id, model=ModelName("m"), request_id=RequestId("r"), deadline_seconds=5.0
        )
        writer.write(encode_frame(codec.encode(request)))
        return reader, writer

    async def asked(self) -> TunnelStream:
        """The stream as the serving node gets it, its opening read."""
        stream = await self.b.next_stream()
        opening = OpeningReader()
        while (head := opening.feed(await stream.read())) is None:
            pass
        assert head.header == {"model": "m", "request_id": "r", "deadline_seconds": 5.0}
        return stream


@asynccontextmanager
async def door(home: Path) -> AsyncIterator[Door]:
    tasks, counts = Tasks(), Counter[str]()
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)

        async def open_stream(peer_id: PeerId) -> TunnelStream:
            if peer_id != b.peer_id:
                raise PeerUnreachable(f"no link with {peer_id}: it left")
            return await connection.open_stream()

        def count(what: str) -> None:
            counts[what] += 1

        silent = [0.0]
        data = DataSocket(home / "d", open_stream, count, tasks, silent_seconds=lambda _peer: silent[0])
        await data.start()
        try:
            yield Door(home / "d", b, counts, silent)
        finally:
            data.close()
            await tasks.cancel()


@bounded
async def test_bytes_go_both_ways_after_the_answer_and_the_end_is_passed_on(mesh_home: Path) -> None:
    async with door(mesh_home) as here:
        reader, writer = await here.ask()
        stream = await here.asked()
        await stream.write(encode_frame(codec.encode(StreamOpened(queue_seconds=0.5))))
        assert await read_message(reader) == StreamOpened(queue_seconds=0.5)
        writer.write(b"x" * 300_000)
        got = b""
        while len(got) < 300_000:
            got += await stream.read()
        assert got == b"x" * 300_000
        await stream.write(b"answer")
        await stream.finish()
        assert await reader.read() == b"answer"
        assert await read_all(stream) == b""
        writer.close()


@bounded
async def test_a_refusal_is_passed_on(mesh_home: Path) -> None:
    async with door(mesh_home) as here:
        reader, writer = await here.ask()
        stream = await here.asked()
        refused = Refused(code="overloaded", detail="256 wait already", retry_after_seconds=2.0)
        await stream.write(encode_frame(codec.encode(refused)))
        await stream.finish()
        assert await read_message(reader) == refused
        assert await reader.read() == b""
        writer.close()


@bounded
async def test_without_a_link_the_reason_comes_at_once(mesh_home: Path) -> None:
    async with door(mesh_home) as here:
        reader, writer = await here.ask(PeerId("12gone"))
        assert await read_message(reader) == Refused(code="peer_unreachable", detail="no link with 12gone: it left")
        writer.close()


@bounded
async def test_a_silent_peer_is_not_waited_for(mesh_home: Path) -> None:
    """Loading a model may take long, silence of the whole peer may not."""
    async with door(mesh_home) as here:
        reader, writer = await here.ask()
        await here.asked()
        here.silent[0] = 2.5
        assert await read_message(reader) == Refused(
            code="peer_unreachable", detail="the node has been silent for 2.5 s"
        )
        writer.close()


@pytest.mark.parametrize("answer", [codec.encode(Done()), b"\xc1", b""])
@bounded
async def test_a_peer_that_answers_nonsense_is_no_answer(answer: bytes, mesh_home: Path) -> None:
    async with door(mesh_home) as here:
        reader, writer = await here.ask()
        stream = await here.asked()
        await stream.write(encode_frame(answer))
        refused = await read_message(reader)
        assert isinstance(refused, Refused)
        assert refused.code == "peer_unreachable"
        writer.close()


@pytest.mark.parametrize("answered", [False, True])
@bounded
async def test_a_client_that_leaves_cuts_the_stream_at_once(answered: bool, mesh_home: Path) -> None:
    async with door(mesh_home) as here:
        reader, writer = await here.ask()
        stream = await here.asked()
        if answered:
            await stream.write(encode_frame(codec.encode(StreamOpened())))
            await read_message(reader)
        writer.close()
        with pytest.raises(StreamLost):
            await read_all(stream)


@bounded
async def test_a_cut_stream_ends_before_the_answer_is_complete(mesh_home: Path) -> None:
    async with door(mesh_home) as here:
        reader, writer = await here.ask()
        stream = await here.asked()
        await stream.write(encode_frame(codec.encode(StreamOpened())))
        await read_message(reader)
        await stream.write(b"half")
        assert await reader.read(10) == b"half"
        stream.abort("the engine broke off")
        try:
            assert await reader.read() == b""
        except OSError:
            pass
        await until(lambda: here.counts["tunnel_requests_failed"] == 1)
        writer.close()


TOO_LONG = (MESSAGE_LIMIT_BYTES + 1).to_bytes(4)


@pytest.mark.parametrize("wire", [b"\xff\xff\xff\xff", TOO_LONG, encode_frame(b"\xc1"), encode_frame(b""), b"ab"])
@bounded
async def test_nonsense_from_a_local_client_only_ends_its_connection(wire: bytes, mesh_home: Path) -> None:
    async with door(mesh_home) as here:
        reader, writer = await asyncio.open_unix_connection(str(here.path))
        writer.write(wire)
        writer.write_eof()
        try:
            assert await reader.read() == b""
        except OSError:
            pass
        writer.close()
        await until(lambda: here.counts["tunnel_requests_failed"] == 1)


@bounded
async def test_only_the_owner_may_connect_and_a_stale_socket_is_replaced(mesh_home: Path) -> None:
    (mesh_home / "d").write_text("left by an earlier life")
    async with door(mesh_home) as here:
        mode = here.path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
