"""Real gossipds in one process, each with a real bus; in place of the tunnelds and their network there is one object.

The tunneld of the test has a real key, makes real requests for certificates, and judges peers with the real function
by what gossipd published; what it carries between two nodes goes through it in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric import ed25519

from services.gossipd.daemon import Gossipd
from shared import codec
from shared.certificates import load_der, make_csr, verify_chain
from shared.config import load_config
from shared.errors import CertificateRefused, DaemonUnreachable, MeshError, RequestRefused
from shared.ids import MeshId, PeerId
from shared.io.bus import BusClient, BusServer, Mirror
from shared.io.drive import Tasks
from shared.messages.daemon import Done, GetSnapshot, GetStory, Snapshot, StoryEntry
from shared.messages.mesh import RecordSigned, SignedRecord, SignRecord, TunnelChanged
from shared.messages.models import AssignmentsChanged, DeviceChanged, InventoryChanged
from shared.messages.trust import (
    CsrMade,
    EnrollAt,
    Grant,
    JoinChanged,
    MakeCsr,
    PeersWanted,
    RedeemInvite,
    TrustChanged,
)
from shared.messages.tunnel import FromPeer, LinkChanged, SendToPeers
from shared.paths import NodePaths
from shared.peer_ids import peer_id_of
from tests.waiting import until

T = TypeVar("T")
WAIT_SECONDS = 8.0


class Said:
    """Facts of a daemon in the test's hands."""

    def __init__(self, *items: codec.Message) -> None:
        self.items: list[codec.Message] = list(items)

    def state_line(self) -> str:
        return "in the test's hands"

    def snapshot(self) -> Iterable[codec.Message]:
        return list(self.items)

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return ()


class TrustNode:
    """A gossipd with the rest of its node played by the test."""

    def __init__(self, net: Net, name: str, home: Path) -> None:
        self.net, self.name = net, name
        self.paths = NodePaths(home)
        self.paths.prepare()
        (home / "mesh.toml").write_text(f'[node]\nname = "{name}"\n')
        self.key = ed25519.Ed25519PrivateKey.generate()
        self.peer_id = peer_id_of(self.key.public_key().public_bytes_raw())
        self.address = f"/ip4/127.0.0.1/udp/{9000 + len(net.nodes)}/quic-v1/p2p/{self.peer_id}"
        self.tasks = Tasks()
        self.trust = TrustChanged(mesh_id=MeshId(""))
        self.joins: list[JoinChanged] = []
        self.wanted: PeersWanted | None = None
        self.links: dict[PeerId, LinkChanged] = {}
        self.enrolled: list[EnrollAt] = []
        self.goodbyes: list[MeshId] = []

    async def start(self) -> None:
        self.start_tunneld()
        launcherd = Said(
            InventoryChanged(models=()),
            DeviceChanged(device="cpu", vram_bytes=8, total_bytes=9, reserve_bytes=1, engine="e"),
        )
        electiond = Said(AssignmentsChanged(assignments=(), idle_reason="there is no model on this node"))
        self.others = [
            BusServer("launcherd", self.paths, launcherd, self._none, self.tasks),
            BusServer("electiond", self.paths, electiond, self._none, self.tasks),
        ]
        for server in self.others:
            server.start()
        self._mirror = Mirror("gossipd", self.paths, self._on_snapshot, self._on_message)
        self._mirror.start(self.tasks)
        self.client = BusClient("gossipd", self.paths)
        self.start_gossipd()
        await until(lambda: self.trust.mesh_id, WAIT_SECONDS, f"gossipd of {self.name} spoke")

    def start_gossipd(self) -> None:
        self.daemon = Gossipd(self.paths, load_config(self.paths.config_file, {}))
        keeping = self.daemon.desk.keeping
        keeping.around = replace(keeping.around, clock=self.net.clock, goodbye=self._goodbye)
        self.daemon.start()

    async def _goodbye(self) -> None:
        self.goodbyes.append(self.trust.mesh_id)

    async def restart_tunneld(self) -> None:
        """A new life of it: it knows of no link any more."""
        await self.tunneld_tasks.cancel()
        self.tunneld.close()
        self.links.clear()
        self.start_tunneld()

    def start_tunneld(self) -> None:
        tunnel = TunnelChanged(peer_id=self.peer_id, port=9340, addresses=(self.address,))
        self.said = Said(tunnel)
        self.tunneld_tasks = Tasks()
        self.tunneld = BusServer("tunneld", self.paths, self.said, self._tunneld, self.tunneld_tasks)
        self.tunneld.start()

    async def stop_gossipd(self) -> None:
        """As if it had been killed: nothing is said and nothing written."""
        await self.daemon.tasks.cancel()
        self.daemon.bus.close()
        self.daemon.tunneld.close()

    async def restart_gossipd(self) -> None:
        await self.stop_gossipd()
        self.trust = TrustChanged(mesh_id=MeshId(""))
        self.start_gossipd()
        await until(lambda: self.trust.mesh_id, WAIT_SECONDS, f"gossipd of {self.name} is back")

    async def close(self) -> None:
        await self.stop_gossipd()
        await self.tasks.cancel()
        await self.tunneld_tasks.cancel()
        for server in (self.tunneld, *self.others):
            server.close()
        self.client.close()
        self._mirror.close()

    # -- asking ---------------------------------------------------------------------------------------------------

    async def ask(self, request: codec.Message, kind: type[T]) -> T:
        reply = await self.client.request(request, deadline_seconds=WAIT_SECONDS)
        assert isinstance(reply, kind), reply
        return reply

    async def refused(self, request: codec.Message) -> RequestRefused:
        try:
            reply = await self.client.request(request, deadline_seconds=WAIT_SECONDS)
        except RequestRefused as error:
            return error
        raise AssertionError(f"not refused: {reply}")

    async def shown(self) -> str:
        """Everything that anybody on the bus could see of this gossipd."""
        snapshot = await self.ask(GetSnapshot(), Snapshot)
        story = await self.client.request(GetStory(limit=500))
        return repr([codec.decode(item) for item in snapshot.items]) + repr(story) + repr(self.joins)

    def grant_of(self, other: TrustNode) -> Grant:
        """Raises: CertificateRefused, as the real tunneld's handshake would."""
        mine, theirs = self.trust, other.trust
        peer = verify_chain(
            [load_der(der) for der in theirs.chain_der],
            load_der(mine.root_der),
            mesh_id=mine.mesh_id,
            now=datetime.fromtimestamp(self.net.clock(), UTC),
            banned=mine.banned,
        )
        assert peer.peer_id == other.peer_id
        return peer.grant

    # -- tunneld --------------------------------------------------------------------------------------------------

    def _on_snapshot(self, messages: list[codec.Message]) -> None:
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: codec.Message) -> None:
        match message:
            case TrustChanged():
                self.trust = message
                for peer_id in set(message.banned) & set(self.links):
                    self.net.cut(self.net.by_peer(peer_id), self)
            case JoinChanged():
                self.joins.append(message)
            case PeersWanted():
                self.wanted = message

    def publish_link(self, link: LinkChanged) -> None:
        if link.state == "closed":
            self.links.pop(link.peer_id, None)
        else:
            self.links[link.peer_id] = link
        self.said.items = [self.said.items[0], *self.links.values()]
        self.tunneld.publish(link)

    async def _tunneld(self, request: codec.Message, _deadline_seconds: float) -> codec.Message:
        match request:
            case MakeCsr():
                return CsrMade(csr_der=make_csr(self.key))
            case SignRecord(payload=payload):
                signed = SignedRecord(payload=payload, signature=self.key.sign(payload), peer_id=self.peer_id)
                return RecordSigned(record=signed)
            case EnrollAt():
                self.enrolled.append(request)
                return await self.net.enrol(self, request)
            case SendToPeers():
                self.net.carry(self, request)
                return Done()
        raise RequestRefused("not_for_me", "the test's tunneld does not serve that")

    async def _none(self, request: codec.Message, _deadline_seconds: float) -> codec.Message:
        raise RequestRefused("not_for_me", f"nobody serves {request}")


