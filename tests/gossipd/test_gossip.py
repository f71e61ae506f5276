"""The machine as a whole: what a node tells, takes and refuses. Rules of docs/spec/membership.md by number."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gossipd.gossip import CATCH_UP_SECONDS, Gossip
from services.gossipd.membership import MeshAdopted, PersistIdentity, PublishDemand, PublishMember, SignAnnouncement
from services.gossipd.roster import PublishWanted, TrustKnown
from services.gossipd.stimuli import GoodbyeSaid, LinksReplaced, Refuse, SayGoodbye, Send, SignLoad
from shared import codec
from shared.ids import MeshId, ModelName
from shared.messages.gossip import (
    Digest,
    DigestEntry,
    PeerDown,
    PeerLeaving,
    Probe,
    ProbeAck,
    ProbeRequest,
    Records,
    RecordsWanted,
)
from shared.messages.mesh import CountUnserved, ModelCount
from shared.messages.trust import WhoAmI
from shared.messages.tunnel import FromPeer, LinkChanged
from tests.gossipd.gossip_net import MESH, Here, Other, sent, shown

A, B, C = Other("a"), Other("b"), Other("c")


def refusals(effects: list[object]) -> list[str]:
    return [effect.code for effect in effects if isinstance(effect, Refuse)]


def test_19_a_mesh_of_one_says_nothing_to_anybody() -> None:
    here = Here()
    effects = here.tell(CountUnserved(model=ModelName("m"))) + here.wait(5)
    assert not [effect for effect in effects if isinstance(effect, Send | SignLoad | PublishWanted)]
    assert [effect for effect in effects if isinstance(effect, PublishDemand)]


def test_13_a_new_link_hears_this_nodes_records_and_digest_at_once() -> None:
    here = Here()
    effects = here.connect(A)
    ((to, records),) = sent(effects, Records)
    assert to == (A.peer_id,)
    assert [record.peer_id for record in records.records] == [here.me.peer_id]
    ((_, digest),) = sent(effects, Digest)
    assert [entry.peer_id for entry in digest.entries] == [here.me.peer_id]


def test_02_a_node_appears_by_its_record_and_is_wanted() -> None:
    here = Here()
    here.connect(A)
    effects = here.hear(A, Records(records=(A.signed(),)))
    assert shown(effects, A) == ["alive"]
    (wanted,) = [effect.wanted for effect in effects if isinstance(effect, PublishWanted)]
    assert [(peer.peer_id, peer.addresses) for peer in wanted.peers] == [(A.peer_id, A.announcement().addresses)]
    (member,) = [effect.member for effect in effects if isinstance(effect, PublishMember)]
    assert (member.grant, member.trusted, member.rtt_seconds) == ("member", True, 0.01)


def test_02_what_does_not_count_is_refused_and_named() -> None:
    here = Here(A)
    forged = replace(B.signed(), signature=A.sign(B.announcement()).signature)
    assert refusals(here.hear(A, Records(records=(forged,)))) == ["forged"]
    inside = A.sign(B.announcement())
    assert refusals(here.hear(A, Records(records=(inside,)))) == ["forged"]
    assert refusals(here.hear(A, Records(records=(B.signed(mesh_id=MeshId("x")),)))) == ["wrong_mesh"]
    assert refusals(here.hear(A, Digest(mesh_id=MeshId("x"), entries=()))) == ["wrong_mesh"]
    assert refusals(here.hear(A, WhoAmI())) == ["not_for_gossip"]
    assert refusals(here.tell(FromPeer(peer_id=A.peer_id, payload=b"\xff\xff"))) == ["malformed"]
    assert here.state(B) == "unknown"


def test_02_replayed_news_is_ignored() -> None:
    here = Here(A)
    here.hear(A, Records(records=(A.signed(3, 2),)))
    assert here.hear(A, Records(records=(A.signed(3, 1), A.signed(2, 9), A.signed(3, 2)))) == []


def test_11_a_goodbye_counts_at_once_and_only_about_oneself() -> None:
    here = Here(A, B)
    forged = replace(B.signed(1, 2, state="leaving"), signature=bytes(64))
    assert refusals(here.hear(A, PeerLeaving(record=forged), channel="peer_leaving")) == ["forged"]
    assert here.state(B) == "alive"
    effects = here.hear(A, PeerLeaving(record=B.signed(1, 2, state="leaving")), channel="peer_leaving")
    assert shown(effects, B) == ["left"]
    assert here.hear(A, Records(records=(B.signed(1, 3),))) == [], "the same life does not come back"
    assert here.state(B) == "left"
    assert shown(here.hear(B, Records(records=(B.signed(2, 1),))), B) == ["alive"]


def test_11_this_node_says_goodbye_signed_and_small() -> None:
    here = Here(A)
    effects = here.tell(SayGoodbye())
    ((to, goodbye),) = sent(effects, PeerLeaving)
    said = codec.decode(goodbye.record.payload)
    assert (to, said.state, said.available_models, said.hosted) == ((A.peer_id,), "leaving", (), ())
    assert isinstance(effects[-1], GoodbyeSaid)
    assert Here().tell(SayGoodbye()) == [GoodbyeSaid()], "alone there is nobody to tell"


def test_09_an_accusation_of_this_node_is_refuted() -> None:
    here = Here(A)
    claim = PeerDown(accuser=A.peer_id, subject=here.me.peer_id, incarnation=5, state="suspect")
    effects = here.hear(A, claim, channel="peer_down")
    (kept,) = [effect.identity for effect in effects if isinstance(effect, PersistIdentity)]
    (said,) = [effect.announcement for effect in effects if isinstance(effect, SignAnnouncement)]
    assert kept.incarnation == said.incarnation == 6
    assert effects.index(next(e for e in effects if isinstance(e, PersistIdentity))) == 0, "kept before it is said"
    assert sent(effects, Records)
    assert here.hear(A, claim) == [], "of the life before: refuted already"
    assert here.hear(A, replace(claim, incarnation=6)) == [], "at most twice a second"
    assert [e.identity.incarnation for e in here.wait(1) if isinstance(e, PersistIdentity)] == [7]


def test_03_a_node_that_forgot_its_number_goes_above_what_others_hold() -> None:
    here = Here(A)
    entry = DigestEntry(peer_id=here.me.peer_id, incarnation=50, seq=3)
    effects = here.hear(A, Digest(mesh_id=MESH, entries=(entry,)))
    assert [e.identity.incarnation for e in effects if isinstance(e, PersistIdentity)] == [51]
    far = DigestEntry(peer_id=here.me.peer_id, incarnation=2**61, seq=3)
    here.wait(2)
    assert not [e for e in here.hear(A, Digest(mesh_id=MESH, entries=(far,))) if isinstance(e, PersistIdentity)]


def test_13_a_digest_is_answered_with_what_is_newer_and_asks_for_what_is_lacking() -> None:
    here = Here(A, B)
    entries = (
        DigestEntry(peer_id=A.peer_id, incarnation=1, seq=1),
        DigestEntry(peer_id=B.peer_id, incarnation=1, seq=0),
        DigestEntry(peer_id=C.peer_id, incarnation=1, seq=1),
    )
    effects = here.hear(A, Digest(mesh_id=MESH, entries=entries))
    ((_, records),) = sent(effects, Records)
    assert {record.peer_id for record in records.records} == {B.peer_id, here.me.peer_id}
    ((_, wanted),) = sent(effects, RecordsWanted)
    assert wanted.peers == (C.peer_id,)
    ((_, answer),) = sent(here.hear(A, RecordsWanted(peers=(B.peer_id, C.peer_id))), Records)
    assert [record.peer_id for record in answer.records] == [B.peer_id]


def test_10_what_others_hold_dead_does_not_come_alive_by_a_third_party() -> None:
    here = Here(A)
    dead = DigestEntry(peer_id=C.peer_id, incarnation=4, seq=1, state="dead")
    here.hear(A, Digest(mesh_id=MESH, entries=(dead,)))
    effects = here.hear(A, Records(records=(C.signed(4, 1),)))
    assert shown(effects, C) == []
    assert here.state(C) == "dead"
    here.connect(C)
    assert shown(here.hear(C, Records(records=(C.signed(5, 1),))), C) == ["alive"]


def test_10_a_stale_view_of_a_peer_is_corrected() -> None:
    here = Here(A, B)
    here.lose(B)
    here.wait(10)
    assert here.state(B) == "dead"
    alive = DigestEntry(peer_id=B.peer_id, incarnation=1, seq=1)
    told = sent(here.hear(A, Digest(mesh_id=MESH, entries=(alive,))), PeerDown)
    about_b = [(to, claim.state) for to, claim in told if claim.subject == B.peer_id]
    assert about_b == [((A.peer_id,), "suspect")]


def test_10_a_dead_node_that_speaks_is_told_so() -> None:
    here = Here(A, B)
    here.lose(B)
    here.wait(10)
    ((to, claim),) = sent(here.hear(B, Probe(nonce=1)), PeerDown)
    assert (to, claim.subject, claim.state) == ((B.peer_id,), B.peer_id, "dead")
    assert not sent(here.hear(B, Probe(nonce=2)), PeerDown), "not with every message"


def test_16_guests_do_not_say_who_is_down_and_the_banned_nothing() -> None:
    here = Here(A, B)
    claim = PeerDown(accuser=A.peer_id, subject=B.peer_id, incarnation=1)
    assert refusals(here.hear(A, claim, grant="guest")) == ["claim_of_guest"]
    effects = here.tell(TrustKnown(banned=frozenset({B.peer_id}), grant="member"))
    assert shown(effects, B) == ["left"]
    assert refusals(here.hear(B, Probe(nonce=1))) == ["banned"]
    assert here.hear(A, Records(records=(B.signed(9, 9),))) == []
    assert B.peer_id not in [peer.peer_id for peer in here.core.roster.wanted.peers]


def test_01_load_is_told_at_most_once_a_second_and_only_when_it_moved() -> None:
    here = Here(A)
    here.wait(1.5)
    here.hear(A, Probe(nonce=1))
    assert not [e for e in here.wait(1.5) if isinstance(e, SignLoad)]
    here.hear(A, Probe(nonce=2))
    for _ in range(20):
        here.tell(CountUnserved(model=ModelName("m")))
    first = [e for e in here.wait(0.5) if isinstance(e, SignLoad)]
    assert [item.load.demand for item in first] == [(ModelCount(model=ModelName("m"), requests_total=20),)]
    here.tell(CountUnserved(model=ModelName("m")))
    assert not [e for e in here.wait(0.4) if isinstance(e, SignLoad)]
    assert len([e for e in here.wait(1) if isinstance(e, SignLoad)]) == 1


def test_demand_of_others_counts_once_however_often_it_is_told() -> None:
    here = Here(A, B)
    loads = tuple(
        other.sign(other.load(1, seq, demand=(ModelCount(model=ModelName("m"), requests_total=10 * seq),)))
        for other in (A, B)
        for seq in (1, 2)
    )
    for _ in range(3):
        here.hear(A, Records(records=loads))
    here.tell(CountUnserved(model=ModelName("m"), count=5))
    (summary,) = here.core.membership.demand.summary(now=here.now)
    assert summary.requests_total == 45


def test_another_mesh_forgets_everybody() -> None:
    here = Here(A)
    here.tell(SayGoodbye())
    before = here.core.membership.identity.incarnation
    effects = here.tell(MeshAdopted(mesh_id=MeshId("new"), mesh_name=""))
    assert shown(effects, A) == ["left"]
    assert here.core.membership.identity.incarnation > before, "the goodbye does not count when it comes back"
    assert here.core.membership.own is not None
    assert here.core.membership.own.state == "active"
    assert here.core.roster.others() == []


def test_a_goodbye_that_is_not_followed_by_leaving_is_taken_back() -> None:
    here = Here(A)
    here.tell(SayGoodbye())
    effects = here.wait(20)
    said = [e.announcement for e in effects if isinstance(e, SignAnnouncement)]
    assert (said[-1].state, said[-1].incarnation) == ("active", 6)


def test_links_that_a_snapshot_no_longer_names_are_lost() -> None:
    here = Here(A, B)
    effects = here.tell(LinksReplaced(()))
    assert here.core.roster.swim.connected() == ()
    assert here.wait(8)
    assert effects == [] or here.state(A) == "dead"


def test_a_probe_for_somebody_else_is_relayed() -> None:
    here = Here(A, B)
    ((to, probe),) = sent(here.hear(A, ProbeRequest(nonce=77, subject=B.peer_id)), Probe)
    assert to == (B.peer_id,)
    ((back, ack),) = sent(here.hear(B, ProbeAck(nonce=probe.nonce, subject=B.peer_id)), ProbeAck)
    assert (back, ack) == ((A.peer_id,), ProbeAck(nonce=77, subject=B.peer_id))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["gossip", "peer_down", "peer_leaving"]))
def test_any_bytes_of_a_peer_are_a_clean_refusal(payload: bytes, channel: str) -> None:
    here = Here(A)
    effects = here.tell(FromPeer(peer_id=A.peer_id, payload=payload, channel=channel))  # type: ignore[arg-type]
    assert set(refusals(effects)) <= {"malformed", "not_for_gossip"}
    assert here.state(A) == "alive"


def restarted(*known: Other) -> Here:
    """A machine that knows peers from an earlier life."""
    here = Here()
    here.core = Gossip(here.core.membership, seed=8, known={other.peer_id: ("/there",) for other in known})
    here.tell(TrustKnown(grant="member"))
    return here


def test_after_a_restart_nothing_is_told_before_the_connected_peers_have_spoken() -> None:
    """Else every other node would look gone for a moment, and requests for its models would fail."""
    here = restarted(A, B)
    assert not here.core.caught_up(now=here.now)
    links = [LinkChanged(peer_id=other.peer_id, state="connected", reason="", grant="member") for other in (A, B)]
    here.tell(LinksReplaced(tuple(links)))
    assert not here.core.caught_up(now=here.now)
    here.hear(A, Records(records=(A.signed(),)))
    assert not here.core.caught_up(now=here.now)
    here.hear(A, Records(records=(B.signed(),)))
    assert here.core.caught_up(now=here.now)


def test_a_restart_without_an_answer_ends_all_the_same() -> None:
    here = restarted(A)
    here.tell(LinksReplaced(()))
    assert not here.core.caught_up(now=here.now)
    assert here.core.caught_up(now=here.now + CATCH_UP_SECONDS)


def test_a_node_that_knows_nobody_waits_for_nobody() -> None:
    assert Here().core.caught_up(now=0.0)
