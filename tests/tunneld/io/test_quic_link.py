"""The private parts of aioquic that links rely on, and what they achieve with them."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial

from aioquic import tls
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.stream import QuicStream as CoreStream

from services.tunneld.io.quic_link import DONE_KEPT, WINDOW_BYTES, QuicLink
from services.tunneld.io.quic_peers import QuicMeshConnection
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import TestMesh, end_nodes, read_all

MESH = TestMesh()


def test_the_names_still_exist() -> None:
    quic = QuicConnection(configuration=QuicConfiguration(is_client=True))
    assert list(inspect.signature(quic._write_stream_limits).parameters) == ["builder", "space", "stream"]
    assert list(inspect.signature(quic._initialize).parameters) == ["peer_cid"]
    assert quic._streams == {}
    assert quic._is_client is True
    stream = CoreStream(stream_id=0)
    assert (stream.sender._buffer_start, stream.sender._buffer_stop, stream.receiver.highest_offset) == (0, 0, 0)
    assert stream.max_stream_data_local == 0
    context = tls.Context(is_client=False)
    assert context._request_client_certificate is False
    assert context._peer_certificate is None
    assert context._peer_certificate_chain == []


def link_of(connection: object) -> QuicLink:
    assert isinstance(connection, QuicMeshConnection)
    return connection._link


def few_streams(link: QuicLink) -> bool:
    return len(link.quic._streams) < 10


@bounded
async def test_the_window_follows_what_was_read_and_not_what_arrived() -> None:
    async with end_nodes("quic", MESH.credentials(), MESH.credentials()) as (a, b):
        stream = await (await a.dial(b)).open_stream()
        writing = asyncio.ensure_future(stream.write(b"x" * 4 * WINDOW_BYTES))
        came = await b.next_stream()
        back = link_of(await b.connections.get())
        core = back.quic._streams[came.stream_id]  # type: ignore[attr-defined]
        await until(lambda: core.receiver.highest_offset >= WINDOW_BYTES * 9 // 10)
        assert core.max_stream_data_local == WINDOW_BYTES
        got = 0
        while got < 4 * WINDOW_BYTES:
            got += len(await came.read())
            assert core.max_stream_data_local <= got + WINDOW_BYTES
        await writing


@bounded
async def test_streams_that_are_over_are_forgotten() -> None:
    async with end_nodes("quic", MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)
        back = await b.connections.get()
        for number in range(DONE_KEPT + 50):
            stream = await connection.open_stream()
            await stream.write(b"x")
            if number % 3:
                await stream.finish()
                came = await b.next_stream()
                await read_all(came)
                await came.finish()
                await read_all(stream)
            else:
                stream.abort("over")
        await until(lambda: connection.open_streams == back.open_streams == 0)
        for link in (link_of(connection), link_of(back)):
            assert link._streams == {}
            assert len(link._done) <= DONE_KEPT
            await until(partial(few_streams, link))
