"""What is special about QUIC: one socket for everything, and a handshake that by itself proves little."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import pytest
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, QuicEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tunneld.io.quic import QuicEndpoint, address_of
from services.tunneld.io.quic_peers import ENROLL_ALPN, MESH_ALPN
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import EndNode, TestMesh, end_nodes

MESH = TestMesh()


class Smuggler(QuicConnectionProtocol):
    """Sends stream data as early as QUIC lets it, and remembers how it ended."""

    ended: ConnectionTerminated | None = None

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, HandshakeCompleted):
            for number in (0, 4, 8):
                self._quic.send_stream_data(number, b"smuggled", end_stream=True)
            self.transmit()
        if isinstance(event, ConnectionTerminated):
            self.ended = event
        super().quic_event_received(event)


def stranger(alpn: str) -> QuicConfiguration:
    configuration = QuicConfiguration(is_client=True, alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE)
    configuration.server_name = "mesh"
    return configuration


@bounded
async def test_a_client_without_a_certificate_is_not_listened_to() -> None:
    async with end_nodes("quic", MESH.credentials()) as (node,):
        async with connect(
            "127.0.0.1", node.port, configuration=stranger(MESH_ALPN), create_protocol=Smuggler, wait_connected=False
        ) as client:
            assert isinstance(client, Smuggler)
            client.transmit()
            await until(lambda: client.ended is not None)
            assert client.ended is not None
            assert "no certificate" in client.ended.reason_phrase
        assert node.connections.empty()
        assert node.streams.empty()


@bounded
async def test_an_enrolment_has_one_stream_and_no_more() -> None:
    async with end_nodes("quic", MESH.credentials()) as (node,):
        assert isinstance(node.endpoint, QuicEndpoint)
        node.endpoint.on_enroll = lambda stream, seen: node.enrolments.put_nowait((stream, seen))
        async with connect(
            "127.0.0.1", node.port, configuration=stranger(ENROLL_ALPN), create_protocol=Smuggler, wait_connected=False
        ) as client:
            assert isinstance(client, Smuggler)
            client.transmit()
            await until(lambda: client.ended is not None)
            assert client.ended is not None
            assert client.ended.reason_phrase == "an enrolment has one stream"
        assert node.enrolments.qsize() <= 1
        assert node.streams.empty()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=1500), max_size=5), st.booleans())
def test_any_datagram_causes_only_silence(datagrams: list[bytes], long_header: bool) -> None:
    @bounded
    async def run() -> None:
        async with end_nodes("quic", MESH.credentials(), MESH.credentials()) as (a, b):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
                for data in datagrams:
                    padded = (b"\xc0\0\0\0\1" + data).ljust(1200, b"\0") if long_header else data
                    raw.sendto(padded, ("127.0.0.1", b.port))
            await a.dial(b)
            assert b.streams.empty()

    run()


@bounded
async def test_half_open_connections_are_given_up_and_counted() -> None:
    async with end_nodes("quic", MESH.credentials()) as (node,):
        assert isinstance(node.endpoint, QuicEndpoint)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
            for _ in range(5):
                quic = QuicConnection(configuration=stranger(MESH_ALPN))
                quic.connect(("127.0.0.1", node.port), now=0.0)
                for data, address in quic.datagrams_to_send(now=0.0):
                    raw.sendto(data, address)
        await until(lambda: node.endpoint.ungreeted == 5)  # type: ignore[union-attr]
        await until(lambda: node.endpoint.ungreeted == 0)  # type: ignore[union-attr]
        await until(lambda: not node.endpoint._links)  # type: ignore[union-attr]


@bounded
async def test_a_peer_that_dies_is_noticed() -> None:
    """No goodbye: its socket is simply gone."""
    async with end_nodes("quic", MESH.credentials(), MESH.credentials()) as (a, b):
        there = await a.dial(b)
        assert isinstance(b.endpoint, QuicEndpoint)
        assert b.endpoint._transport is not None
        b.endpoint._transport.abort()
        began = asyncio.get_running_loop().time()
        assert await there.closed == "silent for too long"
        assert asyncio.get_running_loop().time() - began < 8


@pytest.mark.parametrize(
    ("addr", "text"),
    [
        (("10.0.0.1", 5), "/ip4/10.0.0.1/udp/5/quic-v1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "/ip4/10.0.0.1/udp/5/quic-v1"),
        (("fe80::1%eth0", 5, 0, 2), "/ip6/fe80::1/udp/5/quic-v1"),
    ],
)
def test_socket_addresses_as_multiaddrs(addr: Any, text: str) -> None:
    assert str(address_of(addr)) == text


@bounded
async def test_dialling_works_without_listening() -> None:
    """A node behind a router only dials."""
    async with end_nodes("quic", MESH.credentials()) as (b,):
        a = EndNode("quic", MESH.credentials())
        try:
            await a.dial(b)
            stream = await (await b.connections.get()).open_stream()
            await stream.write(b"from the other side")
            assert await (await a.next_stream()).read() == b"from the other side"
        finally:
            a.endpoint.close()
            a.socket.close()
