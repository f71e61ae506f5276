"""A TLS connection and a peer that stops answering."""

from __future__ import annotations

import asyncio

import pytest

from services.tunneld.io.tls_connection import TlsConnection
from shared.errors import StreamLost
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import TestMesh, end_nodes

MESH = TestMesh()


@bounded
async def test_a_suspected_peer_that_answers_stays() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        there = await a.dial(b)
        there.suspect()
        await asyncio.wait([there.closed], timeout=there.suspicion_seconds() + 0.05)
        assert not there.closed.done()


@bounded
async def test_a_suspected_peer_that_is_silent_is_given_up_in_a_second() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        there = await a.dial(b)
        back = await b.connections.get()
        assert isinstance(back, TlsConnection)
        assert back._control.transport is not None
        # Nothing is read any more: the other end is frozen, its kernel is not.
        back._control.transport.pause_reading()
        await until(lambda: there.silent_seconds() > 0)
        began = asyncio.get_running_loop().time()
        there.suspect()
        assert "no sign of life" in await there.closed
        assert asyncio.get_running_loop().time() - began < 2


@bounded
async def test_a_stream_on_a_socket_that_was_lost_in_the_same_moment_is_lost_and_does_not_wait_for_ever() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        await a.dial(b)
        back = await b.connections.get()
        assert isinstance(back, TlsConnection)
        await until(lambda: back._idle)
        carrier = await back._free_socket()
        assert carrier.transport is not None
        carrier.transport.abort()
        await until(lambda: carrier.lost is not None)
        stream = carrier.begin()
        with pytest.raises(StreamLost):
            await stream.read()
        with pytest.raises(StreamLost):
            await stream.write(b"x")
