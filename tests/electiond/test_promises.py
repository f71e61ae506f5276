"""docs/spec/allocation.md: what others were given or say, and whether they do it."""

from __future__ import annotations

from services.electiond.placements import Placement
from services.electiond.promises import (
    LOAD_SECONDS,
    SENT_LIMIT,
    SENT_SECONDS,
    TAKE_SECONDS,
    YOUNG_SECONDS,
    Promises,
)
from shared.ids import PeerId
from tests.electiond.nodes import GB, model, name, node, served

B = PeerId("b")
M = name("m")
GIVEN = Placement(M, B, 2, "test")


def test_a_node_that_does_not_take_what_it_was_given_is_passed_over() -> None:
    promises = Promises()
    assert not promises.expect([GIVEN], now=10.0)
    assert promises.next_deadline() == 10.0 + TAKE_SECONDS
    assert not promises.expect([GIVEN], now=10.0 + TAKE_SECONDS - 0.1)
    assert promises.expect([GIVEN], now=10.0 + TAKE_SECONDS)
    assert promises.passed == {(M, B)}
    assert promises.next_deadline() is None


def test_a_placement_that_is_no_longer_due_starts_anew() -> None:
    promises = Promises()
    promises.expect([GIVEN], now=10.0)
    promises.expect([], now=12.0)
    assert promises.next_deadline() is None
    promises.expect([GIVEN], now=14.0)
    assert promises.next_deadline() == 14.0 + TAKE_SECONDS


def test_who_serves_again_or_left_is_no_longer_passed_over() -> None:
    for nodes in ([], [node("b", 8 * GB, hosts=("x",))]):
        promises = Promises()
        promises.expect([GIVEN], now=0.0)
        promises.expect([GIVEN], now=TAKE_SECONDS)
        promises.observe([node("b")], now=8.0)
        assert promises.passed
        promises.observe(nodes, now=9.0)
        assert not promises.passed


def test_an_intention_that_no_load_takes_so_long_to_fulfil_is_empty() -> None:
    """TRAPS 16: a node that lies keeps a model only for one failed load."""
    promises = Promises()
    liar = node("b", 8 * GB, model("m"), serving=(served("m"),))
    promises.observe([liar], now=0.0)
    assert promises.without_empty_words([liar], now=LOAD_SECONDS - 1) == [liar]
    (found,) = promises.without_empty_words([liar], now=LOAD_SECONDS)
    assert not found.serves(M)
    big = node("b", 99 * GB, model("m", 50 * GB), serving=(served("m"),))
    assert promises.without_empty_words([big], now=50 * 120.0 - 1) == [big], "a large model loads for longer"
    host = node("b", 8 * GB, model("m"), serving=(served("m"),), hosts=("m",))
    promises.observe([host], now=100.0)
    assert promises.without_empty_words([host], now=9000.0) == [host]


def test_a_request_that_was_sent_counts_until_its_node_says_so() -> None:
    promises = Promises()
    promises.sent(M, B, now=0.0)
    promises.observe([node("b")], now=1.0)
    assert promises.starting(B, now=1.0) == M
    assert promises.starting(B, now=SENT_SECONDS) is None
    promises.observe([node("b", serving=(served("m"),))], now=2.0)
    assert promises.starting(B, now=2.0) is None
    for at in range(SENT_LIMIT + 9):
        promises.sent(M, PeerId(f"p{at}"), now=0.0)
    assert promises.starting(PeerId("p0"), now=0.0) is None


def test_a_model_is_young_for_a_minute_unless_it_was_there_before() -> None:
    host = node("b", 8 * GB, hosts=("m",))
    promises = Promises()
    promises.observe([], now=0.0)
    promises.observe([host], now=10.0)
    promises.observe([host], now=30.0)
    assert promises.is_young(M, B, now=10.0 + YOUNG_SECONDS - 1)
    assert not promises.is_young(M, B, now=10.0 + YOUNG_SECONDS)
    restarted = Promises()
    restarted.observe([host], now=0.0, first=True)
    restarted.observe([host], now=1.0)
    assert not restarted.is_young(M, B, now=1.0)
