"""Tombstones, lost peers, what is shown: docs/spec/membership.md 10, 15; TRAPS 4."""

from __future__ import annotations

from services.gossipd.gossip import Gossip
from services.gossipd.roster import (
    ADDRESSES_LIMIT,
    KNOWN_LIMIT,
    SHOWN_SECONDS,
    TOMBSTONE_SECONDS,
    PersistPeers,
    PublishWanted,
    TrustKnown,
)
from services.gossipd.wanted import LOST_LIMIT
from shared.messages.gossip import Records
from shared.messages.mesh import MemberChanged
from shared.messages.trust import PeerAddresses
from tests.gossipd.gossip_net import Here, Other, shown

A, B = Other("a"), Other("b")


def listed(here: Here) -> dict[str, str]:
    said = here.core.snapshot(now=here.now)
    return {item.announcement.name: item.state for item in said if isinstance(item, MemberChanged) and not item.is_self}


def test_10_the_dead_are_shown_for_a_while_and_remembered_longer() -> None:
    here = Here(A, B)
    here.lose(B)
    here.lose(A)
    here.wait(10)
    assert listed(here) == {"a": "dead", "b": "dead"}
    here.now += SHOWN_SECONDS
    assert listed(here) == {}
    here.connect(A)
    assert shown(here.hear(A, Records(records=(A.signed(2, 1),))), A) == ["alive"]
    assert shown(here.hear(A, Records(records=(B.signed(1, 1),))), B) == []
    here.now += TOMBSTONE_SECONDS
    here.core.roster.forget_old(here.now)
    assert here.state(B) == "unknown"


def test_a_reason_says_who_and_since_when() -> None:
    here = Here(A, B)
    here.lose(B)
    here.wait(1.5)
    (b,) = [m for m in here.core.roster.members(here.now) if m.announcement.name == "b"]
    assert b.reason == "its link is lost and no other node reaches it, 1.0 s ago"


def test_15_lost_peers_are_kept_and_tried() -> None:
    here = Here(A)
    here.lose(A)
    effects = here.wait(10)
    assert here.state(A) == "dead"
    assert A.peer_id in [peer.peer_id for peer in here.core.roster.wanted.peers]
    (kept,) = [effect for effect in effects if isinstance(effect, PersistPeers)]
    known = {peer.peer_id: peer.addresses for peer in kept.peers}
    again = Gossip(Here().core.membership, seed=1, known=known)
    told = again.handle(TrustKnown(), now=0.0)
    assert [e.wanted.peers[0].peer_id for e in told if isinstance(e, PublishWanted)] == [A.peer_id]


def test_15_whom_a_join_named_is_tried_before_anything_is_known() -> None:
    here = Here()
    bootstrap = (PeerAddresses(peer_id=A.peer_id, addresses=("/x",)),)
    effects = here.tell(TrustKnown(grant="member", bootstrap=bootstrap))
    assert [e.wanted.peers for e in effects if isinstance(e, PublishWanted)] == [bootstrap]


def test_15_five_hundred_stale_addresses_do_not_matter() -> None:
    here = Here(A)
    many = [Other(f"stale{index}") for index in range(500)]
    addresses = tuple(f"/ip4/10.9.9.9/udp/{port}/quic-v1" for port in range(64))
    effects = here.hear(A, Records(records=tuple(other.signed(addresses=addresses) for other in many)))
    (wanted,) = [effect.wanted for effect in effects if isinstance(effect, PublishWanted)]
    assert len(wanted.peers) <= 40
    assert all(len(peer.addresses) <= ADDRESSES_LIMIT for peer in wanted.peers)
    here.tell(TrustKnown(grant="member"))
    assert len(here.core.roster._known) <= KNOWN_LIMIT + 501
    here.wait(1)
    assert here.state(A) in ("alive", "suspect")
    assert LOST_LIMIT <= 16
