"""Probes between real endpoints: what works both ways, and each way in which two nodes do not meet."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.tunneld.io.admin import AdminDesk
from services.tunneld.io.connection import Connection
from services.tunneld.io.control_streams import ControlStreams
from services.tunneld.io.incoming import IncomingStreams
from services.tunneld.io.probe import BACK_AT_ONCE, Prober
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.certificates import fingerprint
from shared.errors import RequestRefused
from shared.messages.daemon import Done
from shared.messages.trust import PeerAddresses, PeersWanted
from shared.messages.tunnel import PeerProbed, ProbeCheck, ProbePeer
from shared.multiaddrs import Address
from tests.tunneld.bounded import bounded, until
from tests.tunneld.io.test_mesh_links import Node
from tests.tunneld.meshes import NOW, TestMesh, end_nodes

MESH = TestMesh()
PIN = fingerprint(MESH.root)


class ProbingNode(Node):
    """A node that probes, and answers those who ask to be dialled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.prober = Prober(self.peer_id, self.links)

        async def ask(_daemon: str, _request: codec.Message) -> codec.Message:
            return Done()

        async def no_http(stream: TunnelStream, *_: object) -> None:
            stream.abort("not tested here")

        desk = AdminDesk(self.peer_id, folder, ask, lambda: True, self.prober.dial_back)
        control = ControlStreams(
            lambda peer_id: self.links.open_stream(peer_id, bulk=False),
            lambda _message: None,
            lambda _what: None,
            self.tasks,
        )
        self.incoming = IncomingStreams(control, desk, no_http, lambda _what: None, self.tasks)

    def _on_stream(self, connection: Connection, stream: TunnelStream) -> None:
        self.incoming.accept(connection, stream)

    @property
    def address(self) -> str:
        return f"/ip4/127.0.0.1/udp/{self.port.port}/quic-v1"

    async def probe(self, address: str, **more: object) -> PeerProbed:
        return await self.prober.probe(ProbePeer(addresses=(address,), **more))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def probing(folder: Path, *meshes: TestMesh | None) -> AsyncIterator[list[ProbingNode]]:
    made = [ProbingNode(folder) for _ in meshes]
    try:
        for node, mesh in zip(made, meshes, strict=True):
            if mesh is not None:
                await node.links.set_trust(replace(node.trust(mesh), issuer=True))
        yield made
    finally:
        for node in made:
            await node.close()


def failed(checks: tuple[ProbeCheck, ...]) -> dict[str, ProbeCheck]:
    found: dict[str, ProbeCheck] = {check.name: check for check in checks if check.level == "fail"}
    assert all(check.fix for check in found.values())
    return found


@bounded
async def test_both_ways_over_a_link_that_is_there(tmp_path: Path) -> None:
    async with probing(tmp_path, MESH, MESH) as (a, b):
        a.want(b)
        b.want(a)
        await until(lambda: a.connected(b) and b.connected(a))
        count = len(a.links.links.links())
        probed = await a.probe(b.address, peer_id=b.peer_id)
        assert {check.level for check in (*probed.checks, *probed.back)} == {"ok"}
        assert {"tcp", "udp", "clock", "version", "mesh"} <= {check.name for check in probed.checks}
        assert f"127.0.0.1:{a.port.port}" in probed.back[0].detail
        assert {"tcp", "udp", "mesh"} <= {check.name for check in probed.back}
        assert a.connected(b)
        assert len(a.links.links.links()) == count


@bounded
async def test_both_ways_without_a_link(tmp_path: Path) -> None:
    """A peer that nobody wanted yet, known by its address only."""
    async with probing(tmp_path, MESH, MESH) as (a, b):
        probed = await a.probe(b.address)
        assert not failed((*probed.checks, *probed.back))
        assert any("same mesh" in check.detail for check in probed.back)
        assert not (await a.probe(b.address, back=False)).back


@bounded
async def test_a_port_that_nobody_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with probing(tmp_path, MESH) as (a,):
        probed = await a.probe(f"/ip4/127.0.0.1/udp/{port}/quic-v1")
        found = failed(probed.checks)
        assert "nothing listens" in found["tcp"].detail
        assert "nothing listens" in found["udp"].detail
        assert "no way there" in probed.back[0].detail


