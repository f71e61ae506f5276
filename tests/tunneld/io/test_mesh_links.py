"""Links between whole nodes' transports: both ports, real handshakes, the real policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from services.tunneld.io.connection import Connection
from services.tunneld.io.mesh_links import MeshLinks
from services.tunneld.io.mesh_port import bind_mesh_port
from services.tunneld.io.stream import TunnelStream
from services.tunneld.link import Preference
from shared.errors import CertificateRefused, PeerUnreachable
from shared.ids import PeerId
from shared.io.drive import Tasks
from shared.messages.trust import PeerAddresses, PeersWanted, TrustChanged
from shared.messages.tunnel import LinkChanged
from shared.peer_ids import multiaddrs, peer_id_of
from tests.tunneld.bounded import bounded, until
from tests.tunneld.meshes import TestMesh, read_all

MESH = TestMesh()


class Node:
    """Key, ports and links of one node; what it published and what others opened."""

    def __init__(self, folder: Path, preference: Preference = "auto") -> None:
        self.key = Ed25519PrivateKey.generate()
        self.peer_id: PeerId = peer_id_of(self.key.public_key().public_bytes_raw())
        self.port = bind_mesh_port("127.0.0.1", 0, folder / "port")
        self.tasks = Tasks()
        self.said: dict[PeerId, LinkChanged] = {}
        self.streams: asyncio.Queue[TunnelStream] = asyncio.Queue()
        self.links = MeshLinks(
            self.key,
            self.peer_id,
            self.port,
            preference,
            publish=lambda link: self.said.__setitem__(link.peer_id, link),
            on_stream=self._on_stream,
            on_enroll=lambda stream, _seen: stream.abort("not tested here"),
            tasks=self.tasks,
        )
        self.links.start()

    def _on_stream(self, _connection: Connection, stream: TunnelStream) -> None:
        self.streams.put_nowait(stream)

    def trust(self, mesh: TestMesh = MESH) -> TrustChanged:
        chain = mesh.credentials(self.key).chain
        return TrustChanged(
            mesh_id=mesh.mesh_id,
            root_der=mesh.root.public_bytes(Encoding.DER),
            chain_der=tuple(part.public_bytes(Encoding.DER) for part in chain),
        )

    def want(self, *others: Node) -> None:
        self.links.want(
            PeersWanted(
                peers=tuple(
                    PeerAddresses(
                        peer_id=other.peer_id, addresses=multiaddrs(["127.0.0.1"], other.port.port, other.peer_id)
                    )
                    for other in others
                )
            )
        )

    def connected(self, other: Node) -> bool:
        said = self.said.get(other.peer_id)
        return said is not None and said.state == "connected" and (said.control, said.bulk) == ("quic", "tcp")

    async def close(self) -> None:
        self.links.close()
        await self.tasks.cancel()
        self.port.close()


@contextlib.asynccontextmanager
async def nodes(folder: Path, count: int, *, trusting: bool = True) -> AsyncIterator[list[Node]]:
    made = [Node(folder) for _ in range(count)]
    try:
        if trusting:
            for node in made:
                await node.links.set_trust(node.trust())
        yield made
    finally:
        for node in made:
            await node.close()


@bounded
async def test_a_wanted_peer_is_linked_over_both_transports_and_streams_go_both_ways(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2) as (a, b):
        a.want(b)
        await until(lambda: a.connected(b) and b.connected(a))
        for one, other in ((a, b), (b, a)):
            for bulk in (False, True):
                stream = await one.links.open_stream(other.peer_id, bulk=bulk)
                await stream.write(b"hello")
                await stream.finish()
                assert await read_all(await other.streams.get()) == b"hello"


@bounded
async def test_both_may_dial_at_once_and_one_connection_of_each_kind_stays(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2) as (a, b):
        a.want(b)
        b.want(a)
        await until(lambda: a.connected(b) and b.connected(a))
        await until(lambda: len(a.links._connections) == len(b.links._connections) == 2)
        assert a.said[b.peer_id].dialled_here is not b.said[a.peer_id].dialled_here


@bounded
async def test_without_a_mesh_nothing_listens_and_nothing_is_dialled(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2, trusting=False) as (a, b):
        await b.links.set_trust(b.trust())
        b.want(a)
        await until(lambda: a.peer_id in b.said and "refused" in b.said[a.peer_id].reason)
        with pytest.raises(PeerUnreachable, match="this node is in no mesh with others"):
            await a.links.open_stream(b.peer_id, bulk=True)


@bounded
async def test_a_ban_cuts_live_connections(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2) as (a, b):
        a.want(b)
        await until(lambda: a.connected(b) and b.connected(a))
        stream = await a.links.open_stream(b.peer_id, bulk=True)
        await stream.write(b"x")
        await a.links.set_trust(replace(a.trust(), banned=(b.peer_id,)))
        await until(lambda: not a.links._connections and not b.links._connections)
        assert a.said[b.peer_id].reason == "banned from the mesh"
        b.want(a)
        await until(lambda: b.said[a.peer_id].state == "waiting" and "banned" in b.said[a.peer_id].reason)


@bounded
async def test_another_mesh_ends_all_links_of_the_old_one(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2) as (a, b):
        a.want(b)
        await until(lambda: a.connected(b))
        await a.links.set_trust(a.trust(TestMesh("mesh-2")))
        await until(lambda: not a.links._connections)
        with pytest.raises(PeerUnreachable):
            await a.links.open_stream(b.peer_id, bulk=False)


@bounded
async def test_a_peer_that_is_gone_is_dialled_until_it_is_back(tmp_path: Path) -> None:
    async with nodes(tmp_path, 1) as (a,):
        b = Node(tmp_path)
        await b.links.set_trust(b.trust())
        a.want(b)
        await until(lambda: a.connected(b))
        number, key = b.port.port, b.key
        await b.close()
        await until(lambda: a.said[b.peer_id].state in ("waiting", "connecting"))
        again = Node(tmp_path)
        again.port.close()
        again.port = bind_mesh_port("127.0.0.1", number, tmp_path / "port")
        again.key, again.peer_id = key, b.peer_id
        again.links = MeshLinks(
            key,
            b.peer_id,
            again.port,
            "auto",
            publish=lambda link: None,
            on_stream=again._on_stream,
            on_enroll=lambda stream, _seen: None,
            tasks=again.tasks,
        )
        again.links.start()
        await again.links.set_trust(again.trust())
        await until(lambda: a.connected(b))
        await again.close()


@bounded
async def test_a_peer_whose_tcp_ends_must_show_life_over_udp_at_once(tmp_path: Path) -> None:
    """A machine that died says nothing over UDP: waiting for its silence would hold requests up for seconds."""
    async with nodes(tmp_path, 2) as (a, b):
        a.want(b)
        await until(lambda: a.connected(b) and b.connected(a))
        assert b.links.quic._transport is not None
        b.links.quic._transport.abort()
        b.links.tls.close()
        began = asyncio.get_running_loop().time()
        await until(lambda: a.said[b.peer_id].state != "connected")
        assert asyncio.get_running_loop().time() - began < 3
        assert a.links.silent_seconds(b.peer_id) == 0.0


@bounded
async def test_a_certificate_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    async with nodes(tmp_path, 2, trusting=False) as (a, b):
        with pytest.raises(CertificateRefused, match=f"is for {b.peer_id}, this node is {a.peer_id}"):
            await a.links.set_trust(b.trust())
        assert a.links.trust is not None
