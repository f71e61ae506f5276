"""docs/spec/election.md: settle and debounce."""

from __future__ import annotations

from services.electiond.pace import DEBOUNCE_SECONDS, LATEST_SECONDS, PEER_WAIT_SECONDS, SETTLE_SECONDS, Pace
from tests.electiond.nodes import GB, model, node, served


def test_a_node_alone_waits_for_nothing() -> None:
    pace = Pace()
    pace.observe([], now=100.0)
    pace.expect_peers(False, now=100.0)
    assert pace.ready_at() < 0
    assert not pace.moved


def test_two_seconds_after_the_last_change() -> None:
    pace = Pace()
    pace.observe([node("b")], now=100.0)
    pace.observe([node("b")], now=101.0)
    assert pace.ready_at() == 100.0 + SETTLE_SECONDS
    pace.observe([node("b"), node("c")], now=101.5)
    assert pace.ready_at() == 101.5 + SETTLE_SECONDS
    assert pace.moved


def test_three_seconds_after_a_service_went_away() -> None:
    pace = Pace()
    host = node("b", 8 * GB, model("m"), hosts=("m",))
    pace.observe([host], now=0.0)
    for gone in ([], [node("b", 8 * GB, model("m"))], [node("b", 8 * GB, hosts=("m",), standing="draining")]):
        pace = Pace()
        pace.observe([host], now=0.0)
        pace.observe(gone, now=50.0)
        assert pace.ready_at() == 50.0 + DEBOUNCE_SECONDS


def test_a_mesh_that_never_rests_keeps_nothing_unserved() -> None:
    pace = Pace()
    pace.observe([node("b", vram_bytes=0)], now=0.0)
    for at in range(1, 100):
        if at >= pace.ready_at():
            break
        pace.observe([node("b", vram_bytes=at)], now=float(at))
    assert pace.ready_at() == at == LATEST_SECONDS


def test_how_busy_a_node_is_is_no_change() -> None:
    pace = Pace()
    pace.observe([node("b", serving=(served("m"),))], now=0.0)
    pace.observe([node("b", serving=(served("m", parallel=9),), addresses=("/ip4/1.2.3.4",))], now=1.5)
    assert pace.ready_at() == SETTLE_SECONDS


def test_a_node_that_starts_in_a_mesh_waits_to_hear_of_the_others_but_not_for_ever() -> None:
    pace = Pace()
    pace.observe([], now=10.0)
    pace.expect_peers(True, now=10.0)
    assert pace.ready_at() == 10.0 + PEER_WAIT_SECONDS
    assert "hear" in pace.reason()
    pace.expect_peers(True, now=12.0)
    assert pace.ready_at() == 10.0 + PEER_WAIT_SECONDS
    pace.observe([node("b")], now=11.0)
    assert pace.ready_at() == 11.0 + SETTLE_SECONDS
    assert "settled" in pace.reason()
