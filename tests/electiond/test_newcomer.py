"""docs/spec/allocation.md: what a node that enters a mesh may change, once."""

from __future__ import annotations

from services.electiond.newcomer import NEW_SECONDS, TURN_SECONDS, Newcomer
from tests.electiond.nodes import GB, name, node

M = name("m")
OWN = node("own", 8 * GB, hosts=("m",))


def at(newcomer: Newcomer, *others: str, now: float = 0.0, settled_at: float = 2.0) -> float | None:
    nodes = [node(peer, 8 * GB, hosts=("m",)) for peer in others]
    return newcomer.moves_at(OWN, nodes, M, settled_at=settled_at, now=now)


def test_only_a_newcomer_moves_and_only_where_others_serve_its_model() -> None:
    newcomer = Newcomer()
    assert at(newcomer, "b") is None
    newcomer.entered(now=0.0)
    assert at(newcomer) is None
    drains = node("b", 8 * GB, hosts=("m",), standing="draining")
    assert newcomer.moves_at(OWN, [drains], M, settled_at=2.0, now=0.0) is None
    assert at(newcomer, "b") in (2.0, 2.0 + TURN_SECONDS)
    newcomer.ended()
    assert at(newcomer, "b") is None


def test_after_a_while_it_is_a_node_like_any_other() -> None:
    newcomer = Newcomer()
    newcomer.entered(now=0.0)
    assert at(newcomer, "b", now=NEW_SECONDS - 0.1) is not None
    assert at(newcomer, "b", now=NEW_SECONDS) is None
    assert at(newcomer, "b", now=1.0) is None


def test_those_that_serve_the_same_take_turns() -> None:
    peers = ["a", "b", "c"]
    turns = set()
    for peer in peers:
        newcomer = Newcomer()
        newcomer.entered(now=0.0)
        me = node(peer, 8 * GB, hosts=("m",))
        others = [node(other, 8 * GB, hosts=("m",)) for other in peers if other != peer]
        turns.add(newcomer.moves_at(me, others, M, settled_at=2.0, now=0.0))
    assert turns == {2.0, 2.0 + TURN_SECONDS, 2.0 + 2 * TURN_SECONDS}