@bounded
async def test_ports_that_are_silent_though_tcp_connects(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        async with probing(tmp_path, MESH) as (a,):
            found = failed((await a.probe(f"/ip4/127.0.0.1/tcp/{port}/tls")).checks)
    assert "its node hangs" in found["tcp"].detail
    assert "no handshake over TCP either" in found["udp"].detail
    assert "restart tunneld" in found["udp"].fix


@bounded
async def test_udp_blocked_where_tcp_works(tmp_path: Path) -> None:
    """The one failure that a node can work with: over TCP alone."""
    async with probing(tmp_path, MESH, MESH) as (a, b):
        b.links.quic.credentials = lambda: None
        probed = await a.probe(b.address, peer_id=b.peer_id, back=False)
        (udp,) = [check for check in probed.checks if check.name == "udp"]
        assert udp.level == "warn"
        assert "UDP is blocked" in udp.detail
        assert 'mesh.transport = "tcp"' in udp.fix
        assert "tcp" not in failed(probed.checks)


@bounded
async def test_there_works_and_back_fails(tmp_path: Path) -> None:
    """The peer holds an address of this node at which nothing listens, and is connected because this node dialled."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with probing(tmp_path, MESH, MESH) as (a, b):
        known = PeerAddresses(peer_id=a.peer_id, addresses=(f"/ip4/127.0.0.1/tcp/{port}/tls",))
        b.links.want(PeersWanted(peers=(known,)))
        await a.links.tls.dial(Address("ip4", "127.0.0.1", b.port.port, "tcp"), b.peer_id)
        await until(lambda: b.said[a.peer_id].state == "connected")
        probed = await a.probe(b.address, peer_id=b.peer_id)
        assert not failed(probed.checks)
        found = failed(probed.back)
        assert f"127.0.0.1:{port}: TCP port {port} refuses" in found["tcp"].detail


@bounded
async def test_another_mesh(tmp_path: Path) -> None:
    async with probing(tmp_path, MESH, TestMesh("mesh-2")) as (a, b):
        found = failed((await a.probe(b.address)).checks)
        assert set(found) == {"mesh"}
        assert "another mesh" in found["mesh"].detail
        assert "--switch" in found["mesh"].fix


@bounded
async def test_another_node_of_the_mesh_and_this_one(tmp_path: Path) -> None:
    async with probing(tmp_path, MESH, MESH, MESH) as (a, b, c):
        other = failed((await a.probe(b.address, peer_id=c.peer_id)).checks)
        assert "another node has this address" in other["mesh"].detail
        assert "dialling node itself" in failed((await a.probe(a.address)).checks)["mesh"].detail


@pytest.mark.parametrize("transport", ["quic", "tcp"])
@pytest.mark.parametrize(("days", "words"), [(-60, "expired"), (9, "valid")])
@bounded
async def test_a_clock_that_is_wrong(transport: str, days: int, words: str, tmp_path: Path) -> None:
    then = MESH.credentials(now=NOW + datetime.timedelta(days=days))
    async with probing(tmp_path, MESH) as (a,), end_nodes(transport, then) as (odd,):  # type: ignore[arg-type]
        found = failed((await a.probe(str(odd.address))).checks)
        assert words in found["clock"].detail
        assert "timedatectl set-ntp true" in found["clock"].fix
        assert "mesh" not in found
        assert {-60: "30 days", 9: "9 days"}[days] in found["clock"].detail


@bounded
async def test_who_has_a_token_learns_whether_it_would_be_admitted(tmp_path: Path) -> None:
    async with probing(tmp_path, None, MESH) as (joiner, issuer):
        probed = await joiner.probe(issuer.address, root_fingerprint=PIN)
        assert not failed(probed.checks)
        assert "admits nodes" in probed.checks[-1].detail
        assert "once this node is in that mesh" in probed.back[0].detail
        other = await joiner.probe(issuer.address, root_fingerprint=fingerprint(TestMesh("mesh-2").root))
        assert "another mesh than the token" in failed(other.checks)["mesh"].detail
        unknown = (await joiner.probe(issuer.address)).checks[-1]
        assert (unknown.level, "TOKEN" in unknown.fix) == ("warn", True)
        await issuer.links.set_trust(issuer.trust(MESH))
        refused = failed((await joiner.probe(issuer.address, root_fingerprint=PIN)).checks)
        assert "admits nobody" in refused["mesh"].detail


@bounded
async def test_a_token_of_the_own_mesh_is_probed_as_a_node(tmp_path: Path) -> None:
    async with probing(tmp_path, MESH, MESH) as (a, b):
        probed = await a.probe(b.address, root_fingerprint=PIN)
        assert any("same mesh" in check.detail for check in probed.checks)


@bounded
async def test_the_way_back_to_a_node_whose_address_is_unknown(tmp_path: Path) -> None:
    """Over TCP alone the peer sees a port that nobody can dial."""
    async with probing(tmp_path, MESH, MESH) as (a, b):
        await a.links.tls.dial(Address("ip4", "127.0.0.1", b.port.port, "tcp"), b.peer_id)
        await until(lambda: b.said.get(a.peer_id))
        (check,) = (await b.prober.dial_back(a.peer_id)).checks
        assert (check.name, check.level) == ("back", "fail")
        assert "knows no address" in check.detail


@bounded
async def test_a_peer_is_dialled_at_few_addresses_that_are_its_own_and_few_at_once(tmp_path: Path) -> None:
    async with probing(tmp_path, MESH, MESH) as (a, b):
        a.want(b)
        await until(lambda: a.links.addresses_of(b.peer_id))
        running = [asyncio.ensure_future(a.prober.dial_back(b.peer_id)) for _ in range(BACK_AT_ONCE)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="just now"):
            await a.prober.dial_back(b.peer_id)
        for probed in await asyncio.gather(*running):
            assert not failed(probed.checks)
            assert all(f"127.0.0.1:{b.port.port}" in check.detail for check in probed.checks)


@bounded
async def test_no_address_at_all(tmp_path: Path) -> None:
    async with probing(tmp_path, MESH) as (a,):
        with pytest.raises(RequestRefused, match="HOST:PORT"):
            await a.probe("nonsense")
