"""The credit book: single rules, and a machine that plays it against launcherd's own ledger rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.credit_events import (
    AcquireGranted,
    AcquireRefused,
    Effect,
    Held,
    LauncherdBooted,
    Recalled,
    Refuse,
    ReportConfirmed,
    SendAcquire,
    SendReport,
    SendReturn,
    SendWithdraw,
    SlotEnded,
    Started,
    Suspected,
    Tick,
    Unwanted,
    Wanted,
)
from shared.credits import CREDIT_IDLE_SECONDS, REPORT_GAP_SECONDS, CreditBook
from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.messages.leases import CREDIT_GRACE_SECONDS, HOLDER_TIMEOUT_SECONDS, REPORT_SECONDS, LeaseGranted

M = ModelName("m")
S = SlotId("s1")
E = TypeVar("E")


def of(effects: Sequence[Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def grant(credits: int = 4, parallel: int = 4, slot: str = "s1", model: str = "m", port: int = 1) -> LeaseGranted:
    return LeaseGranted(
        model=ModelName(model), slot_id=SlotId(slot), base_url=f"http://127.0.0.1:{port}", api_key="k",
        credits=credits, parallel=parallel,
    )  # fmt: skip


class Book(CreditBook):
    """A book that checks itself after each step."""

    def __init__(self, queue_limit: int = 8) -> None:
        super().__init__(HolderId("h"), queue_limit=queue_limit)
        self.now = 100.0
        self.log: list[Effect] = []

    def do(self, stimulus: Any) -> list[Effect]:
        effects = self.handle(stimulus, now=self.now)
        self.check_invariants(now=self.now)
        self.log += effects
        return effects

    def take(self) -> Held | None:
        held = self.start(M, now=self.now)
        self.check_invariants(now=self.now)
        return held

    def end(self, held: Held) -> list[Effect]:
        effects = self.finish(held, now=self.now)
        self.check_invariants(now=self.now)
        self.log += effects
        return effects

    def want(self, ticket: int) -> list[Effect]:
        return self.do(Wanted(ticket, RequestId(f"r{ticket}"), M))

    def granted(self, credits: int = 4, parallel: int = 4) -> list[Effect]:
        """Some request got us so many credits; none of them is in use."""
        [acquire] = of(self.want(1000), SendAcquire)
        [started] = of(self.do(AcquireGranted(acquire.acquire_id, grant(credits, parallel))), Started)
        return self.end(started.held)

    def tick_to(self, now: float, *, confirm: bool = True) -> list[Effect]:
        """Time passes, with every report on time and confirmed."""
        effects: list[Effect] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self.now = max(self.now, deadline)
            step = self.do(Tick())
            effects += step
            for report in of(step, SendReport):
                if confirm:
                    effects += self.do(ReportConfirmed(report.number, (), ()))
        self.now = now
        return effects


def test_a_free_credit_is_used_at_once_and_without_a_message() -> None:
    book = Book()
    book.granted()
    assert [book.take() is not None for _ in range(5)] == [True, True, True, True, False]
    assert book.in_use() == 4


def test_without_credits_a_request_asks_launcherd_and_waits() -> None:
    book = Book()
    assert book.take() is None
    assert [type(effect) for effect in book.want(1)] == [SendAcquire]
    assert book.waiting(M) == 1


def test_a_grant_serves_the_queue_in_order_and_withdraws_what_is_superfluous() -> None:
    book = Book()
    acquires = [of(book.want(ticket), SendAcquire)[0] for ticket in (1, 2, 3)]
    effects = book.do(AcquireGranted(acquires[0].acquire_id, grant(credits=2, parallel=2)))
    assert [effect.ticket for effect in of(effects, Started)] == [1, 2]
    # All two places are ours: only our own finished request can serve the third.
    assert {effect.acquire_id for effect in of(effects, SendWithdraw)} == {item.acquire_id for item in acquires[1:]}
    assert [effect.ticket for effect in of(book.end(of(effects, Started)[0].held), Started)] == [3]


def test_nothing_is_asked_for_when_all_places_are_ours() -> None:
    book = Book()
    book.granted(credits=1, parallel=1)
    held = book.take()
    assert held is not None
    assert book.want(1) == []
    assert [effect.ticket for effect in of(book.end(held), Started)] == [1]


def test_places_of_others_are_asked_for() -> None:
    book = Book()
    book.granted(credits=1, parallel=2)
    assert book.take() is not None
    assert len(of(book.want(1), SendAcquire)) == 1
    assert of(book.want(2), SendAcquire) == []


def test_a_newcomer_never_overtakes_the_queue() -> None:
    book = Book()
    book.granted(credits=1, parallel=1)
    held = book.take()
    assert held is not None
    book.want(1)
    started = of(book.end(held), Started)
    assert [effect.ticket for effect in started] == [1]
    assert book.take() is None


def test_a_client_that_leaves_the_queue_takes_its_acquire_along() -> None:
    book = Book()
    [acquire] = of(book.want(1), SendAcquire)
    assert of(book.do(Unwanted(1)), SendWithdraw) == [SendWithdraw(acquire.acquire_id)]
    # The grant was under way: its credits are kept, nobody is started.
    assert of(book.do(AcquireGranted(acquire.acquire_id, grant())), Started) == []
    assert book.take() is not None


def test_the_queue_is_bounded() -> None:
    book = Book(queue_limit=2)
    for ticket in (1, 2):
        book.want(ticket)
    [refusal] = of(book.want(3), Refuse)
    assert (refusal.ticket, refusal.code) == (3, "overloaded")
    assert refusal.retry_after_seconds
    assert book.waiting(M) == 2


def test_a_refusal_reaches_the_request_it_concerns() -> None:
    book = Book()
    acquires = [of(book.want(ticket), SendAcquire)[0] for ticket in (1, 2, 3)]
    assert of(book.do(AcquireRefused(acquires[0].acquire_id, "overloaded", "full")), Refuse)[0].ticket == 3
    assert of(book.do(AcquireRefused(acquires[1].acquire_id, "load_failed", "no")), Refuse)[0].ticket == 1
    assert book.waiting(M) == 1


def test_an_acquire_that_times_out_is_repeated_and_refuses_nobody() -> None:
    book = Book()
    [acquire] = of(book.want(1), SendAcquire)
    effects = book.do(AcquireRefused(acquire.acquire_id, "daemon_unreachable", "no answer"))
    assert [type(effect) for effect in effects] == [SendAcquire]


def test_silence_of_launcherd_is_noticed() -> None:
    book = Book()
    book.granted()
    book.tick_to(book.now + 5.0)
    assert book.silent_seconds(book.now) < 1.1
    book.tick_to(book.now + 5.0, confirm=False)
    assert book.silent_seconds(book.now) > 4.0


def test_a_recall_returns_unused_credits_at_once_and_used_ones_as_they_free() -> None:
    """"unused ones are recalled within 20 ms when another holder waits"."""
    book = Book()
    book.granted()
    held = book.take()
    assert held is not None
    assert [effect.count for effect in of(book.do(Recalled(S, True)), SendReturn)] == [3]
    assert book.take() is None
    assert [effect.count for effect in of(book.end(held), SendReturn)] == [1]


def test_while_recalled_waiting_requests_stand_in_launcherds_queue() -> None:
    book = Book()
    book.granted(credits=1, parallel=1)
    held = book.take()
    assert held is not None
    assert book.want(1) == []
    [acquire] = of(book.do(Recalled(S, True)), SendAcquire)
    book.end(held)
    effects = book.do(AcquireGranted(acquire.acquire_id, grant(credits=1, parallel=1)))
    assert [effect.ticket for effect in of(effects, Started)] == [1]


def test_the_end_of_a_recall_is_learnt_from_a_report_too() -> None:
    book = Book()
    book.granted()
    held = book.take()
    assert held is not None
    book.do(Recalled(S, True))
    effects = book.tick_to(book.now + 2.1)
    assert of(effects, SendReport)
    assert not held.giving_back


def test_a_missed_recall_is_learnt_from_a_report() -> None:
    book = Book()
    book.granted()
    report = of(book.tick_to(book.now + 1.0, confirm=False), SendReport)[-1]
    effects = book.do(ReportConfirmed(report.number, (), (S,)))
    assert [effect.count for effect in of(effects, SendReturn)] == [4]


def test_revoked_credits_are_forgotten_and_requests_in_flight_run_on() -> None:
    book = Book()
    book.granted()
    held = book.take()
    assert held is not None
    report = of(book.tick_to(book.now + 1.0, confirm=False), SendReport)[-1]
    assert of(book.do(ReportConfirmed(report.number, (S,), ())), SendReturn) == []
    assert book.take() is None
    assert of(book.end(held), SendReturn) == []
    book.tick_to(book.now + 2.0)
    assert book.held() == []


def test_a_suspect_engine_gets_nothing_new_until_launcherd_grants_again() -> None:
    book = Book()
    book.granted()
    held = book.take()
    assert held is not None
    assert [effect.count for effect in of(book.do(Suspected(S)), SendReturn)] == [3]
    assert [effect.count for effect in of(book.end(held), SendReturn)] == [1]
    [acquire] = of(book.want(7), SendAcquire)
    [started] = of(book.do(AcquireGranted(acquire.acquire_id, grant(port=2))), Started)
    assert started.held.base_url.endswith(":2")
    assert book.take() is not None


def test_a_slot_that_ended_is_not_used_and_waiting_requests_ask_anew() -> None:
    book = Book()
    book.granted(credits=1, parallel=1)
    assert book.take() is not None
    book.want(1)
    assert len(of(book.do(SlotEnded(S, for_good=True)), SendAcquire)) == 1


def test_a_burst_of_short_requests_is_reported_at_most_every_gap() -> None:
    book = Book()
    book.granted()
    reports = 0
    start = book.now
    while book.now < start + 1.0:
        book.now += 0.001
        held = book.take()
        assert held is not None
        book.end(held)
        deadline = book.next_deadline()
        if deadline is not None and deadline <= book.now:
            step = of(book.do(Tick()), SendReport)
            reports += len(step)
            for report in step:
                book.do(ReportConfirmed(report.number, (), ()))
    assert 10 <= reports <= 1.0 / REPORT_GAP_SECONDS + 1


def test_idle_to_busy_is_reported_at_once() -> None:
    book = Book()
    book.granted()
    book.tick_to(book.now + 5.0)
    book.now += REPORT_GAP_SECONDS
    assert book.take() is not None
    [report] = of(book.do(Tick()), SendReport)
    assert (report.uses[0].in_use, report.uses[0].started_total) == (1, 2)


def test_a_new_launcherd_is_told_at_once_what_is_held() -> None:
    book = Book()
    book.granted()
    assert book.take() is not None
    [report] = of(book.do(LauncherdBooted()), SendReport)
    assert [(use.slot_id, use.credits, use.in_use) for use in report.uses] == [(S, 4, 1)]


def test_credits_stay_good_for_ten_seconds_without_launcherd_and_no_longer() -> None:
    """"they stay good for 10 s while launcherd restarts"."""
    book = Book()
    book.granted()
    heard = book.now
    book.tick_to(heard + CREDIT_GRACE_SECONDS - 0.1, confirm=False)
    assert book.take() is not None
    book.tick_to(heard + CREDIT_GRACE_SECONDS + 0.1, confirm=False)
    assert book.take() is None
    # The new launcherd confirms them: they are good again, and whoever waits gets them.
    book.want(1)
    report = of(book.do(LauncherdBooted()), SendReport)[-1]
    assert [effect.ticket for effect in of(book.do(ReportConfirmed(report.number, (), ())), Started)] == [1]


def test_a_process_that_slept_uses_nothing_before_launcherd_confirms() -> None:
    """launcherd lets credits of a holder lapse that is silent for 5 s."""
    book = Book()
    book.granted()
    old = of(book.tick_to(book.now + 1.0, confirm=False), SendReport)[-1]
    book.now += HOLDER_TIMEOUT_SECONDS + 0.5
    assert book.take() is None
    report = of(book.do(Tick()), SendReport)[-1]
    assert book.take() is None
    book.do(ReportConfirmed(old.number, (), ()))
    assert book.take() is None
    book.do(ReportConfirmed(report.number, (), ()))
    assert book.take() is not None


def test_unused_credits_go_back_after_a_while_with_a_last_report() -> None:
    book = Book()
    book.granted()
    effects = book.tick_to(book.now + CREDIT_IDLE_SECONDS + 3 * REPORT_SECONDS)
    assert [effect.count for effect in of(effects, SendReturn)] == [4]
    assert [report for report in of(effects, SendReport) if report.uses][-1].uses[0].credits == 0
    assert book.held() == []
    assert book.next_deadline() is None


def test_started_total_goes_on_when_a_slot_is_granted_again() -> None:
    book = Book()
    book.granted()
    book.tick_to(book.now + CREDIT_IDLE_SECONDS + 3 * REPORT_SECONDS)
    book.granted()
    assert book.held()[0].started_total == 2


class Played(RuleBasedStateMachine):
    """Random life of one holder against a ledger that plays launcherd. Nothing may be used twice or get lost."""

    @initialize(parallel=st.integers(1, 4))
    def begin(self, parallel: int) -> None:
        self.book = CreditBook(HolderId("h"), queue_limit=5)
        self.now = 100.0
        self.parallel = parallel
        self.ledger = 0
        self.other = 0
        self.ticket = 0
        self.waiting: set[int] = set()
        self.running: list[Held] = []
        self.asked: dict[RequestId, ModelName] = {}
        self.unconfirmed: list[int] = []
        self.returns: set[RequestId] = set()

    def perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Started(ticket=ticket, held=held):
                    self.waiting.remove(ticket)
                    self.running.append(held)
                case Refuse(ticket=ticket):
                    self.waiting.remove(ticket)
                case SendAcquire(acquire_id=acquire_id, model=model):
                    assert acquire_id not in self.asked
                    self.asked[acquire_id] = model
                case SendWithdraw(acquire_id=acquire_id):
                    assert acquire_id in self.asked
                case SendReport(number=number):
                    self.unconfirmed.append(number)
                case SendReturn(return_id=return_id, count=count):
                    assert return_id not in self.returns
                    assert count > 0
                    self.returns.add(return_id)
                    self.ledger -= count
                    assert self.ledger >= 0

    def step(self, stimulus: Any) -> None:
        self.perform(self.book.handle(stimulus, now=self.now))

    @rule()
    def request(self) -> None:
        held = self.book.start(M, now=self.now)
        if held is not None:
            self.running.append(held)
            return
        self.ticket += 1
        self.waiting.add(self.ticket)
        self.step(Wanted(self.ticket, RequestId("same-id"), M))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        held = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.perform(self.book.finish(held, now=self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.remove(ticket)
        self.step(Unwanted(ticket))

    @precondition(lambda self: self.asked and self.ledger + self.other < self.parallel)
    @rule(data=st.data(), generous=st.booleans())
    def granted(self, data: st.DataObject, generous: bool) -> None:
        acquire_id = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[acquire_id]
        credits = self.parallel - self.ledger - self.other if generous else 1
        self.ledger += credits
        self.step(AcquireGranted(acquire_id, grant(credits, self.parallel)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), code=st.sampled_from(["overloaded", "load_failed", "withdrawn", "daemon_unreachable"]))
    def refused(self, data: st.DataObject, code: str) -> None:
        acquire_id = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[acquire_id]
        self.step(AcquireRefused(acquire_id, code, "words"))

    @rule(change=st.integers(-1, 1))
    def other_holder(self, change: int) -> None:
        if self.other + change >= 0 and self.ledger + self.other + change <= self.parallel:
            self.other += change

    @rule(active=st.booleans())
    def recalled(self, active: bool) -> None:
        self.step(Recalled(S, active))

    @rule()
    def suspected(self) -> None:
        self.step(Suspected(S))

    @rule()
    def rebooted(self) -> None:
        self.step(LauncherdBooted())

    @precondition(lambda self: self.unconfirmed)
    @rule(recalled=st.booleans())
    def confirmed(self, recalled: bool) -> None:
        self.step(ReportConfirmed(self.unconfirmed.pop(0), (), (S,) if recalled else ()))

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 6.0, 12.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        deadline = self.book.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.step(Tick())

    @invariant()
    def nothing_is_lost_or_used_twice(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check_invariants(now=self.now)
        assert sum(held.credits for held in self.book.held()) == self.ledger
        assert self.book.in_use() == len(self.running) <= self.parallel
        assert self.book.waiting(M) == len(self.waiting)


TestPlayed = Played.TestCase
TestPlayed.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
