"""Messages between the daemons of two nodes, over real connections."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from services.tunneld.framing import OpeningReader, StreamOpening, StreamType, encode_frame, encode_opening
from services.tunneld.io import control_streams
from services.tunneld.io.connection import Connection
from services.tunneld.io.control_streams import (
    BURST_FRAMES,
    FRAME_LIMIT_BYTES,
    QUEUE_MESSAGES,
    RATE_FRAMES_PER_SECOND,
    ControlStreams,
    channel_of,
)
from services.tunneld.io.stream import TunnelStream
from shared.errors import PeerUnreachable, SchemaError
from shared.ids import PeerId
from shared.io.drive import Tasks
from shared.messages.tunnel import FromPeer, SendToPeers
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import EndNode, TestMesh, end_nodes

MESH = TestMesh()


class Desk:
    """One node's control streams over one connection to each peer that was dialled."""

    def __init__(self, node: EndNode) -> None:
        self.node = node
        self.got: list[FromPeer] = []
        self.counts: Counter[str] = Counter()
        self.tasks = Tasks()
        self.links: dict[PeerId, object] = {}
        self.control = ControlStreams(self.open, self.got.append, self.count, self.tasks)
        self.tasks.start(self.accept(), "accept")

    def count(self, what: str) -> None:
        self.counts[what] += 1

    async def open(self, peer_id: PeerId) -> TunnelStream:
        link = self.links.get(peer_id)
        if link is None:
            raise PeerUnreachable("no link")
        return await link.open_stream()  # type: ignore[attr-defined, no-any-return]

    async def accept(self) -> None:
        while True:
            connection, stream = await self.node.streams.get()
            opening = OpeningReader()
            while (head := opening.feed(await stream.read())) is None:
                pass
            self.tasks.start(self.serve(connection, stream, head, opening.rest), "serve")

    async def serve(self, connection: Connection, stream: TunnelStream, head: StreamOpening, rest: bytes) -> None:
        await self.control.serve(stream, rest, connection.peer, channel_of(head.type))
        await stream.finish()


async def pair(nodes: list[EndNode]) -> tuple[Desk, Desk]:
    a, b = nodes
    one, other = Desk(a), Desk(b)
    one.links[b.peer_id] = await a.dial(b)
    other.links[a.peer_id] = await b.connections.get()
    return one, other


@bounded
async def test_messages_arrive_in_order_with_who_sent_them_and_as_what() -> None:
    async with end_nodes("quic", MESH.credentials(grant="issuer"), MESH.credentials()) as nodes:
        one, other = await pair(nodes)
        for number in range(50):
            one.control.send(SendToPeers(peers=(nodes[1].peer_id,), payload=b"%d" % number))
        one.control.send(SendToPeers(peers=(nodes[1].peer_id,), payload=b"bye", channel="peer_leaving"))
        other.control.send(SendToPeers(peers=(nodes[0].peer_id,), payload=b"back"))
        await until(lambda: len(other.got) == 51 and len(one.got) == 1)
        gossip = [item.payload for item in other.got if item.channel == "gossip"]
        assert gossip == [b"%d" % number for number in range(50)]
        assert {(item.peer_id, item.grant) for item in other.got} == {(nodes[0].peer_id, "issuer")}
        assert one.got[0].grant == "member"


@bounded
async def test_what_cannot_be_sent_is_dropped_and_counted() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as nodes:
        one, other = await pair(nodes)
        one.control.send(SendToPeers(peers=(PeerId("12nobody"), nodes[1].peer_id), payload=b"x"))
        await until(lambda: other.got and one.counts["messages_to_peers_dropped"])
        assert one.counts["messages_to_peers_dropped"] == 1


@bounded
async def test_a_peer_that_does_not_read_costs_only_its_own_messages() -> None:
    """TRAPS 8: a slow peer delays nobody else."""
    async with end_nodes("quic", MESH.credentials(), MESH.credentials()) as nodes:
        one = Desk(nodes[0])
        one.links[nodes[1].peer_id] = await nodes[0].dial(nodes[1])
        for _ in range(QUEUE_MESSAGES * 3):
            one.control.send(SendToPeers(peers=(nodes[1].peer_id,), payload=b"x" * 20_000))
            await asyncio.sleep(0)
        assert one.counts["messages_to_peers_dropped"] >= QUEUE_MESSAGES
        one.control.forget(nodes[1].peer_id)
        assert all(not queue.payloads for queue in one.control._queues.values())
        await one.tasks.cancel()


@bounded
async def test_streams_are_renewed_now_and_then_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that both ends have retired must become idle some day."""
    monkeypatch.setattr(control_streams, "STREAM_SECONDS", 0.05)
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as nodes:
        one, other = await pair(nodes)
        for number in range(60):
            one.control.send(SendToPeers(peers=(nodes[1].peer_id,), payload=b"%d" % number))
            await asyncio.sleep(0.005)
        await until(lambda: len(other.got) == 60)
        assert [item.payload for item in other.got] == [b"%d" % number for number in range(60)]
        assert one.counts == {}
        link = one.links[nodes[1].peer_id]
        assert link.counters.streams_opened > 2  # type: ignore[attr-defined]
        await until(lambda: link.open_streams == 0)  # type: ignore[attr-defined]


@bounded
async def test_a_flood_is_read_more_slowly() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as nodes:
        one, other = await pair(nodes)
        stream = await one.open(nodes[1].peer_id)
        many = int(BURST_FRAMES + RATE_FRAMES_PER_SECOND)
        began = asyncio.get_running_loop().time()
        await stream.write(encode_opening(StreamType.GOSSIP, {}) + encode_frame(b"x") * many)
        await until(lambda: len(other.got) == many)
        assert asyncio.get_running_loop().time() - began > 0.8
        assert other.counts["peers_slowed_down"]


@bounded
async def test_a_frame_over_its_channels_limit_ends_the_stream() -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as nodes:
        _, other = await pair(nodes)
        await other.tasks.cancel()
        connection = await nodes[0].dial(nodes[1])
        stream = await connection.open_stream()
        await stream.write((FRAME_LIMIT_BYTES["peer_down"] + 1).to_bytes(4))
        came = await nodes[1].next_stream()
        with pytest.raises(SchemaError, match="over the limit"):
            await other.control.serve(came, b"", connection.peer, "peer_down")
        assert other.got == []


def test_only_message_streams_have_a_channel() -> None:
    assert channel_of(StreamType.GOSSIP) == "gossip"
    with pytest.raises(SchemaError):
        channel_of(StreamType.TUNNEL_HTTP)
