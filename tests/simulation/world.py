"""A mesh on a virtual clock: the real gossipd machines of many nodes, and a world that loses, delays and cuts.

Everything that happens follows from the seed, so a failing seed is a replay. Signatures are real Ed25519; that a record
was verified once is remembered for all nodes. In the place of tunneld stands the world: it signs, connects those that
want each other and can reach each other, and moves bytes. ``on_publish`` is the seam for further daemons of a node.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.gossipd.announcement import NodeFacts
from services.gossipd.gossip import Gossip
from services.gossipd.membership import (
    Membership,
    PersistDemand,
    PersistIdentity,
    PublishDemand,
    PublishMember,
    PublishMesh,
    SignAnnouncement,
    SlotsReplaced,
)
from services.gossipd.mesh_identity import MeshIdentity, next_life
from services.gossipd.records import signed_by_its_node
from services.gossipd.roster import PersistPeers, PublishWanted, TrustKnown
from services.gossipd.stimuli import Effect, GoodbyeSaid, Refuse, SayGoodbye, Send, SignLoad, Stimulus
from shared import codec
from shared.ids import MeshId, ModelName, PeerId, SlotId
from shared.io.drive import Tick
from shared.messages.mesh import (
    Announcement,
    CountUnserved,
    DemandChanged,
    LoadRecord,
    MemberChanged,
    RecordSigned,
    SignedRecord,
    TunnelChanged,
)
from shared.messages.models import DeviceChanged, InventoryChanged
from shared.messages.trust import PeerAddresses
from shared.messages.tunnel import FromPeer, LinkChanged
from shared.peer_ids import peer_id_of

MESH = MeshId("simulated")
SIGN_SECONDS = 0.002
DIAL_SECONDS = 0.3
REDIAL_SECONDS = 1.0
CHECK_EACH = 17
"""Invariants are checked after each so many steps; checking takes time in proportion to the nodes."""
_verified: dict[tuple[str, bytes, bytes], bool] = {}


def verify(record: SignedRecord) -> bool:
    """Real verification, remembered: a hundred nodes check the same bytes."""
    key = (record.peer_id, record.signature, record.payload)
    if key not in _verified:
        if len(_verified) > 100_000:
            _verified.clear()
        _verified[key] = signed_by_its_node(record)
    return _verified[key]


@dataclass
class Weather:
    """What the network does to messages."""

    loss: float = 0.0
    duplication: float = 0.0
    delay_seconds: tuple[float, float] = (0.001, 0.02)
    """Drawn for each message, so that they overtake each other."""


@dataclass
class Node:
    """One node: its key, what is on its disk, and its running gossipd."""

    index: int
    name: str
    key: Ed25519PrivateKey
    peer_id: PeerId
    clock_offset: float
    clock_rate: float
    identity: MeshIdentity
    known: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)
    counted: dict[ModelName, int] = field(default_factory=dict)
    counted_slots: dict[SlotId, int] = field(default_factory=dict)
    gossip: Gossip | None = None
    life: int = 0
    tick_at: float | None = None
    wanted: frozenset[PeerId] = frozenset()
    members: dict[PeerId, MemberChanged] = field(default_factory=dict)
    demand: DemandChanged = field(default_factory=lambda: DemandChanged(demand=()))
    refused: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    @property
    def alive(self) -> bool:
        return self.gossip is not None

    def listed(self) -> set[str]:
        """Names of the other nodes that this one holds alive or suspects."""
        return {
            item.announcement.name
            for item in self.members.values()
            if item.state in ("alive", "suspect") and not item.is_self
        }


class World:
    """``nodes`` nodes that know of the first one, and a network between them."""

    def __init__(self, seed: int, nodes: int, weather: Weather | None = None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.weather = weather or Weather()
        self.on_publish: list[Callable[[Node, codec.Message], None]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._told = 0
        self._trace = blake2b(digest_size=16)
        self.links: set[frozenset[int]] = set()
        self.groups: dict[int, int] = {}
        """Which side of a partition each node is on; all on one by default."""
        self.nodes = [self._node(index) for index in range(nodes)]
        self.by_id = {node.peer_id: node for node in self.nodes}

    def _node(self, index: int) -> Node:
        key = Ed25519PrivateKey.from_private_bytes(blake2b(f"{self.seed}/{index}".encode(), digest_size=32).digest())
        peer_id = peer_id_of(key.public_key().public_bytes_raw())
        return Node(
            index=index,
            name=f"n{index}",
            key=key,
            peer_id=peer_id,
            clock_offset=self.random.uniform(0, 1e6),
            clock_rate=self.random.uniform(0.995, 1.005),
            identity=MeshIdentity(mesh_id=MESH, peer_id=peer_id),
        )

    # -- time ---------------------------------------------------------------------------------------------------

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, what))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit_seconds: float, step: float = 0.1) -> float:
        """Seconds until ``condition`` holds. Raises AssertionError after ``limit_seconds``."""
        start = self.now
        while not condition():
            assert self.now - start < limit_seconds, self.replay(f"not within {limit_seconds} s\n{self.views()}")
            self.run(step)
        return self.now - start

    def local(self, node: Node) -> float:
        return node.clock_offset + self.now * node.clock_rate

    # -- what happens to nodes ------------------------------------------------------------------------------------

    def start(self, *indexes: int) -> None:
        """Start nodes: new lives, with what is on their disks."""
        for node in (self.nodes[index] for index in indexes):
            assert node.gossip is None
            node.identity = next_life(node.identity, configured=True, random_bytes=bytes(16))
            node.life += 1
            node.members, node.wanted = {}, frozenset()
            membership = Membership(
                node.identity,
                NodeFacts(node_name=node.name, configured=True),
                counted=node.counted,
                counted_slots=node.counted_slots,
            )
            seed = self.seed * 1_000_003 + node.index * 1_009 + node.life
            node.gossip = Gossip(membership, seed=seed, known=node.known, verify=verify)
            first = self.nodes[0]
            bootstrap = PeerAddresses(peer_id=first.peer_id, addresses=(f"/sim/{first.index}",))
            self.tell(node, TrustKnown(grant="member", bootstrap=() if node is first else (bootstrap,)))
            self.tell(node, SlotsReplaced(()))
            self.tell(node, InventoryChanged(models=()))
            self.tell(node, DeviceChanged(device="cpu", vram_bytes=8, total_bytes=9, reserve_bytes=1, engine="e"))
            self.tell(node, TunnelChanged(peer_id=node.peer_id, port=1, addresses=(f"/sim/{node.index}",)))
            self._look_for_links(node)

    def start_all(self) -> None:
        self.start(*range(len(self.nodes)))

    def kill(self, index: int, *, silent: bool = True) -> None:
        """kill -9 of all of it. ``silent``: its peers' tunnels notice only after a while."""
        node = self.nodes[index]
        node.gossip = None
        for link in [link for link in self.links if index in link]:
            self._cut(link, self.random.uniform(8, 12) if silent else 0.01)

    def leave(self, index: int) -> None:
        """An orderly stop: goodbye, then gone."""
        self.tell(self.nodes[index], SayGoodbye())
        self.run(0.2)
        self.kill(index, silent=False)

    def partition(self, groups: dict[int, int]) -> None:
        """Nodes in different groups cannot reach each other; an empty dict heals."""
        self.groups = groups
        for link in list(self.links):
            if not self._reachable(*link):
                self._cut(link, self.random.uniform(0.01, 10))
        if not groups:
            for node in self.nodes:
                if node.alive:
                    self._look_for_links(node)

    def ask_for(self, index: int, model: str, count: int = 1) -> None:
        """Requests that entered at a node."""
        self.tell(self.nodes[index], CountUnserved(model=ModelName(model), count=count))

    # -- links ----------------------------------------------------------------------------------------------------

    def _reachable(self, one: int, other: int) -> bool:
        return self.groups.get(one, 0) == self.groups.get(other, 0)

    def _look_for_links(self, node: Node) -> None:
        for peer_id in sorted(node.wanted):
            self._dial(node, peer_id, node.life)
        for other in self.nodes:
            if node.peer_id in other.wanted:
                self._dial(other, node.peer_id, other.life)

    def _dial(self, node: Node, peer_id: PeerId, life: int) -> None:
        other = self.by_id.get(peer_id)
        if other is None:
            return

        def attempt() -> None:
            link = frozenset((node.index, other.index))
            if not node.alive or node.life != life or peer_id not in node.wanted or link in self.links:
                return
            if other.alive and self._reachable(*link):
                self.links.add(link)
                rtt = self.random.uniform(*self.weather.delay_seconds) * 2
                for here, there in ((node, other), (other, node)):
                    up = LinkChanged(
                        peer_id=there.peer_id,
                        state="connected",
                        reason="",
                        grant="member",
                        control="quic",
                        rtt_seconds=rtt,
                    )
                    self.tell(here, up)

        self.at(self.random.uniform(0.01, DIAL_SECONDS), attempt)

    def _cut(self, link: frozenset[int], after: float) -> None:
        if link not in self.links:
            return
        self.links.discard(link)
        one, other = (self.nodes[index] for index in sorted(link))
        for here, there in ((one, other), (other, one)):
            self._lose(here, there, here.life, after)

    def _lose(self, here: Node, there: Node, life: int, after: float) -> None:
        def noticed() -> None:
            if here.alive and here.life == life and frozenset((here.index, there.index)) not in self.links:
                self.tell(here, LinkChanged(peer_id=there.peer_id, state="waiting", reason="lost"))
                self._redial(here, there, life)

        self.at(after, noticed)

    def _redial(self, here: Node, there: Node, life: int) -> None:
        def again() -> None:
            if here.alive and here.life == life and frozenset((here.index, there.index)) not in self.links:
                self._dial(here, there.peer_id, life)

        self.at(REDIAL_SECONDS, again)

    # -- the machines -----------------------------------------------------------------------------------------------

    def tell(self, node: Node, stimulus: Stimulus | Tick) -> None:
        """Hand in a stimulus and carry out what follows."""
        if node.gossip is None:
            return
        effects = node.gossip.handle(stimulus, now=self.local(node))
        self._told += 1
        if self._told % CHECK_EACH == 0:
            node.gossip.check_invariants()
        self._trace.update(f"{self.now:.9f} {node.index} {type(stimulus).__name__} {len(effects)}".encode())
        for effect in effects:
            self._perform(node, effect)
        self._schedule(node)

    def _schedule(self, node: Node) -> None:
        assert node.gossip is not None
        deadline = node.gossip.next_deadline()
        if deadline is None:
            return
        due = max(self.now, (deadline - node.clock_offset) / node.clock_rate)
        if node.tick_at is not None and node.tick_at <= due and node.tick_at >= self.now:
            return
        node.tick_at = due
        life = node.life

        def tick() -> None:
            if node.alive and node.life == life and node.tick_at is not None and self.now >= node.tick_at - 1e-9:
                node.tick_at = None
                self.tell(node, Tick())

        # A hair later, so that rounding does not make a deadline come too early.
        self.at(due - self.now + 1e-6, tick)

    def _perform(self, node: Node, effect: Effect) -> None:
        match effect:
            case SignAnnouncement(announcement=record):
                self._sign(node, record)
            case SignLoad(load=record):
                self._sign(node, record)
            case Send():
                self._trace.update(effect.payload)
                for peer_id in effect.peers:
                    node.sent += 1
                    self._carry(node, peer_id, effect)
            case PublishMember(member=member):
                node.members[member.announcement.peer_id] = member
                self._published(node, member)
            case PublishDemand(demand=demand):
                node.demand = demand
                self._published(node, demand)
            case PublishWanted(wanted=wanted):
                node.wanted = frozenset(peer.peer_id for peer in wanted.peers)
                for peer_id in sorted(node.wanted):
                    self._dial(node, peer_id, node.life)
            case PersistIdentity(identity=identity):
                node.identity = identity
            case PersistPeers(peers=peers):
                node.known = {peer.peer_id: peer.addresses for peer in peers}
            case PersistDemand(totals=totals, slots=slots):
                node.counted, node.counted_slots = totals, slots
            case Refuse(code=code):
                node.refused[code] += 1
            case PublishMesh() | GoodbyeSaid():
                pass

    def _published(self, node: Node, message: codec.Message) -> None:
        for hear in self.on_publish:
            hear(node, message)

    def _sign(self, node: Node, record: Announcement | LoadRecord) -> None:
        payload = codec.encode(record)
        signed = SignedRecord(payload=payload, signature=node.key.sign(payload), peer_id=node.peer_id)
        life = node.life
        self.at(SIGN_SECONDS, lambda: self.tell(node, RecordSigned(record=signed)) if node.life == life else None)

    def _carry(self, node: Node, peer_id: PeerId, sent: Send) -> None:
        other = self.by_id.get(peer_id)
        if other is None or frozenset((node.index, other.index)) not in self.links:
            return
        copies = 1 + (self.random.random() < self.weather.duplication)
        arriving = FromPeer(peer_id=node.peer_id, payload=sent.payload, channel=sent.channel)
        for _ in range(copies):
            if self.random.random() < self.weather.loss:
                continue
            self._deliver(node, other, other.life, arriving)

    def _deliver(self, node: Node, other: Node, life: int, arriving: FromPeer) -> None:
        def arrive() -> None:
            if other.life == life and self._reachable(node.index, other.index):
                self.tell(other, arriving)

        self.at(self.random.uniform(*self.weather.delay_seconds), arrive)

    # -- looking ----------------------------------------------------------------------------------------------------

    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def converged(self) -> bool:
        """Whether all running nodes list exactly the running ones, alive, by their newest word."""
        running = self.running()
        newest = {node.peer_id: node.gossip.membership.own for node in running if node.gossip}
        return all(self._sees(node, newest) for node in running)

    def _sees(self, node: Node, newest: dict[PeerId, Announcement | None]) -> bool:
        seen = {peer: item for peer, item in node.members.items() if item.state in ("alive", "suspect")}
        return seen.keys() == newest.keys() and all(
            item.state == "alive"
            and replace(item.announcement, seq=0) == replace(newest[peer] or item.announcement, seq=0)
            for peer, item in seen.items()
        )

    def messages_per_node_second(self, seconds: float) -> float:
        """Over the next ``seconds``."""
        before = sum(node.sent for node in self.nodes)
        self.run(seconds)
        return (sum(node.sent for node in self.nodes) - before) / seconds / len(self.running())

    def trace(self) -> str:
        """A digest of everything that happened."""
        return self._trace.hexdigest()

    def views(self) -> str:
        return "\n".join(
            f"{node.name}{'' if node.alive else ' (down)'}: "
            + " ".join(f"{item.announcement.name}={item.state}" for item in node.members.values() if not item.is_self)
            for node in self.nodes[:12]
        )

    def replay(self, what: str) -> str:
        """``what``, and how to see it again."""
        return f"seed {self.seed}, {len(self.nodes)} nodes, {self.now:.1f} s: {what}"
