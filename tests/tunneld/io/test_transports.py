"""What both transports promise: verified on both ends, streams from both ends, ends told apart from losses."""

from __future__ import annotations

import asyncio
import datetime
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.tunneld.io.credentials import Credentials
from services.tunneld.io.stream import HIGH_WATER_BYTES
from shared.errors import CertificateRefused, PeerUnreachable, StreamLost
from shared.ids import PeerId
from shared.multiaddrs import Address, Transport
from shared.version import VERSION
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import NOW, EndNode, TestMesh, end_nodes, peer_of, read_all

MESH = TestMesh()
BOTH = pytest.mark.parametrize("transport", ["quic", "tcp"])


async def echo(node: EndNode) -> None:
    """Answers every stream with what it said."""

    async def one() -> None:
        stream = await node.next_stream()
        while data := await stream.read():
            await stream.write(data)
        await stream.finish()

    while True:
        await one()


@BOTH
@bounded
async def test_streams_from_both_ends_carry_bytes_both_ways(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials(grant="client")) as (a, b):
        there = await a.dial(b)
        back = await b.connections.get()
        assert (there.peer.peer_id, there.peer.grant, there.dialled_here) == (b.peer_id, "client", True)
        assert (back.peer.peer_id, back.peer.grant, back.dialled_here) == (a.peer_id, "member", False)
        for opener, other, connection in ((a, b, there), (b, a, back), (a, b, there), (b, a, back)):
            stream = await connection.open_stream()
            await stream.write(b"hello ")
            await stream.write(b"x" * 300_000)
            await stream.finish()
            came = await other.next_stream()
            assert await read_all(came) == b"hello " + b"x" * 300_000
            await came.write(b"thanks")
            await came.finish()
            assert await read_all(stream) == b"thanks"
            assert stream.bytes_received == 6
            assert opener is not other
        assert there.counters.streams_opened == there.counters.streams_accepted == 2
        assert there.open_streams == back.open_streams == 0


