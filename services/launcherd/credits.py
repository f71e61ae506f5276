"""Who holds how many credits on one slot, and what they do with them.

The ledger is the authority on credits: their sum never exceeds `parallel`. A holder's report is the authority on use.
The two are reconciled without ever granting a credit twice:

===============================================  ==============================================================
the report says                                  then
===============================================  ==============================================================
a holding of an earlier launcherd's memory       it counts as in use in full until confirmed by a report
credits the ledger does not know                 adopted if that many are free, else revoked
fewer credits than the ledger, for 2 s           a grant was lost on its way: the ledger follows the report
nothing about a slot                             as zero credits
===============================================  ==============================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.ids import HolderId
from shared.messages.leases import CreditUse

Recall = Literal["", "waiting", "draining"]

RECONCILE_SECONDS = 2.0
"""A grant or return under way is settled by then: bus round trips are milliseconds, reports come each second."""


@dataclass(slots=True)
class Holding:
    """One holder's credits on one slot. `in_use` never exceeds `credits`."""

    credits: int = 0
    in_use: int = 0
    started_total: int = 0
    confirmed: bool = True
    recall: Recall = ""
    fewer_since: float | None = None


@dataclass(slots=True)
class Ledger:
    """All holdings of one slot. `requests_total` counts requests started on it, by reports."""

    parallel: int
    requests_total: int = 0
    unattributed: int = 0
    """Of `requests_total`, what an earlier launcherd counted: holders report those once more."""
    last_use_at: float = 0.0
    holdings: dict[HolderId, Holding] = field(default_factory=dict)
    version: int = 0
    """Rises when credits change hands."""

    @property
    def credits(self) -> int:
        return sum(holding.credits for holding in self.holdings.values())

    @property
    def free(self) -> int:
        return self.parallel - self.credits

    @property
    def in_use(self) -> int:
        return sum(holding.in_use for holding in self.holdings.values())

    def holders(self) -> int:
        """How many hold at least one credit."""
        return sum(holding.credits > 0 for holding in self.holdings.values())

    def grant(self, holder: HolderId, count: int, *, used: int, now: float) -> None:
        """`used` of the new credits are for requests that start with them."""
        holding = self.holdings.setdefault(holder, Holding())
        holding.credits += count
        holding.in_use += used
        holding.fewer_since = None
        self.last_use_at = now
        self.version += 1

    def take_back(self, holder: HolderId, count: int) -> None:
        """A holder returns unused credits; more than it has is all it has."""
        holding = self.holdings.get(holder)
        if holding is None or count < 1:
            return
        holding.credits -= min(count, holding.credits)
        holding.in_use = min(holding.in_use, holding.credits)
        holding.fewer_since = None
        self.version += 1

    def drop(self, holder: HolderId) -> None:
        """The holder is dead."""
        if self.holdings.pop(holder, None) is not None:
            self.version += 1

    def report(self, holder: HolderId, use: CreditUse, now: float) -> bool:
        """Take in one line of a report. False: the holder must forget its credits here."""
        holding = self.holdings.get(holder)
        reported = max(0, use.credits)
        if holding is None or (not holding.confirmed and reported > holding.credits):
            if reported > self.free + (holding.credits if holding is not None else 0):
                self.drop(holder)
                return False
            holding = self.holdings[holder] = Holding(credits=reported)
            self._absorb(use.started_total)
            holding.started_total = use.started_total
            self.version += 1
        elif not holding.confirmed:
            holding.credits = reported
            holding.confirmed = True
            self._absorb(use.started_total)
            holding.started_total = use.started_total
            self.version += 1
        else:
            self._reconcile(holding, reported, now)
            started = use.started_total - holding.started_total
            self.requests_total += started if started >= 0 else max(0, use.started_total)
            holding.started_total = use.started_total
        holding.in_use = max(0, min(use.in_use, holding.credits))
        used_at = now if holding.in_use else now - max(0.0, use.last_use_age_seconds)
        self.last_use_at = max(self.last_use_at, used_at)
        return True

    def unmentioned(self, holder: HolderId, now: float) -> None:
        """A report of `holder` had no line for this slot."""
        holding = self.holdings.get(holder)
        if holding is None:
            return
        if not holding.confirmed:
            self.drop(holder)
        else:
            self._reconcile(holding, 0, now)

    def _reconcile(self, holding: Holding, reported: int, now: float) -> None:
        if reported >= holding.credits:
            holding.fewer_since = None
        elif holding.fewer_since is None:
            holding.fewer_since = now
        elif now - holding.fewer_since >= RECONCILE_SECONDS:
            holding.credits = reported
            holding.in_use = min(holding.in_use, reported)
            holding.fewer_since = None
            self.version += 1

    def _absorb(self, started_total: int) -> None:
        known = min(self.unattributed, max(0, started_total))
        self.unattributed -= known
        self.requests_total += max(0, started_total) - known

    def check_invariants(self) -> None:
        assert 0 <= self.credits <= self.parallel, (self.credits, self.parallel)
        for holding in self.holdings.values():
            assert 0 <= holding.in_use <= holding.credits
