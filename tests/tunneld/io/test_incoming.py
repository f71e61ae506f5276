"""Streams go to whoever serves their type; what a peer does wrong ends its stream and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.tunneld.framing import StreamType, encode_frame, encode_opening
from services.tunneld.io.admin import AdminDesk
from services.tunneld.io.control_streams import ControlStreams
from services.tunneld.io.incoming import IncomingStreams
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.certificates import VerifiedPeer
from shared.errors import PeerUnreachable, SchemaError, StreamLost
from shared.ids import PeerId
from shared.io.drive import Tasks
from shared.messages.daemon import Done
from shared.messages.tunnel import FromPeer, PeerProbed
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import EndNode, TestMesh, end_nodes, read_all

MESH = TestMesh()


class Served:
    """A node whose incoming streams are served as tunneld does."""

    def __init__(self, node: EndNode) -> None:
        self.got: list[FromPeer] = []
        self.http: list[tuple[dict[str, Any], bytes, PeerId]] = []
        self.counts: Counter[str] = Counter()
        tasks = Tasks()

        def count(what: str) -> None:
            self.counts[what] += 1

        async def no_stream(_: PeerId) -> TunnelStream:
            raise PeerUnreachable("not here")

        async def ask(_daemon: str, _request: codec.Message) -> codec.Message:
            return Done()

        async def dial_back(_: PeerId) -> PeerProbed:
            return PeerProbed(checks=())

        control = ControlStreams(no_stream, self.got.append, count, tasks)
        admin = AdminDesk(node.peer_id, Path("/nowhere"), ask, lambda: True, dial_back)
        self.incoming = IncomingStreams(control, admin, self.serve_http, count, tasks)
        node.endpoint.on_stream = self.incoming.accept

    async def serve_http(self, stream: TunnelStream, header: dict[str, Any], rest: bytes, peer: VerifiedPeer) -> None:
        if not header:
            raise SchemaError("the header names no model")
        self.http.append((header, rest, peer.peer_id))
        await stream.finish()


@pytest.mark.parametrize("transport", ["quic", "tcp"])
@bounded
async def test_each_type_goes_where_it_belongs(transport: Any) -> None:
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        served = Served(b)
        connection = await a.dial(b)
        gossip = await connection.open_stream()
        await gossip.write(encode_opening(StreamType.GOSSIP, {}) + encode_frame(b"news"))
        http = await connection.open_stream()
        await http.write(encode_opening(StreamType.TUNNEL_HTTP, {"model": "m"}) + b"POST /")
        assert await read_all(http) == b""
        await until(lambda: served.got and served.http)
        assert served.got[0].payload == b"news"
        assert served.http == [({"model": "m"}, b"POST /", a.peer_id)]


@pytest.mark.parametrize(
    "wire",
    [
        b"\xff\x01\x00\x00",
        b"\x01\x63\x00\x00",
        b"\x01\x01\xff\xff",
        encode_opening(StreamType.TUNNEL_RPC, {}),
        encode_opening(StreamType.RELAY, {}),
        encode_opening(StreamType.TUNNEL_HTTP, {}),
        encode_opening(StreamType.GOSSIP, {}) + b"\xff\xff\xff\xff",
        encode_opening(StreamType.GOSSIP, {}) + b"\0\0\0\5ab",
        b"",
    ],
    ids=["type", "version", "header size", "rpc", "relay", "no model", "frame size", "cut frame", "empty"],
)
@bounded
async def test_what_is_wrong_ends_the_stream_is_counted_and_hurts_nobody(wire: bytes) -> None:
    async with end_nodes("tcp", MESH.credentials(), MESH.credentials()) as (a, b):
        served = Served(b)
        connection = await a.dial(b)
        stream = await connection.open_stream()
        await stream.write(wire)
        await stream.finish()
        with pytest.raises(StreamLost):
            await read_all(stream)
        back = await b.connections.get()
        assert served.counts["streams_refused"] == back.counters.refused == 1
        good = await connection.open_stream()
        await good.write(encode_opening(StreamType.GOSSIP, {}) + encode_frame(b"still here"))
        await until(lambda: served.got)
