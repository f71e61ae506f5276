"""launcherd is killed at random moments while forty clients take turns on six models of one real node.

TRAPS 32: kill -9 of launcherd during a load, during an eviction, during a request: restart converges, no orphan, no
double load. DESIGN §2: SIGKILL of launcherd costs no request. Part 1 proved it for one place and one type
(`test_launcherd_soak`); here evictions of several types are always under way.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.engines.scripted_engine import Script
from tests.processes.many_models import (
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
LONGEST_PAUSE_SECONDS = 1.5
"""Several loads and evictions long."""


def chosen_seed(usual: str) -> str:
    """`MESHD_TEST_SEED` repeats a run, as far as moments can be repeated."""
    return os.environ.get("MESHD_TEST_SEED", usual)


def doing(node: Node) -> str:
    """What launcherd was at when it was killed: its last word about a model."""
    log = (node.home / "logs" / "launcherd.log").read_text(errors="replace")
    return log.rpartition("event=")[2].partition(" ")[0]


def kill_launcherd(node: Node, chance: random.Random, pause_seconds: float) -> str:
    """SIGKILL at a random moment, and a new launcherd. Returns what it was at."""
    pid = wait_for(lambda: node.pid("launcherd"), 20, "launcherd")
    time.sleep(chance.random() * pause_seconds)  # Not for something to happen: the moment of the kill.
    os.kill(pid, signal.SIGKILL)
    at = doing(node)
    wait_for(lambda: node.pid("launcherd") not in (0, pid), 30, "launcherd again")
    return at


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with node_with_many_models() as running:
        yield running


@pytest.fixture(scope="module")
def known(node: Node) -> dict[int, Answer]:
    found = references(node)
    assert tell_apart(found), "models that cannot be told apart prove nothing"
    return found


def killed(node: Node, known: dict[int, Answer], *, kills: int, seed: str) -> None:
    print(f"seed {seed!r}; MESHD_TEST_SEED={seed} repeats it")
    chance = random.Random(f"{seed} kills")
    before, began, at = loads(node), time.monotonic(), Counter[str]()
    watch = EngineWatch(node)
    watch.start()
    crowd = Crowd(node, known, clients=CLIENTS, seed=seed)
    crowd.start()
    for number in range(kills):
        wait_for(partial(crowd.answered_more_than, crowd.outcome.requests), 90, f"answers before kill {number}")
        at[kill_launcherd(node, chance, LONGEST_PAUSE_SECONDS)] += 1
    outcome = crowd.finish()
    watch.finish()
    started = loads(node) - before
    print(f"{report(outcome, started, time.monotonic() - began)}; {kills} kills after {dict(at)}; "
          f"{watch.samples} looks at the engines")  # fmt: skip
    assert outcome.failures == []
    assert watch.doubled == []
    assert watch.crowded == []
    assert set(outcome.answered) == set(MODELS)
    wait_for(lambda: engines(node) == known_engines(node), 10, "every engine process belongs to a slot")


def test_killing_launcherd_a_few_times_costs_no_request_and_leaves_no_engine(
    node: Node, known: dict[int, Answer]
) -> None:
    killed(node, known, kills=4, seed=chosen_seed("few kills"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killing_launcherd_fifty_times_costs_no_request_and_leaves_no_engine(
    node: Node, known: dict[int, Answer]
) -> None:
    killed(node, known, kills=50, seed=chosen_seed(secrets.token_hex(4)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_slow_loads_are_never_doubled_by_killing_launcherd(tmp_path: Path) -> None:
    """Engines that take their time and lock a file of their model: no two of one model ever live at once."""
    script = Script(load_seconds=0.5, tokens=8, token_seconds=0.02, alone_file=f"{tmp_path}/{{model}}")
    with node_with_many_models(script) as node:
        killed(node, references(node), kills=50, seed=chosen_seed(secrets.token_hex(4)))
    met = {name: (tmp_path / name).read_text() for name in MODELS}
    assert met == dict.fromkeys(MODELS, "")
