"""Forty clients over six models with limits 2, 1, 1 on one real node: every answer is the model's own, none fails.

Issue "many models on one node", Proof; TRAPS 18-20, 24.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.processes.many_models import (
    LIMITS,
    MODELS,
    Answer,
    Crowd,
    EngineWatch,
    engines,
    known_engines,
    loads,
    node_with_many_models,
    references,
    report,
    tell_apart,
)
from tests.processes.node import Node, wait_for

CLIENTS = 40


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with node_with_many_models() as running:
        yield running


@pytest.fixture(scope="module")
def known(node: Node) -> dict[int, Answer]:
    found = references(node)
    assert tell_apart(found), "models that cannot be told apart prove nothing"
    return found


def all_answered(node: Node, known: dict[int, Answer], *, requests_each: int, seconds: float) -> None:
    before, began = loads(node), time.monotonic()
    watch = EngineWatch(node)
    watch.start()
    crowd = Crowd(node, known, clients=CLIENTS, seed=f"many models {requests_each}", requests_each=requests_each)
    crowd.start()
    outcome = crowd.wait(seconds)
    watch.finish()
    started = loads(node) - before
    print(report(outcome, started, time.monotonic() - began))
    assert outcome.failures == []
    assert outcome.requests == CLIENTS * requests_each
    assert set(outcome.answered) == set(MODELS)
    assert watch.samples > 5
    assert watch.doubled == []
    assert watch.crowded == []
    assert sum(started.values()) > sum(LIMITS.values()), "models that never made room for each other prove nothing"
    wait_for(lambda: engines(node) == known_engines(node), 10, "every engine process belongs to a slot")


def test_forty_clients_over_six_models_get_only_right_answers(node: Node, known: dict[int, Answer]) -> None:
    all_answered(node, known, requests_each=4, seconds=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thousands_of_requests_of_forty_clients_get_only_right_answers(node: Node, known: dict[int, Answer]) -> None:
    all_answered(node, known, requests_each=100, seconds=560)
