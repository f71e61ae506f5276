"""Failure detection, through the machine: docs/spec/membership.md 4 to 8, 17; TRAPS 8."""

from __future__ import annotations

from shared.messages.gossip import PeerDown, Probe, ProbeAck, ProbeRequest, Records
from tests.gossipd.gossip_net import Here, Other, sent, shown

A, B, C, D = Other("a"), Other("b"), Other("c"), Other("d")


def answered(here: Here, seconds: float, *answering: Other) -> dict[str, int]:
    """Let time pass while some answer their probes; how often each node was probed."""
    by_id = {other.peer_id: other for other in answering}
    probed: dict[str, int] = {}
    end = here.now + seconds
    while here.now < end:
        for to, probe in sent(here.wait(0.1), Probe):
            for peer_id in to:
                probed[peer_id] = probed.get(peer_id, 0) + 1
                if peer_id in by_id:
                    here.hear(by_id[peer_id], ProbeAck(nonce=probe.nonce, subject=peer_id))
    return probed


def test_04_each_node_has_its_turn() -> None:
    here = Here(A, B, C)
    probed = answered(here, 9, A, B, C)
    assert {A.peer_id, B.peer_id, C.peer_id} == probed.keys()
    assert all(2 <= count <= 4 for count in probed.values())


def test_04_a_silent_node_delays_nobody_else() -> None:
    here = Here(A, B, C)
    probed = answered(here, 9, A, B)
    assert probed[A.peer_id] >= 3
    assert probed[B.peer_id] >= 3
    assert (here.state(A), here.state(B), here.state(C)) == ("alive", "alive", "dead")


def test_05_silence_is_followed_by_help_suspicion_and_death() -> None:
    here = Here(A, B, C, D)
    here.lose(D)
    assert here.state(D) == "alive"
    effects = here.wait(0.6)
    assert shown(effects, D) == ["suspect"]
    ((to, claim),) = sent(effects, PeerDown)
    assert set(to) == {A.peer_id, B.peer_id, C.peer_id}
    assert (claim.state, claim.subject, claim.incarnation) == ("suspect", D.peer_id, 1)
    effects = here.wait(3)
    assert shown(effects, D) == ["dead"]
    assert [claim.state for _, claim in sent(effects, PeerDown) if claim.subject == D.peer_id] == ["dead"]


def test_06_a_lost_link_is_asked_about_at_once_and_an_answer_ends_it() -> None:
    here = Here(A, B)
    ((to, asked),) = sent(here.lose(B), ProbeRequest)
    assert (to, asked.subject) == ((A.peer_id,), B.peer_id)
    here.hear(A, ProbeAck(nonce=asked.nonce, subject=B.peer_id))
    assert shown(here.wait(0.9), B) == []
    assert here.state(B) == "alive"


def test_05_a_helper_vouches_only_for_what_it_was_asked() -> None:
    here = Here(A, B)
    here.lose(B)
    here.hear(A, ProbeAck(nonce=12345, subject=B.peer_id))
    here.wait(0.6)
    assert here.state(B) == "suspect"


def test_05_a_node_heard_of_just_now_may_take_a_while_to_connect() -> None:
    here = Here(A)
    here.hear(A, Records(records=(B.signed(),)))
    answered(here, 5, A)
    assert here.state(B) == "alive"
    answered(here, 8, A)
    assert here.state(B) == "dead"


def test_07_an_answer_ends_a_suspicion() -> None:
    here = Here(A, B)
    here.lose(B)
    here.wait(0.6)
    here.connect(B)
    assert here.state(B) == "alive"


def test_07_a_newer_record_ends_a_suspicion_and_undoes_a_death() -> None:
    here = Here(A, B)
    here.lose(B)
    here.wait(0.6)
    assert shown(here.hear(A, Records(records=(B.signed(2, 1),))), B) == ["alive"]
    here.connect(B)
    here.lose(B)
    here.wait(8)
    assert here.state(B) == "dead"
    here.hear(A, Records(records=(B.signed(2, 2),)))
    assert here.state(B) == "dead", "the same life does not come back"
    here.hear(A, Records(records=(B.signed(3, 1),)))
    assert here.state(B) == "alive"


def test_08_claims_are_passed_on_once() -> None:
    here = Here(A, B, C)
    here.now += 5
    claim = PeerDown(accuser=A.peer_id, subject=C.peer_id, incarnation=1)
    ((to, passed_on),) = sent(here.hear(A, claim), PeerDown)
    assert (set(to), passed_on) == ({B.peer_id, C.peer_id}, claim)
    assert here.state(C) == "dead"
    assert sent(here.hear(B, claim), PeerDown) == []


def test_08_a_death_claimed_of_a_node_that_just_answered_is_checked() -> None:
    here = Here(A, B)
    here.hear(B, Probe(nonce=1))
    claim = PeerDown(accuser=A.peer_id, subject=B.peer_id, incarnation=1)
    effects = here.hear(A, claim)
    assert here.state(B) == "alive"
    assert [to for to, _ in sent(effects, PeerDown)] == [(B.peer_id,)]
    assert [to for to, _ in sent(effects, Probe)] == [(B.peer_id,)]


def test_08_claims_about_an_earlier_life_are_nothing() -> None:
    here = Here(A, B)
    here.hear(B, Records(records=(B.signed(4, 1),)))
    assert here.hear(A, PeerDown(accuser=A.peer_id, subject=B.peer_id, incarnation=3)) == []


def test_17_a_node_that_slept_blames_nobody() -> None:
    here = Here(A, B)
    here.lose(B)
    here.wait(0.6)
    assert here.state(B) == "suspect"
    here.now += 3600
    here.wait(0.2)
    assert (here.state(A), here.state(B)) == ("alive", "suspect"), "it has as long to refute as if nobody had slept"
    here.connect(B)
    answered(here, 5, A, B)
    assert (here.state(A), here.state(B)) == ("alive", "alive")