class Net:
    """Some nodes and what connects them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.nodes: list[TrustNode] = []
        self.late_seconds = 0.0
        self.carried: list[bytes] = []

    def clock(self) -> float:
        return time.time() + self.late_seconds

    async def __aenter__(self) -> Net:
        self._stack = AsyncExitStack()
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def add(self, name: str) -> TrustNode:
        node = TrustNode(self, name, self._home / name)
        self.nodes.append(node)
        self._stack.push_async_callback(node.close)
        await node.start()
        return node

    def by_peer(self, peer_id: PeerId) -> TrustNode:
        return next(node for node in self.nodes if node.peer_id == peer_id)

    def connect(self, one: TrustNode, two: TrustNode) -> None:
        """Raises: CertificateRefused when one of them refuses the other."""
        for here, there in ((one, two), (two, one)):
            grant = here.grant_of(there)
            link = LinkChanged(peer_id=there.peer_id, state="connected", reason="over the test", grant=grant)
            here.publish_link(link)

    def cut(self, one: TrustNode, two: TrustNode) -> None:
        for here, there in ((one, two), (two, one)):
            here.publish_link(LinkChanged(peer_id=there.peer_id, state="closed", reason="cut"))

    def carry(self, sender: TrustNode, request: SendToPeers) -> None:
        self.carried.append(request.payload)
        for peer_id in request.peers:
            if peer_id in sender.links:
                target = self.by_peer(peer_id)
                grant = target.links[sender.peer_id].grant or "member"
                target.tunneld.publish(
                    FromPeer(peer_id=sender.peer_id, payload=request.payload, channel=request.channel, grant=grant)
                )

    async def enrol(self, joiner: TrustNode, request: EnrollAt) -> codec.Message:
        """ENROLL at the first node that answers."""
        for node in self.nodes:
            if node.address not in request.addresses:
                continue
            asked = RedeemInvite(
                invite=request.invite,
                csr_der=make_csr(joiner.key),
                observed_address="/ip4/127.0.0.1/udp/1",
                client=request.client,
                issuer_csr_der=request.issuer_csr_der,
            )
            client = BusClient("gossipd", node.paths)
            try:
                return await client.request(asked, deadline_seconds=5.0)
            except DaemonUnreachable:
                continue
            finally:
                client.close()
        raise RequestRefused("peer_unreachable", "no node of the mesh answered; is one of them up and reachable?")


async def refuses(net: Net, one: TrustNode, two: TrustNode) -> str:
    """Why the two do not connect."""
    await asyncio.sleep(0)
    try:
        net.connect(one, two)
    except (CertificateRefused, MeshError) as error:
        return error.detail
    raise AssertionError("connected")
