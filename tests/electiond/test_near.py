"""docs/spec/election.md: near sets and their hysteresis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.electiond.near import FAR_SECONDS, NEAR_SECONDS, NearSets
from shared.ids import MeshId, PeerId
from shared.messages.mesh import LoadRecord, PeerRtt
from tests.electiond.nodes import member

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def test_unknown_passes_and_the_limit_is_below_80_ms() -> None:
    near = NearSets()
    assert near.near(A, B)
    assert near.rtt_seconds(A, B) is None
    near.report(A, B, NEAR_SECONDS)
    assert not near.near(A, B)
    assert not near.near(B, A)
    near.report(A, C, NEAR_SECONDS - 0.001)
    assert near.near(A, C)


@given(st.lists(st.floats(0.075, 0.085), min_size=1, max_size=30))
def test_a_round_trip_that_swings_about_the_limit_changes_at_most_once(rtts: list[float]) -> None:
    """TRAPS 12: RTT swinging 75-85 ms."""
    near = NearSets()
    seen = []
    for rtt in rtts:
        near.report(A, B, rtt)
        seen.append(near.near(A, B))
    assert sum(one != other for one, other in pairwise(seen)) <= 1


def test_from_a_relay_to_a_direct_connection_is_near_at_once_and_back() -> None:
    near = NearSets()
    near.report(A, B, 2.6)
    assert not near.near(A, B)
    near.report(A, B, 0.010)
    assert near.near(A, B)
    near.report(A, B, FAR_SECONDS)
    assert not near.near(A, B)


def test_the_smaller_of_both_reports_counts_and_tables_of_others_are_read() -> None:
    near = NearSets()
    near.report(A, B, 0.5)
    table = LoadRecord(
        peer_id=B,
        incarnation=1,
        seq=1,
        mesh_id=MeshId("m"),
        rtts=(PeerRtt(peer_id=A, rtt_seconds=0.02), PeerRtt(peer_id=C, rtt_seconds=0.3)),
    )
    near.observe(replace(member("b", is_self=False), load=table, rtt_seconds=0.4), own=A)
    assert near.rtt_seconds(A, B) == 0.02
    assert near.near(A, B)
    assert not near.near(C, B)


def test_who_is_gone_is_forgotten() -> None:
    near = NearSets()
    near.report(A, B, 0.5)
    near.observe(member("b", is_self=False, state="dead"), own=A)
    assert near.near(A, B)
    assert near.rtt_seconds(A, B) is None
