"""What is special about TLS over TCP: one connection made of several sockets, kept warm."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.tunneld.io.tls import TlsEndpoint
from services.tunneld.io.tls_connection import KEPT_IDLE, PARKED, TlsConnection
from services.tunneld.io.tls_socket import TlsSocket
from shared.errors import CertificateRefused
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import EndNode, TestMesh, end_nodes, read_all

MESH = TestMesh()


async def exchange(node: EndNode, connection: TlsConnection) -> None:
    stream = await connection.open_stream()
    await stream.write(b"hi")
    await stream.finish()
    came = await node.next_stream()
    await read_all(came)
    await came.finish()
    assert await read_all(stream) == b""


@bounded
async def test_sockets_are_reused_and_kept_ready() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        there = await a.dial(b)
        back = await b.connections.get()
        assert isinstance(there, TlsConnection)
        assert isinstance(back, TlsConnection)
        for _ in range(50):
            await exchange(b, there)
            await exchange(a, back)
        assert len(there._sockets) <= 1 + PARKED + 1
        many = [await there.open_stream() for _ in range(KEPT_IDLE + 5)]
        for stream in many:
            await stream.write(b"x")
            await stream.finish()
        for _ in many:
            came = await b.next_stream()
            await read_all(came)
            await came.finish()
        for stream in many:
            await read_all(stream)
        await until(lambda: len(there._idle) == KEPT_IDLE)
        await until(lambda: len(there._sockets) <= KEPT_IDLE + PARKED + 1)


@bounded
async def test_a_socket_that_names_no_connection_here_is_refused() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        assert isinstance(a.endpoint, TlsEndpoint)
        for kind in ("mine", "yours", "nonsense"):
            with pytest.raises(CertificateRefused, match="names no connection of this node"):
                await a.endpoint.dial_socket(b.address, b.peer_id, kind, "no such link")
        assert b.streams.empty()


@bounded
async def test_another_peer_cannot_add_sockets_to_a_connection() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials(), MESH.credentials()) as (a, b, thief):
        there = await a.dial(b)
        assert isinstance(there, TlsConnection)
        assert isinstance(thief.endpoint, TlsEndpoint)
        with pytest.raises(CertificateRefused):
            await thief.endpoint.dial_socket(b.address, b.peer_id, "mine", there.link)


@bounded
async def test_without_its_control_socket_a_connection_is_over() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        there = await a.dial(b)
        back = await b.connections.get()
        stream = await there.open_stream()
        await stream.write(b"x")
        assert isinstance(there, TlsConnection)
        assert there._control.transport is not None
        there._control.transport.abort()
        assert "closed" in await there.closed or "reset" in await there.closed
        await back.closed


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=200), max_size=6))
def test_any_bytes_inside_tls_cause_only_a_refusal(parts: list[bytes]) -> None:
    """A member that speaks nonsense: after TLS it is known, and still nothing comes of it."""

    @bounded
    async def run() -> None:
        async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
            assert a.credentials is not None
            _, carrier = await asyncio.get_running_loop().create_connection(
                TlsSocket, "127.0.0.1", b.port, ssl=a.credentials.client_context(), server_hostname=""
            )
            for part in parts:
                carrier.send(part)
            carrier.close()
            await until(lambda: carrier.lost is not None)
            await a.dial(b)
            assert b.streams.empty()

    run()


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_instead_of_tls_cause_only_a_refusal(data: bytes) -> None:
    @bounded
    async def run() -> None:
        async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
            reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
            writer.write(data)
            writer.write_eof()
            try:
                await reader.read()
            except OSError:
                pass
            writer.close()
            await a.dial(b)

    run()


@bounded
async def test_a_client_without_a_certificate_gets_nowhere() -> None:
    async with end_nodes("tcp", MESH.credentials()) as (node,):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port, ssl=context, server_hostname="")
        writer.write(b"\0\0\0\1\x80")
        try:
            assert await reader.read() == b""
        except (ssl.SSLError, OSError):
            pass
        writer.close()
        assert node.connections.empty()
