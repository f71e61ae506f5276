"""The queue of requests for engines, and the credits that let holders run requests without asking each time.

Theory of operation. A request waits for a *model*, in the order of arrival; any slot of that model that is open may
serve it. Orders are drawn from one counter shared with loads, so "came before" is defined across models: a slot that
has to go still serves the requests that came before the load which displaces it, and no later ones.

==================  ==========================================================================================
a slot opens        its engine is ready; up to `parallel` waiting requests are granted at once
a request comes     granted a credit when one is free; with it all free ones if no other holder has any
none is free        other holders are asked to give back (`CreditsRecalled`) as long as the request waits
a holder is silent  for 5 s: it is dead, its credits are free again
a slot drains       every holder is asked to give back; when the last credit is back the engine may be stopped
==================  ==========================================================================================

Source: DESIGN §7 (Lease); shared/messages/leases.py; TRAPS 18, 20, 35.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from services.launcherd.credits import Holding, Ledger, Recall
from services.launcherd.slot_events import ReplyToken
from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.messages.leases import (
    CREDIT_GRACE_SECONDS,
    HOLDER_TIMEOUT_SECONDS,
    CreditsConfirmed,
    CreditsRecalled,
    ReportCredits,
    ReturnCredits,
)

RETURN_MEMORY = 4_096
"""Returns remembered so that a repeated one is not counted twice."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request that waits for a credit."""

    order: int
    token: ReplyToken
    holder: HolderId
    request_id: RequestId
    model: ModelName
    since: float


@dataclass(slots=True)
class _Holder:
    deadline: float
    reports: bool = False


