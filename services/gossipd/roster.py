"""All other nodes of the mesh: their records, whether they answer, and whom to keep connected.

Source: docs/spec/membership.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.gossipd.membership import PublishMember
from services.gossipd.records import RecordStore, Verify
from services.gossipd.spreading import Spreading
from services.gossipd.swim import Swim, Tell
from services.gossipd.wanted import LOST_LIMIT, LOST_TURN_SECONDS, lost_turn, near
from shared.ids import MeshId, PeerId
from shared.messages.mesh import Announcement, LoadRecord, MemberChanged, MemberState
from shared.messages.trust import Grant, PeerAddresses, PeersWanted
from shared.messages.tunnel import LinkChanged

SHOWN_SECONDS = 60.0
"""A node that is dead or left is still shown so long."""
TOMBSTONE_SECONDS = 86_400.0
"""And remembered so long, so that old news of it cannot bring it back."""
TOMBSTONES_LIMIT = 500
KNOWN_LIMIT = 128
"""Peers whose addresses are kept over a restart and tried for ever."""
ADDRESSES_LIMIT = 16
PERSIST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class TrustKnown:
    """What the mesh's certificates and issuers say; ``grant`` is this node's own. ``bootstrap``: whom to try first."""

    banned: frozenset[PeerId] = frozenset()
    trusted: frozenset[PeerId] = frozenset()
    grant: Grant | None = None
    bootstrap: tuple[PeerAddresses, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishWanted:
    wanted: PeersWanted


@dataclass(frozen=True, slots=True)
class PersistPeers:
    """Addresses of other nodes, for the next start."""

    peers: tuple[PeerAddresses, ...]


class Roster:
    """The others, as this node sees them."""

    def __init__(self, own: PeerId, mesh_id: MeshId, seed: int, trust: TrustKnown, verify: Verify) -> None:
        self.own = own
        self.store = RecordStore(own, mesh_id, verify)
        self.swim = Swim(own, seed)
        self.spreading = Spreading(own, seed)
        self.links: dict[PeerId, LinkChanged] = {}
        self.grants: dict[PeerId, Grant] = {}
        self.wanted = PeersWanted(peers=())
        self._trust = trust
        self._known: dict[PeerId, tuple[str, ...]] = {}
        self._persisted: dict[PeerId, tuple[str, ...]] = {}
        self._down_before: dict[PeerId, int] = {}
        self._dirty: set[PeerId] = set()
        self._stale = True
        """Whether whom to keep connected has to be computed again."""
        self._turn_at: float | None = None
        self._turn = 0
        self._persist_at: float | None = None

    # -- what is heard ------------------------------------------------------------------------------------------

    def remember(self, known: Mapping[PeerId, tuple[str, ...]]) -> None:
        self._known.update(known)
        self._persisted = dict(self._known)
        self._stale = True

    def announced(self, said: Announcement, sender: PeerId, now: float) -> None:
        """A node's newer word about itself, already checked."""
        peer_id = said.peer_id
        first = peer_id not in self.swim.peers
        self.swim.names[peer_id] = said.name
        self.swim.own_record(peer_id, said.incarnation, leaving=said.state == "leaving", now=now)
        down = self._down_before.pop(peer_id, -1)
        if first and said.incarnation <= down and sender != peer_id:
            self.swim.peers[peer_id].state = "dead"
            self.swim.peers[peer_id].reason = "was down before this node heard of it"
            self.swim.changed.discard(peer_id)
        elif self.swim.peers[peer_id].state in ("alive", "suspect"):
            self._dirty.add(peer_id)
        self.spreading.announcement(peer_id, sender, now)
        self._stale = True

    def loaded(self, said: LoadRecord, sender: PeerId, now: float) -> bool:
        """A node's newer load. Returns whether there was one before."""
        known = said.peer_id in self.swim.links_of
        self.swim.links_of[said.peer_id] = frozenset(item.peer_id for item in said.rtts)
        self.spreading.load(said.peer_id, sender, now)
        if self.swim.peers[said.peer_id].state in ("alive", "suspect"):
            self._dirty.add(said.peer_id)
        return known

    def link(self, link: LinkChanged, now: float) -> tuple[bool, list[Tell]]:
        """Whether it came up just now, and what follows from it."""
        before = self.links.get(link.peer_id)
        up = link.state == "connected"
        if link.state == "closed":
            self.links.pop(link.peer_id, None)
        else:
            self.links[link.peer_id] = link
        if link.grant is not None:
            self.grants[link.peer_id] = link.grant
        peer = self.swim.peers.get(link.peer_id)
        rtt_moved = peer is not None and up and link.rtt_seconds is not None and link.rtt_seconds != peer.rtt_seconds
        came_up = up and (before is None or before.state != "connected")
        if peer is not None and peer.state in ("alive", "suspect") and (rtt_moved or came_up):
            self._dirty.add(link.peer_id)
        told = self.swim.link(link.peer_id, connected=up, rtt_seconds=link.rtt_seconds, now=now)
        return came_up, told

    def take_trust(self, trust: TrustKnown, now: float) -> None:
        self._trust = trust
        for peer_id in trust.banned & self.swim.peers.keys():
            peer = self.swim.peers[peer_id]
            if peer.state in ("alive", "suspect"):
                peer.nonce, peer.dead_at = 0, None
                peer.state, peer.reason, peer.state_at = "left", "banned from the mesh", now
                self.swim.changed.add(peer_id)
        self._dirty |= {peer_id for peer_id in self.swim.present() if self.grants.get(peer_id) == "guest"}
        self._stale = True

    def down_before_known(self, peer_id: PeerId, incarnation: int) -> None:
        """Others hold a node dead that this one knows nothing of: its record shall not bring it back."""
        self._down_before.pop(peer_id, None)
        self._down_before[peer_id] = incarnation
        while len(self._down_before) > TOMBSTONES_LIMIT:
            del self._down_before[next(iter(self._down_before))]

    # -- time ---------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        deadlines = (self.swim.next_deadline(), self.spreading.next_deadline(), self._turn_at, self._persist_at)
        return min((at for at in deadlines if at is not None), default=None)

    def tick(self, now: float) -> tuple[list[Tell], list[tuple[PeerId, list[PeerId], bool]]]:
        if self._turn_at is not None and now >= self._turn_at:
            self._turn_at, self._turn, self._stale = None, self._turn + 1, True
        return self.swim.tick(now), self.spreading.due(self.swim_links(), self.swim.links_of, now)

    def forget_old(self, now: float) -> None:
        """Drop tombstones that have stood long enough, and the oldest when there are too many."""
        gone = sorted(
            (peer for peer in self.swim.peers.values() if peer.state in ("dead", "left")),
            key=lambda peer: peer.state_at,
        )
        surplus = len(gone) - TOMBSTONES_LIMIT
        for index, peer in enumerate(gone):
            if index < surplus or now - peer.state_at > TOMBSTONE_SECONDS:
                self.swim.forget(peer.peer_id)
                self.swim.names.pop(peer.peer_id, None)
                self.store.forget(peer.peer_id)

    # -- what is told -------------------------------------------------------------------------------------------

    def others(self) -> list[PeerId]:
        return self.swim.present()

    def swim_links(self) -> tuple[PeerId, ...]:
        """Everybody connected, whether or not anything is known of them."""
        return tuple(sorted(peer_id for peer_id, link in self.links.items() if link.state == "connected"))

    def rtts(self) -> dict[PeerId, float | None]:
        return {peer_id: self.links[peer_id].rtt_seconds for peer_id in self.swim_links()}

    def states(self) -> dict[PeerId, MemberState]:
        return {peer.peer_id: peer.state for peer in self.swim.peers.values()}

    def news(self, now: float) -> list[PublishMember | PublishWanted | PersistPeers]:
        """Everything that changed since the last call."""
        effects: list[PublishMember | PublishWanted | PersistPeers] = []
        if self.swim.changed:
            self._stale = True
        for peer_id in sorted(self._dirty | self.swim.changed):
            member = self.member(peer_id, now)
            if member is not None:
                effects.append(PublishMember(member))
        self._dirty.clear()
        self.swim.changed.clear()
        if self._stale:
            self._stale = False
            wanted = self._whom(now)
            if wanted != self.wanted:
                self.wanted = wanted
                effects.append(PublishWanted(wanted))
        if self._persist_at is not None and now >= self._persist_at:
            self._persist_at = None
            if self._known != self._persisted:
                self._persisted = dict(self._known)
                kept = (PeerAddresses(peer_id=peer, addresses=at) for peer, at in sorted(self._known.items()))
                effects.append(PersistPeers(tuple(kept)))
        return effects

    def members(self, now: float) -> list[MemberChanged]:
        """All that are there, and those that are gone since a short while."""
        shown = []
        for peer in self.swim.peers.values():
            if peer.state in ("alive", "suspect") or now - peer.state_at < SHOWN_SECONDS:
                member = self.member(peer.peer_id, now)
                if member is not None and not peer.reason.startswith("was down before"):
                    shown.append(member)
        return sorted(shown, key=lambda member: member.announcement.peer_id)

    def member(self, peer_id: PeerId, now: float) -> MemberChanged | None:
        peer, held = self.swim.peers.get(peer_id), self.store.held.get(peer_id)
        if peer is None or held is None:
            return None
        link = self.links.get(peer_id)
        known = self.grants.get(peer_id)
        grant: Grant = known or ("client" if held.announcement.role == "client" else "member")
        reason = peer.reason
        if peer.state != "alive" and now - peer.state_at >= 0.1:
            reason += f", {now - peer.state_at:.1f} s ago"
        return MemberChanged(
            announcement=held.announcement,
            state=peer.state,
            reason=reason,
            age_seconds=round(now - (peer.heard_at if peer.heard_at is not None else peer.known_at), 3),
            rtt_seconds=link.rtt_seconds if link and link.rtt_seconds is not None else peer.rtt_seconds,
            load=held.load,
            grant=grant,
            trusted=known in ("member", "issuer") or peer_id in self._trust.trusted,
        )

    def farewell(self, now: float) -> list[MemberChanged]:
        """All others as left: this node is in another mesh from now on."""
        told = []
        for peer_id in self.swim.present():
            peer = self.swim.peers[peer_id]
            peer.state, peer.reason, peer.state_at = "left", "this node is in another mesh now", now
            member = self.member(peer_id, now)
            if member is not None:
                told.append(member)
        return told

    def _whom(self, now: float) -> PeersWanted:
        """Whom to keep connected, with addresses; also keeps what has to be known after a restart."""
        present = [peer_id for peer_id in self.swim.present() if peer_id not in self._trust.banned]
        hosts = [peer_id for peer_id in present if self.store.held[peer_id].announcement.hosted]
        live = near(self.own, present, hosts)
        self.swim.wanted = live
        for peer in self._trust.bootstrap:
            if peer.peer_id not in self.swim.peers:
                self._known.setdefault(peer.peer_id, peer.addresses[:ADDRESSES_LIMIT])
        for peer_id, held in self.store.held.items():
            if held.announcement.addresses and self.swim.peers[peer_id].state != "left":
                self._known[peer_id] = held.announcement.addresses[:ADDRESSES_LIMIT]
        gone = {peer.peer_id for peer in self.swim.peers.values() if peer.state == "left"}
        for peer_id in gone | self._trust.banned | {self.own}:
            self._known.pop(peer_id, None)
        lost = sorted(self._known.keys() - set(present), key=self._lost_first)
        for peer_id in lost[KNOWN_LIMIT:]:
            del self._known[peer_id]
        lost = lost[:KNOWN_LIMIT]
        if len(lost) > LOST_LIMIT and self._turn_at is None:
            self._turn_at = now + LOST_TURN_SECONDS
        if self._known != self._persisted and self._persist_at is None:
            self._persist_at = now + PERSIST_SECONDS
        chosen = sorted(live | set(lost_turn(lost, self._turn)))
        return PeersWanted(
            peers=tuple(PeerAddresses(peer_id=peer, addresses=self._known.get(peer, ())) for peer in chosen)
        )

    def _lost_first(self, peer_id: PeerId) -> tuple[float, PeerId]:
        peer = self.swim.peers.get(peer_id)
        return (-peer.state_at if peer else 0.0), peer_id

    def check_invariants(self) -> None:
        assert self.own not in self.store.held
        assert self.swim.peers.keys() == self.store.held.keys()
        for peer in self.swim.peers.values():
            assert (peer.dead_at is not None) == (peer.state == "suspect"), peer
            assert not (peer.nonce and peer.state in ("dead", "left")), peer
