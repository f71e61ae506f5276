"""docs/spec/demand.md"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gossipd.demand import (
    COUNT_LIMIT,
    MODELS_LIMIT,
    NAME_LIMIT_CHARACTERS,
    WINDOW_SECONDS,
    DemandCounters,
)
from shared import codec
from shared.ids import ModelName, PeerId
from shared.messages.mesh import DemandChanged, ModelDemand

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
M, X = ModelName("m"), ModelName("x")


def totals(counters: DemandCounters, now: float = 0.0) -> dict[str, int]:
    return {item.model: item.requests_total for item in counters.summary(now=now)}


def of(counters: DemandCounters, model: ModelName, now: float) -> ModelDemand:
    return next(item for item in counters.summary(now=now) if item.model == model)


def test_a_thousand_requests_through_three_nodes_read_as_a_thousand_everywhere() -> None:
    """TRAPS 15. Each node counts what entered it; all gossip with each other, in any order, repeatedly."""
    entry = random.Random(15)
    nodes = {peer: DemandCounters() for peer in (A, B, C)}
    for at in range(1000):
        peer = entry.choice((A, B, C))
        nodes[peer].add(peer, M, 1, now=at / 10)
        if at % 7 == 0:
            gossip(nodes, *entry.sample((A, B, C), 2), now=at / 10)
    for _ in range(2):
        for one, other in itertools.permutations(nodes, 2):
            gossip(nodes, one, other, now=101.0)
    assert [totals(counters) for counters in nodes.values()] == [{"m": 1000}] * 3


def gossip(nodes: dict[PeerId, DemandCounters], one: PeerId, other: PeerId, now: float) -> None:
    for counted_by in (A, B, C):
        for model, total in nodes[one].totals_of(counted_by).items():
            nodes[other].merge(counted_by, model, total, now=now)


NEWS = st.lists(st.tuples(st.sampled_from((A, B, C)), st.sampled_from((M, X)), st.integers(0, 50)), max_size=20)


@given(NEWS, st.randoms(use_true_random=False))
def test_merging_in_any_order_with_duplicates_gives_the_same(
    news: list[tuple[PeerId, ModelName, int]], order: random.Random
) -> None:
    """Counters merge by the larger value, so merging is idempotent and order does not matter."""
    one, other = DemandCounters(), DemandCounters()
    for peer, model, total in news:
        one.merge(peer, model, total, now=0.0)
    shuffled = [*news, *order.sample(news, len(news) // 2)]
    order.shuffle(shuffled)
    for peer, model, total in shuffled:
        other.merge(peer, model, total, now=0.0)
    assert totals(one) == totals(other)
    for peer in (A, B, C):
        assert one.totals_of(peer) == other.totals_of(peer)
    expected = {
        model: sum(max((t for p, m, t in news if (p, m) == (peer, model)), default=0) for peer in (A, B, C))
        for model in (M, X)
    }
    assert totals(one) == {model: total for model, total in expected.items() if total}


def test_counters_only_grow() -> None:
    counters = DemandCounters()
    counters.add(A, M, 5, now=0)
    counters.add(A, M, 0, now=0)
    counters.merge(A, M, 3, now=0)
    assert totals(counters) == {"m": 5}
    with pytest.raises(ValueError, match="only grow"):
        counters.add(A, M, -1, now=0)
    counters.add(A, X, 0, now=0)
    assert totals(counters) == {"m": 5}, "a model that nobody asked for is not listed"


def test_rates_are_computed_from_when_counts_arrived() -> None:
    """Rates (per minute, over 1 and 10 minutes) are computed locally."""
    counters = DemandCounters()
    for second in range(0, 60, 2):
        counters.add(A, M, 1, now=1000.0 + second)
    assert of(counters, M, 1060.0) == ModelDemand(model=M, requests_total=30, per_minute_1m=30.0, per_minute_10m=3.0)
    later = of(counters, M, 1130.0)
    assert (later.per_minute_1m, later.per_minute_10m) == (0.0, 3.0)
    assert counters.active(now=1130.0)
    gone = of(counters, M, 1060.0 + WINDOW_SECONDS + 10)
    assert (gone.requests_total, gone.per_minute_1m, gone.per_minute_10m) == (30, 0.0, 0.0)
    assert not counters.active(now=1060.0 + WINDOW_SECONDS + 10)


def test_what_another_node_counted_moves_the_rate_too() -> None:
    counters = DemandCounters()
    counters.merge(B, M, 60, now=5.0)
    assert of(counters, M, 6.0).per_minute_1m == 60.0


def test_totals_survive_a_restart_and_rates_start_anew() -> None:
    """Counters survive a restart for totals; rates start anew."""
    before = DemandCounters()
    before.add(A, M, 7, now=0)
    after = DemandCounters()
    after.restore(A, before.totals_of(A))
    assert of(after, M, 1.0) == ModelDemand(model=M, requests_total=7, per_minute_1m=0.0, per_minute_10m=0.0)
    assert not after.active(now=1.0)
    after.add(A, M, 1, now=2.0)
    assert of(after, M, 3.0).requests_total == 8
    after.restore(A, {M: 3})
    assert of(after, M, 3.0).requests_total == 8, "an older file takes nothing away"


def test_what_was_counted_before_the_node_knew_its_id_counts_once() -> None:
    counters = DemandCounters()
    counters.add(PeerId(""), M, 5, now=0)
    counters.add(A, M, 2, now=0)
    counters.rename(PeerId(""), A)
    assert totals(counters) == {"m": 7}
    assert counters.totals_of(A) == {M: 7}
    assert counters.totals_of(PeerId("")) == {}


def test_models_are_bounded_also_after_a_restart() -> None:
    counters = DemandCounters()
    counters.restore(A, {ModelName(f"old{at:04}"): 1 for at in range(MODELS_LIMIT)})
    for at in range(50):
        counters.add(A, ModelName(f"new{at}"), 5, now=1.0)
    known = totals(counters)
    assert len(known) == MODELS_LIMIT
    assert all(known[f"new{at}"] == 5 for at in range(50)), "the least asked for goes first"
    assert "old0000" not in known
    for at in range(MODELS_LIMIT):
        counters.add(A, ModelName(f"other{at}"), 9, now=1.0)
    assert len(totals(counters)) == MODELS_LIMIT


def test_hostile_names_and_counts_still_fit_into_a_message() -> None:
    counters = DemandCounters()
    for at in range(MODELS_LIMIT):
        name = f"{at}-" + "\U0001f600" * NAME_LIMIT_CHARACTERS
        counters.add(A, ModelName(name[:NAME_LIMIT_CHARACTERS]), 2**63, now=0.0)
        counters.add(B, ModelName(name[:NAME_LIMIT_CHARACTERS]), 2**64, now=0.0)
    counters.add(A, ModelName("y" * (NAME_LIMIT_CHARACTERS + 1)), 1, now=0.0)
    summary = counters.summary(now=1.0)
    assert len(summary) == MODELS_LIMIT
    assert summary[0].requests_total == 2 * COUNT_LIMIT
    assert codec.decode(codec.encode(DemandChanged(demand=summary))) == DemandChanged(demand=summary)


def test_a_file_with_hostile_counts_is_read_within_limits() -> None:
    counters = DemandCounters()
    counters.restore(A, {M: 2**200, X: -5, ModelName("z" * 1000): 1})
    assert totals(counters) == {"m": COUNT_LIMIT}