@BOTH
@bounded
async def test_each_side_learns_where_the_other_sees_it(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        there = await a.dial(b)
        back = await b.connections.get()
        assert there.remote == back.observed_address == str(b.address)
        assert there.observed_address == back.remote
        if transport == "quic":
            assert there.observed_address == str(a.address), "the port a node dials from is the one it listens on"


@BOTH
@bounded
async def test_one_direction_ends_and_the_other_goes_on(transport: Transport) -> None:
    """TRAPS 38: half-close per direction."""
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        stream = await (await a.dial(b)).open_stream()
        await stream.write(b"question")
        await stream.finish()
        came = await b.next_stream()
        assert await read_all(came) == b"question"
        for part in (b"one", b"two", b"three"):
            await came.write(part)
            assert await stream.read() == part
        await came.finish()
        assert await stream.read() == b""
        assert await stream.read() == b"", "the end stays the end"
        with pytest.raises(StreamLost):
            await stream.write(b"more")


@BOTH
@bounded
async def test_a_cut_stream_is_no_clean_end(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)
        stream = await connection.open_stream()
        await stream.write(b"half of it")
        came = await b.next_stream()
        assert await came.read() == b"half of it"
        stream.abort("changed my mind")
        stream.abort("twice is harmless")
        with pytest.raises(StreamLost, match="cut"):
            await came.read()
        with pytest.raises(StreamLost):
            await came.write(b"x")
        other = await connection.open_stream()
        await other.write(b"the connection lives on")
        assert await (await b.next_stream()).read() == b"the connection lives on"


@BOTH
@bounded
async def test_a_connection_that_ends_loses_its_streams(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)
        stream = await connection.open_stream()
        await stream.write(b"x")
        came = await b.next_stream()
        back = await b.connections.get()
        connection.close("going home")
        assert await connection.closed == "going home"
        assert await back.closed == "the peer closed it: going home"
        with pytest.raises(StreamLost):
            await read_all(came)
        with pytest.raises(StreamLost):
            await stream.read()
        with pytest.raises(PeerUnreachable):
            await connection.open_stream()


@BOTH
@bounded
async def test_a_fast_writer_waits_for_a_slow_reader(transport: Transport) -> None:
    """TRAPS 39: memory stays bounded at both ends."""
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        stream = await (await a.dial(b)).open_stream()
        sent = 0

        async def pour() -> None:
            nonlocal sent
            for _ in range(200):
                await stream.write(b"x" * 64 * 1024)
                sent += 64 * 1024
            await stream.finish()

        pouring = asyncio.create_task(pour())
        came = await b.next_stream()
        still, before = 0, -1
        while still < 50:
            await asyncio.sleep(0.005)
            still = still + 1 if sent == before else 0
            before = sent
        held = sent - len(await came.read())
        kernel = 8 * 1024 * 1024 if transport == "tcp" else 0
        assert held <= 4 * HIGH_WATER_BYTES + kernel
        assert not pouring.done()
        rest = await read_all(came)
        await pouring
        assert len(rest) <= 200 * 64 * 1024
        assert came.bytes_received == stream.bytes_sent == 200 * 64 * 1024


@BOTH
@bounded
async def test_hundreds_of_streams_leave_nothing_behind(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)
        echoing = asyncio.create_task(echo(b))
        for number in range(300):
            stream = await connection.open_stream()
            await stream.write(b"%d" % number)
            await stream.finish()
            assert await read_all(stream) == b"%d" % number
        assert connection.open_streams == 0
        assert connection.counters.streams_opened == 300
        echoing.cancel()


@BOTH
@bounded
async def test_many_streams_at_once(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        there = await a.dial(b)
        back = await b.connections.get()
        echoes = [asyncio.create_task(echo(node)) for node in (a, b) for _ in range(20)]

        async def ask(connection: Any, number: int) -> None:
            stream = await connection.open_stream()
            await stream.write(b"%d " % number * 10_000)
            await stream.finish()
            assert await read_all(stream) == b"%d " % number * 10_000

        await asyncio.gather(*(ask(connection, n) for n in range(20) for connection in (there, back)))
        for task in echoes:
            task.cancel()


# -- who is let in ----------------------------------------------------------------------------------------------------

STRANGER = TestMesh("mesh-2")
LATER = NOW - datetime.timedelta(days=3 * 365)


def strangers() -> list[Any]:
    other = TestMesh()
    forged = Credentials(MESH.mesh_id, MESH.root, STRANGER.credentials().chain, Ed25519PrivateKey.generate())
    return [
        pytest.param(STRANGER.credentials(), id="another mesh"),
        pytest.param(other.credentials(), id="another root of the same mesh id"),
        pytest.param(MESH.credentials(now=LATER), id="expired"),
        pytest.param(MESH.credentials(now=NOW + datetime.timedelta(days=2)), id="not valid yet"),
        pytest.param(forged, id="a certificate without its key"),
    ]


@BOTH
@pytest.mark.parametrize("credentials", strangers())
@bounded
async def test_strangers_are_refused_whoever_dials(transport: Transport, credentials: Credentials) -> None:
    async with end_nodes(transport, credentials, MESH.credentials()) as (stranger, node):
        for one, other in ((stranger, node), (node, stranger)):
            with pytest.raises((CertificateRefused, PeerUnreachable)) as refused:
                await one.endpoint.dial(other.address, None)
            assert refused.value.detail
        assert node.connections.empty()
        assert node.streams.empty()


@BOTH
@bounded
async def test_a_banned_peer_is_told_so(transport: Transport) -> None:
    banned = MESH.credentials()
    own = MESH.credentials()
    judge = Credentials(own.mesh_id, own.root, own.chain, own.key, frozenset({peer_of(banned)}))
    async with end_nodes(transport, banned, judge) as (a, b):
        with pytest.raises(CertificateRefused, match="banned from this mesh"):
            await a.endpoint.dial(b.address, b.peer_id)
        with pytest.raises(CertificateRefused, match="banned from this mesh"):
            await b.endpoint.dial(a.address, a.peer_id)
        assert a.connections.empty()
        assert b.connections.empty()


@BOTH
@bounded
async def test_another_node_than_expected_is_no_connection(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        with pytest.raises(CertificateRefused, match=f"{b.peer_id} answers there, not {a.peer_id}"):
            await a.endpoint.dial(b.address, a.peer_id)
        assert a.connections.empty()


@BOTH
@bounded
async def test_a_node_without_a_mesh_neither_dials_nor_answers(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), None) as (a, b):
        with pytest.raises(PeerUnreachable, match="this node is in no mesh"):
            await b.endpoint.dial(a.address, a.peer_id)
        with pytest.raises((PeerUnreachable, CertificateRefused)):
            await a.endpoint.dial(b.address, None)


@BOTH
@bounded
async def test_renewed_credentials_count_from_the_next_handshake_on(transport: Transport) -> None:
    key = Ed25519PrivateKey.generate()
    async with end_nodes(transport, MESH.credentials(key), MESH.credentials()) as (a, b):
        first = await a.dial(b)
        assert first.peer.grant == "member"
        a.credentials = MESH.credentials(key, grant="issuer")
        await a.dial(b)
        grants = [(await b.connections.get()).peer.grant for _ in range(2)]
        assert grants == ["member", "issuer"]


# -- who does not play along ------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[dict[Transport, Address]]:
    """Ports that accept and never answer."""
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        udp.bind(("127.0.0.1", 0))
        yield {
            "tcp": Address("ip4", "127.0.0.1", tcp.getsockname()[1], "tcp"),
            "quic": Address("ip4", "127.0.0.1", udp.getsockname()[1], "quic"),
        }


@BOTH
@bounded
async def test_a_peer_that_never_answers_is_given_up(transport: Transport, silent: dict[Transport, Address]) -> None:
    """TRAPS 3."""
    async with end_nodes(transport, MESH.credentials()) as (a,):
        began = asyncio.get_running_loop().time()
        with pytest.raises(PeerUnreachable, match="no answer over"):
            await a.endpoint.dial(silent[transport], None)
        assert asyncio.get_running_loop().time() - began < 5


@bounded
async def test_a_dead_tcp_port_is_told_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("ip4", "127.0.0.1", probe.getsockname()[1], "tcp")
    async with end_nodes("tcp", MESH.credentials()) as (a,):
        with pytest.raises(PeerUnreachable, match="refused: nothing listens there"):
            await a.endpoint.dial(address, None)


@BOTH
@bounded
async def test_names_are_resolved_and_unknown_ones_named(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        await a.endpoint.dial(Address("dns4", "localhost", b.port, transport), b.peer_id)
        with pytest.raises(PeerUnreachable, match="the name cannot be resolved"):
            await a.endpoint.dial(Address("dns", "no-such-host.invalid", 1, transport), PeerId("12x"))


@BOTH
@bounded
async def test_round_trips_are_measured(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)
        await until(lambda: connection.rtt_seconds() is not None)
        assert 0 < (connection.rtt_seconds() or 0) < 1


@BOTH
@bounded
async def test_a_probe_greets_and_leaves_no_connection(transport: Transport) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials(grant="client")) as (a, b):
        greeted = await a.endpoint.probe(b.address, b.peer_id)
        assert (greeted.peer.peer_id, greeted.peer.grant, greeted.version) == (b.peer_id, "client", VERSION)
        assert greeted.observed_address.startswith("/ip4/127.0.0.1/")
        connection = await a.dial(b)
        assert (await b.connections.get()).peer.peer_id == a.peer_id
        assert a.connections.empty()
        assert b.connections.empty()
        assert not connection.closed.done()


@BOTH
@bounded
async def test_a_probe_says_why_there_would_be_no_connection(transport: Transport) -> None:
    other = TestMesh("mesh-2")
    async with end_nodes(transport, MESH.credentials(), other.credentials(), MESH.credentials()) as (a, b, c):
        with pytest.raises(CertificateRefused, match="of another mesh"):
            await a.endpoint.probe(b.address, None)
        with pytest.raises(CertificateRefused, match="answers there, not"):
            await a.endpoint.probe(c.address, b.peer_id)
        c.credentials = None
        with pytest.raises(PeerUnreachable):
            await a.endpoint.probe(c.address, None)
        a.credentials = None
        with pytest.raises(PeerUnreachable, match="in no mesh"):
            await a.endpoint.probe(b.address, None)
