"""One slot's ledger: the table in credits.py, line by line, and that it never over-commits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.launcherd.credits import RECONCILE_SECONDS, Holding, Ledger
from shared.ids import HolderId, ModelName, SlotId
from shared.messages.leases import CreditUse

H1, H2 = HolderId("h1"), HolderId("h2")


def use(credits: int, in_use: int = 0, started: int = 0, age: float = 1.0) -> CreditUse:
    return CreditUse(
        slot_id=SlotId("s"),
        model=ModelName("m"),
        credits=credits,
        in_use=in_use,
        started_total=started,
        last_use_age_seconds=age,
    )


def test_a_remembered_holding_is_in_use_in_full_until_it_is_confirmed() -> None:
    ledger = Ledger(parallel=4, holdings={H1: Holding(credits=3, in_use=3, confirmed=False)})
    assert (ledger.free, ledger.in_use) == (1, 3)
    assert ledger.report(H1, use(2, 1), now=1.0)
    assert (ledger.free, ledger.in_use) == (2, 1)


def test_a_remembered_holding_that_its_holder_does_not_mention_is_gone() -> None:
    ledger = Ledger(parallel=4, holdings={H1: Holding(credits=3, in_use=3, confirmed=False)})
    ledger.unmentioned(H1, now=1.0)
    assert ledger.free == 4


def test_unknown_credits_are_adopted_if_they_are_free_else_revoked() -> None:
    ledger = Ledger(parallel=4)
    ledger.grant(H1, 2, used=1, now=0.0)
    assert not ledger.report(H2, use(3, 3), now=1.0)
    assert ledger.free == 2
    assert ledger.report(H2, use(2, 2), now=1.0)
    assert ledger.free == 0


def test_a_grant_under_way_is_not_taken_for_lost() -> None:
    ledger = Ledger(parallel=4)
    ledger.grant(H1, 2, used=1, now=0.0)
    assert ledger.report(H1, use(0), now=0.1)
    ledger.grant(H1, 2, used=1, now=1.0)
    assert ledger.report(H1, use(2), now=RECONCILE_SECONDS + 0.5)
    assert ledger.credits == 4


def test_a_lost_grant_is_taken_back_after_two_seconds_of_reports_without_it() -> None:
    ledger = Ledger(parallel=4)
    ledger.grant(H1, 4, used=1, now=0.0)
    for now in (0.5, 1.5, 2.4):
        ledger.report(H1, use(1, 1), now=now)
        assert ledger.credits == 4
    ledger.report(H1, use(1, 1), now=2.5)
    assert (ledger.credits, ledger.in_use) == (1, 1)


def test_returning_more_than_it_has_returns_all_it_has() -> None:
    ledger = Ledger(parallel=4)
    ledger.grant(H1, 3, used=3, now=0.0)
    ledger.take_back(H1, 99)
    ledger.take_back(H2, 1)
    assert (ledger.free, ledger.in_use) == (4, 0)


def test_totals_count_a_new_count_of_the_same_holder_from_zero() -> None:
    ledger = Ledger(parallel=4)
    ledger.grant(H1, 4, used=1, now=0.0)
    for started in (5, 9, 2, 3):
        ledger.report(H1, use(4, 1, started), now=1.0)
    assert ledger.requests_total == 12


def test_use_now_or_so_long_ago_moves_the_last_use_but_never_back() -> None:
    ledger = Ledger(parallel=4)
    ledger.grant(H1, 4, used=1, now=10.0)
    ledger.report(H1, use(4, 0, age=3.0), now=20.0)
    assert ledger.last_use_at == 17.0
    ledger.report(H1, use(4, 0, age=9.0), now=21.0)
    assert ledger.last_use_at == 17.0
    ledger.report(H1, use(4, 2, age=9.0), now=30.0)
    assert ledger.last_use_at == 30.0


@given(st.lists(st.tuples(st.sampled_from("grtdu"), st.sampled_from([H1, H2]), st.integers(-2, 9)), max_size=40))
def test_whatever_holders_say_credits_stay_within_parallel(steps: list[tuple[str, HolderId, int]]) -> None:
    ledger = Ledger(parallel=4)
    for number, (step, holder, count) in enumerate(steps):
        now = float(number)
        if step == "g" and 0 < count <= ledger.free:
            ledger.grant(holder, count, used=min(1, count), now=now)
        elif step == "r":
            ledger.report(holder, use(count, count, number), now=now)
        elif step == "t":
            ledger.take_back(holder, count)
        elif step == "d":
            ledger.drop(holder)
        else:
            ledger.unmentioned(holder, now)
        ledger.check_invariants()
