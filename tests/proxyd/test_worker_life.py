"""When a worker serves, drains and ends."""

from __future__ import annotations

from services.proxyd.worker_life import (
    ALONE_SECONDS,
    KEEPER_GONE_SECONDS,
    AskSupervisord,
    Close,
    Drain,
    End,
    Finished,
    KeeperSeen,
    NewerServes,
    StopAsked,
    StubGone,
    SupervisordSeen,
    WorkerLife,
)
from shared.io.drive import Tick


def test_a_restart_drains_when_the_newer_worker_serves_and_ends_with_the_last_connection() -> None:
    life = WorkerLife()
    assert life.handle(KeeperSeen(connected=True), now=0) == []
    assert life.handle(StubGone(), now=1) == []
    assert life.phase == "alone"
    assert life.handle(NewerServes(), now=1.5) == [Drain("a newer worker serves")]
    assert life.next_deadline() is None
    assert life.handle(NewerServes(), now=2) == []
    assert life.handle(StubGone(), now=2) == []
    assert life.handle(Finished(), now=900) == [End()]
    assert life.handle(Finished(), now=901) == []


def test_without_a_replacement_it_stops_accepting_after_a_while() -> None:
    life = WorkerLife()
    life.handle(StubGone(), now=1)
    assert life.next_deadline() == 1 + ALONE_SECONDS
    assert life.handle(Tick(), now=5) == []
    assert life.phase == "alone"
    effects = life.handle(Tick(), now=1 + ALONE_SECONDS)
    assert len(effects) == 1
    assert isinstance(effects[0], Drain)
    assert life.phase == "draining"


def test_going_down_closes_from_any_phase_once() -> None:
    for stimuli in ((), (StubGone(),), (NewerServes(),), (StubGone(), NewerServes())):
        life = WorkerLife()
        for stimulus in stimuli:
            life.handle(stimulus, now=0)
        assert life.handle(StopAsked(), now=1) == [Close()]
        assert life.handle(StopAsked(), now=1) == []
        assert life.handle(NewerServes(), now=1) == []
        assert life.next_deadline() is None
        assert life.handle(Finished(), now=2) == [End()]


def test_a_finished_service_means_nothing_while_serving() -> None:
    assert WorkerLife().handle(Finished(), now=0) == []


def test_with_stub_and_keeper_gone_supervisord_is_asked_for() -> None:
    life = WorkerLife()
    life.handle(KeeperSeen(connected=False), now=0)
    life.handle(StubGone(), now=0)
    assert life.handle(Tick(), now=KEEPER_GONE_SECONDS) == [AskSupervisord()]
    assert life.handle(SupervisordSeen(runs=True), now=2.1) == []
    assert life.handle(Tick(), now=2 * KEEPER_GONE_SECONDS) == [AskSupervisord()]
    assert life.handle(SupervisordSeen(runs=False), now=4.1) == [Close()]


def test_a_draining_worker_whose_node_is_gone_closes_too() -> None:
    life = WorkerLife()
    life.handle(StubGone(), now=0)
    life.handle(NewerServes(), now=0)
    life.handle(KeeperSeen(connected=False), now=1)
    assert life.handle(Tick(), now=1 + KEEPER_GONE_SECONDS) == [AskSupervisord()]
    assert life.handle(SupervisordSeen(runs=False), now=4) == [Close()]


def test_a_keeper_restart_alone_asks_nobody() -> None:
    life = WorkerLife()
    life.handle(KeeperSeen(connected=False), now=0)
    assert life.handle(Tick(), now=KEEPER_GONE_SECONDS) == []
    life.handle(KeeperSeen(connected=True), now=3)
    assert life.next_deadline() is None
    life.handle(StubGone(), now=4)
    # An answer that comes after the keeper is back no longer counts.
    assert life.handle(SupervisordSeen(runs=False), now=5) == []