class LeaseBook:
    """All waiting requests, holders and ledgers. Only `SlotTable` writes in it."""

    def __init__(self, remembered: Mapping[SlotId, Mapping[HolderId, int]]) -> None:
        self._remembered = remembered
        self._lines: dict[ModelName, dict[int, Waiter]] = {}
        self._by_request: dict[tuple[HolderId, RequestId], Waiter] = {}
        self._by_token: dict[ReplyToken, Waiter] = {}
        self._waiting_holders: dict[ModelName, Counter[HolderId]] = {}
        self._holders: dict[HolderId, _Holder] = {}
        self._returned: dict[tuple[HolderId, RequestId], None] = {}
        self.ledgers: dict[SlotId, Ledger] = {}
        self._closed_versions = 0

    # -- the queue -------------------------------------------------------------------------------------------

    def enqueue(self, waiter: Waiter) -> None:
        self._lines.setdefault(waiter.model, {})[waiter.order] = waiter
        self._by_request[waiter.holder, waiter.request_id] = waiter
        self._by_token[waiter.token] = waiter
        self._waiting_holders.setdefault(waiter.model, Counter())[waiter.holder] += 1
        self._hear(waiter.holder, waiter.since)

    def find(self, holder: HolderId, request_id: RequestId) -> Waiter | None:
        return self._by_request.get((holder, request_id))

    def renew(self, waiter: Waiter, token: ReplyToken) -> None:
        """The same request came again over another connection: it keeps its place."""
        del self._by_token[waiter.token]
        again = replace(waiter, token=token)
        self._lines[waiter.model][waiter.order] = again
        self._by_request[waiter.holder, waiter.request_id] = again
        self._by_token[token] = again

    def find_token(self, token: ReplyToken) -> Waiter | None:
        return self._by_token.get(token)

    def remove(self, waiter: Waiter) -> None:
        line = self._lines[waiter.model]
        del line[waiter.order]
        holders = self._waiting_holders[waiter.model]
        holders[waiter.holder] -= 1
        if not holders[waiter.holder]:
            del holders[waiter.holder]
        if not line:
            del self._lines[waiter.model], self._waiting_holders[waiter.model]
        if self._by_request.get((waiter.holder, waiter.request_id)) is waiter:
            del self._by_request[waiter.holder, waiter.request_id]
        del self._by_token[waiter.token]

    def waiting(self, model: ModelName) -> int:
        return len(self._lines.get(model, ()))

    def waiting_models(self) -> tuple[ModelName, ...]:
        """Models that requests wait for, the longest waiting first."""
        return tuple(sorted(self._lines, key=lambda model: next(iter(self._lines[model]))))

    def line(self, model: ModelName, *, before: int | None = None, since: int | None = None) -> Iterator[Waiter]:
        """Waiting requests in order, optionally only those with `since` <= order < `before`."""
        for order, waiter in self._lines.get(model, {}).items():
            if before is not None and order >= before:
                return
            if since is None or order >= since:
                yield waiter

    # -- slots -----------------------------------------------------------------------------------------------

    def open(self, slot_id: SlotId, parallel: int, requests_total: int, now: float) -> None:
        """The slot's engine is ready. Credits remembered from before a restart count as in use."""
        ledger = self.ledgers[slot_id] = Ledger(
            parallel=parallel, requests_total=requests_total, unattributed=requests_total, last_use_at=now
        )
        for holder, credits in self._remembered.get(slot_id, {}).items():
            held = min(credits, ledger.free)
            if held > 0:
                ledger.holdings[holder] = Holding(credits=held, in_use=held, confirmed=False)
                self._holders.setdefault(holder, _Holder(deadline=now + CREDIT_GRACE_SECONDS))

    def close(self, slot_id: SlotId) -> None:
        """The slot's engine is gone, and all credits on it with it."""
        ledger = self.ledgers.pop(slot_id, None)
        if ledger is not None:
            self._closed_versions += ledger.version + 1

    def unconfirmed(self) -> int:
        """Holdings of an earlier launcherd that their holder has not announced again yet."""
        return sum(not holding.confirmed for ledger in self.ledgers.values() for holding in ledger.holdings.values())

    def version(self) -> int:
        """Differs whenever credits changed hands."""
        return self._closed_versions + sum(ledger.version for ledger in self.ledgers.values())

    def credits_by_slot(self) -> dict[SlotId, dict[HolderId, int]]:
        """Who holds how many, for the memory."""
        return {
            slot_id: {holder: held.credits for holder, held in ledger.holdings.items() if held.credits}
            for slot_id, ledger in self.ledgers.items()
        }

    def grant(
        self, slot_id: SlotId, model: ModelName, *, before: int | None, generous: bool, now: float
    ) -> list[tuple[Waiter, int]]:
        """Give free credits to waiting requests in order; each takes one, the last perhaps more if `generous`."""
        ledger = self.ledgers[slot_id]
        free = ledger.free
        if free <= 0 or model not in self._lines:
            return []
        granted: list[tuple[Waiter, int]] = []
        for waiter in [waiter for waiter, _ in zip(self.line(model, before=before), range(free), strict=False)]:
            self.remove(waiter)
            ledger.grant(waiter.holder, 1, used=1, now=now)
            self._hear(waiter.holder, now)
            granted.append((waiter, 1))
        spare = ledger.free
        if granted and generous and spare > 0:
            waiter, _ = granted[-1]
            share = -(-spare // ledger.holders())
            ledger.grant(waiter.holder, share, used=0, now=now)
            granted[-1] = (waiter, 1 + share)
        return granted

    def recalls(self, slot_id: SlotId, model: ModelName, *, draining: bool) -> list[CreditsRecalled]:
        """Recalls that begin or end now."""
        changed = []
        waiting = self._waiting_holders.get(model)
        total = self.waiting(model)
        for holder, holding in self.ledgers[slot_id].holdings.items():
            recall: Recall = ""
            if holding.credits and draining:
                recall = "draining"
            elif holding.credits and waiting is not None and total > waiting[holder]:
                recall = "waiting"
            if recall != holding.recall:
                changed.append(
                    CreditsRecalled(
                        slot_id=slot_id, holder=holder, reason=recall or holding.recall, active=bool(recall)
                    )
                )
                holding.recall = recall
        return changed

    def active_recalls(self) -> Iterator[CreditsRecalled]:
        for slot_id, ledger in self.ledgers.items():
            for holder, holding in ledger.holdings.items():
                if holding.recall:
                    yield CreditsRecalled(slot_id=slot_id, holder=holder, reason=holding.recall)

    # -- holders ---------------------------------------------------------------------------------------------

    def report(self, request: ReportCredits, now: float) -> CreditsConfirmed:
        """Take in all that a holder holds."""
        holder = request.holder
        self._hear(holder, now, reports=True)
        revoked = []
        for use in request.uses:
            ledger = self.ledgers.get(use.slot_id)
            if ledger is None or not ledger.report(holder, use, now):
                revoked.append(use.slot_id)
        mentioned = {use.slot_id for use in request.uses}
        recalled = []
        for slot_id, ledger in self.ledgers.items():
            if slot_id not in mentioned:
                ledger.unmentioned(holder, now)
            holding = ledger.holdings.get(holder)
            if holding is not None and holding.recall:
                recalled.append(slot_id)
        return CreditsConfirmed(revoked=tuple(revoked), recalled=tuple(recalled))

    def give_back(self, request: ReturnCredits, now: float) -> None:
        """Repeating a request id changes nothing."""
        key = (request.holder, request.request_id)
        if key in self._returned:
            return
        self._returned[key] = None
        if len(self._returned) > RETURN_MEMORY:
            del self._returned[next(iter(self._returned))]
        self._hear(request.holder, now)
        ledger = self.ledgers.get(request.slot_id)
        if ledger is not None:
            ledger.take_back(request.holder, request.count)

    def lapse(self, now: float) -> list[Waiter]:
        """Forget holders that were silent too long; the waiting requests of those that used to report are returned."""
        dead = [holder for holder, known in self._holders.items() if known.deadline <= now]
        orphaned = []
        for holder in dead:
            if self._holders.pop(holder).reports:
                orphaned += [waiter for waiter in self._by_token.values() if waiter.holder == holder]
            for ledger in self.ledgers.values():
                ledger.drop(holder)
        for waiter in orphaned:
            self.remove(waiter)
        return orphaned

    def next_deadline(self) -> float | None:
        return min((known.deadline for known in self._holders.values()), default=None)

    def _hear(self, holder: HolderId, now: float, *, reports: bool = False) -> None:
        known = self._holders.get(holder)
        if known is None:
            known = self._holders[holder] = _Holder(deadline=0.0)
        known.deadline = max(known.deadline, now + HOLDER_TIMEOUT_SECONDS)
        known.reports = known.reports or reports

    def check_invariants(self) -> None:
        for ledger in self.ledgers.values():
            ledger.check_invariants()
        waiting = [waiter for line in self._lines.values() for waiter in line.values()]
        assert sorted(self._by_token) == sorted(waiter.token for waiter in waiting)
        assert all(list(line) == sorted(line) for line in self._lines.values())
        for model, holders in self._waiting_holders.items():
            assert holders == Counter(waiter.holder for waiter in self._lines[model].values())
