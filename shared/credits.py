"""The holder's side of the lease protocol: who may start a request on an engine now, who waits, what is asked for.

Theory of operation. Each slot that launcherd granted credits on is a :class:`Held`: ``credits`` of its ``parallel``
places belong to this holder, ``in_use`` of them carry a request. A request for a model starts at once on a free
credit; otherwise it waits in this holder's queue of that model, in order of arrival. While somebody waits, enough
``AcquireLease`` are outstanding to bring in every credit that launcherd might still give: one per waiting request
when nothing is held (the model may have to be loaded) or when credits are being recalled, else as many as there are
places held by others. A grant or a finished request serves the head of the queue; what is then superfluous is
withdrawn. An acquire stands for a place in the queue, not for one request: any grant serves the head.

=====================  ============================================================================
free credit            a credit not in use, on a slot that is not recalled, suspect or gone
recalled               launcherd wants credits back: free ones go at once, used ones as they finish
suspect                its engine refused or cut a connection: as recalled, until launcherd grants again
gone                   launcherd revoked the slot: nothing to give back, requests in flight run on
suspended (holder)     launcherd has not confirmed for ``CREDIT_GRACE_SECONDS``, or this process was frozen
                       for ``HOLDER_TIMEOUT_SECONDS``: nothing starts on held credits until it confirms
=====================  ============================================================================

``start`` and ``finish`` are the two transitions of the hot path; all others go through ``handle``.

Source: DESIGN §7 (lease); shared/messages/leases.py.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

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
    Stimulus,
    Suspected,
    Tick,
    Ticket,
    Unwanted,
    Wanted,
)
from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.messages.leases import (
    CREDIT_GRACE_SECONDS,
    HOLDER_TIMEOUT_SECONDS,
    REPORT_SECONDS,
    CreditUse,
    LeaseGranted,
)

CREDIT_IDLE_SECONDS = 60.0
"""Unused credits go back after so long: until then the next request starts without asking."""
REPORT_GAP_SECONDS = 0.05
"""Least time between reports of idle<->busy changes: a burst of short requests becomes 20 reports a second."""
TOTALS_KEPT = 256
RETRY_AFTER_SECONDS = 1.0
_NO_ANSWER = ("daemon_unreachable", "deadline")
"""The asking timed out, which says nothing about the model: ask again. How long to wait is the request's affair."""


@dataclass(slots=True)
class _Waiter:
    request_id: RequestId
    model: ModelName


@dataclass(slots=True)
class _Acquire:
    model: ModelName
    withdrawn: bool = False


class CreditBook:
    """All credits of one holder."""

    def __init__(self, holder: HolderId, *, queue_limit: int) -> None:
        self.holder = holder
        self._queue_limit = queue_limit
        self._held: dict[SlotId, Held] = {}
        self._by_model: dict[ModelName, list[Held]] = {}
        self._queues: dict[ModelName, OrderedDict[Ticket, _Waiter]] = {}
        self._tickets: dict[Ticket, ModelName] = {}
        self._acquires: dict[RequestId, _Acquire] = {}
        self._totals: OrderedDict[SlotId, int] = OrderedDict()
        self._numbers = 0
        self._reports = 0
        self._report_sent = -math.inf
        self._report_due: float | None = None
        self._heard = -math.inf
        """When launcherd last said something that confirms the credits."""
        self._unanswered_since: float | None = None
        """When the first report was sent that launcherd has said nothing since."""
        self._confirm_from = 0
        """Number of the report whose confirmation ends a suspension."""
        self._idle_check = math.inf

    # -- the hot path -------------------------------------------------------------------------------------

    def start(self, model: ModelName, *, now: float) -> Held | None:
        """Use a free credit at once; None when the request has to wait (:class:`Wanted`)."""
        if model in self._queues or now > self._good_until():
            return None
        for held in self._by_model.get(model, ()):
            if held.in_use < held.credits and not held.gone and not held.giving_back:
                self._use(held, now)
                return held
        return None

    def finish(self, held: Held, *, now: float) -> list[Effect]:
        """A request that used a credit has ended."""
        held.in_use -= 1
        held.last_use = now
        self._changed(held, now, at_once=held.in_use == 0)
        if not self._queues and not held.gone and not held.giving_back:
            return []
        effects: list[Effect] = []
        self._settle(held, effects, now)
        self._balance(held.model, effects, now)
        return effects

    @property
    def report_due(self) -> float | None:
        """When ``handle(Tick())`` is due for a report; ``next_deadline`` without the slow parts."""
        return self._report_due

    # -- everything else ----------------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match stimulus:
            case Wanted(ticket=ticket, request_id=request_id, model=model):
                self._wanted(ticket, request_id, model, effects, now)
            case Unwanted(ticket=ticket):
                wanted_model = self._forget(ticket)
                if wanted_model is not None:
                    self._balance(wanted_model, effects, now)
            case Suspected(slot_id=slot_id):
                held = self._held.get(slot_id)
                if held is not None:
                    held.suspect = True
                    self._settle(held, effects, now)
                    self._balance(held.model, effects, now)
            case AcquireGranted(acquire_id=acquire_id, grant=grant):
                self._acquires.pop(acquire_id, None)
                self._granted(grant, effects, now)
            case AcquireRefused():
                self._refused(stimulus, effects, now)
            case ReportConfirmed():
                self._confirmed(stimulus, effects, now)
            case Recalled(slot_id=slot_id, active=active):
                held = self._held.get(slot_id)
                if held is not None:
                    held.recalled_at = now if active else None
                    self._settle(held, effects, now)
                    self._balance(held.model, effects, now)
            case SlotEnded(slot_id=slot_id, for_good=for_good):
                held = self._held.get(slot_id)
                if held is not None:
                    held.suspect = True
                    held.gone = held.gone or for_good
                    self._settle(held, effects, now)
                    self._balance(held.model, effects, now)
            case LauncherdBooted():
                self._report_due = now if self._busy_with_launcherd() else None
            case Tick():
                self._return_idle(effects, now)
        if self._report_due is not None and self._report_due <= now:
            self._report(effects, now)
        return effects

    def next_deadline(self) -> float | None:
        due = self._idle_check if self._report_due is None else min(self._report_due, self._idle_check)
        return None if due == math.inf else due

    # -- waiting ------------------------------------------------------------------------------------------

    def waiting(self, model: ModelName) -> int:
        queue = self._queues.get(model)
        return 0 if queue is None else len(queue)

    def place_in_queue(self, ticket: Ticket) -> int:
        """How many wait before this one."""
        queue = self._queues.get(self._tickets.get(ticket, ModelName("")), OrderedDict())
        return next((place for place, other in enumerate(queue) if other == ticket), 0)

    def silent_seconds(self, now: float) -> float:
        """How long launcherd has not answered while it should have; 0 while it does."""
        return 0.0 if self._unanswered_since is None else max(0.0, now - self._unanswered_since)

    def in_use(self) -> int:
        return sum(held.in_use for held in self._held.values())

    def held(self) -> list[Held]:
        return list(self._held.values())

    def _wanted(
        self, ticket: Ticket, request_id: RequestId, model: ModelName, effects: list[Effect], now: float
    ) -> None:
        if self.waiting(model) >= self._queue_limit:
            effects.append(
                Refuse(
                    ticket,
                    "overloaded",
                    f"{self._queue_limit} requests already wait for {model}; try again later",
                    RETRY_AFTER_SECONDS,
                )
            )
            return
        self._queues.setdefault(model, OrderedDict())[ticket] = _Waiter(request_id, model)
        self._tickets[ticket] = model
        if self._report_due is None:
            self._report_due = now + REPORT_SECONDS
        self._serve_free(model, effects, now)
        self._balance(model, effects, now)

    def _forget(self, ticket: Ticket) -> ModelName | None:
        model = self._tickets.pop(ticket, None)
        if model is not None:
            queue = self._queues[model]
            del queue[ticket]
            if not queue:
                del self._queues[model]
        return model

    def _serve_free(self, model: ModelName, effects: list[Effect], now: float) -> None:
        """Free credits to the head of the queue."""
        if now > self._good_until():
            return
        for held in list(self._by_model.get(model, ())):
            if not held.gone and not held.giving_back:
                self._serve(held, held.credits - held.in_use, effects, now)

    def _serve(self, held: Held, count: int, effects: list[Effect], now: float) -> None:
        queue = self._queues.get(held.model)
        while queue and count > 0:
            ticket = next(iter(queue))
            self._forget(ticket)
            self._use(held, now)
            effects.append(Started(ticket, held))
            count -= 1

    def _use(self, held: Held, now: float) -> None:
        held.in_use += 1
        held.started_total += 1
        held.last_use = now
        self._changed(held, now, at_once=held.in_use == 1)

    def _balance(self, model: ModelName, effects: list[Effect], now: float) -> None:
        """As many acquires outstanding as can bring something: send or withdraw the difference."""
        outstanding = self._asked(model)
        queue = self._queues.get(model)
        need = 0 if not queue else min(len(queue), self._obtainable(model, now))
        for acquire_id in outstanding[need:]:
            self._acquires[acquire_id].withdrawn = True
            effects.append(SendWithdraw(acquire_id))
        if need > len(outstanding) and queue:
            for waiter in list(queue.values())[len(outstanding) : need]:
                self._numbers += 1
                acquire_id = RequestId(f"{waiter.request_id}#{self._numbers}")
                self._acquires[acquire_id] = _Acquire(model)
                effects.append(SendAcquire(acquire_id, model))

    def _asked(self, model: ModelName) -> list[RequestId]:
        return [key for key, acquire in self._acquires.items() if acquire.model == model and not acquire.withdrawn]

    def _obtainable(self, model: ModelName, now: float) -> int:
        """How many credits launcherd might still give us; without a limit when only it knows."""
        usable = [held for held in self._by_model.get(model, ()) if not held.gone]
        if now > self._good_until() or not any(held.credits for held in usable):
            return self._queue_limit
        if any(held.giving_back for held in usable):
            return self._queue_limit
        return sum(held.parallel - held.credits for held in usable)

    # -- what launcherd says ------------------------------------------------------------------------------

    def _granted(self, grant: LeaseGranted, effects: list[Effect], now: float) -> None:
        self._unanswered_since = None
        if not self._held or now <= self._good_until():
            # While suspended a grant says nothing about the other credits.
            self._heard = now
        held = self._held.get(grant.slot_id)
        if held is None:
            held = Held(grant.slot_id, grant.model, grant.base_url, grant.api_key, grant.parallel)
            held.started_total = self._totals.pop(grant.slot_id, 0)
            self._held[grant.slot_id] = held
            self._by_model.setdefault(grant.model, []).append(held)
        held.base_url, held.api_key, held.parallel = grant.base_url, grant.api_key, grant.parallel
        held.suspect = held.gone = False
        held.credits += max(0, grant.credits)
        held.last_use = now
        self._changed(held, now, at_once=False)
        # Granted for a waiting request: it is served even while the slot's unused credits are recalled.
        self._serve(held, min(grant.credits, held.credits - held.in_use), effects, now)
        self._settle(held, effects, now)
        self._balance(held.model, effects, now)

    def _refused(self, refusal: AcquireRefused, effects: list[Effect], now: float) -> None:
        acquire = self._acquires.pop(refusal.acquire_id, None)
        if acquire is None or acquire.withdrawn:
            return
        queue = self._queues.get(acquire.model)
        if queue and refusal.code not in _NO_ANSWER:
            # A full queue turns away whoever came last; any other reason concerns the head first.
            ticket = next(reversed(queue)) if refusal.code == "overloaded" else next(iter(queue))
            self._forget(ticket)
            effects.append(Refuse(ticket, refusal.code, refusal.detail, refusal.retry_after_seconds))
        self._balance(acquire.model, effects, now)

    def _confirmed(self, confirmed: ReportConfirmed, effects: list[Effect], now: float) -> None:
        self._unanswered_since = None
        if confirmed.number >= self._confirm_from:
            self._heard = now
        models: set[ModelName] = set()
        for slot_id, held in list(self._held.items()):
            if slot_id in confirmed.revoked:
                held.gone = True
            elif slot_id in confirmed.recalled:
                held.recalled_at = now if held.recalled_at is None else held.recalled_at
            elif held.recalled_at is not None and held.changed < confirmed.number:
                # The end of the recall was published and missed.
                held.recalled_at = None
            self._settle(held, effects, now)
            if held.credits == held.in_use == 0 and held.changed <= confirmed.number:
                self._drop(held)
            models.add(held.model)
        for model in models | set(self._queues):
            self._serve_free(model, effects, now)
            self._balance(model, effects, now)

    def _settle(self, held: Held, effects: list[Effect], now: float) -> None:
        """Give up what may not be kept, then use what is free."""
        if held.gone:
            if held.credits != held.in_use:
                held.credits = held.in_use
                self._changed(held, now, at_once=False)
            return
        if held.giving_back:
            unused = held.credits - held.in_use
            if unused > 0:
                held.credits = held.in_use
                self._changed(held, now, at_once=False)
                self._give_back(held, unused, effects)
            return
        if now <= self._good_until():
            self._serve(held, held.credits - held.in_use, effects, now)

    def _give_back(self, held: Held, count: int, effects: list[Effect]) -> None:
        self._numbers += 1
        effects.append(SendReturn(RequestId(f"{self.holder}#{self._numbers}"), held.slot_id, count))

    def _drop(self, held: Held) -> None:
        del self._held[held.slot_id]
        same = self._by_model[held.model]
        same.remove(held)
        if not same:
            del self._by_model[held.model]
        self._totals[held.slot_id] = held.started_total
        while len(self._totals) > TOTALS_KEPT:
            self._totals.popitem(last=False)

    # -- reports ------------------------------------------------------------------------------------------

    def _good_until(self) -> float:
        """Until when held credits may be used. A process that slept through its reports lost them."""
        until = self._heard + CREDIT_GRACE_SECONDS
        if self._report_due is None:
            return until
        return min(until, max(self._report_sent, self._report_due - REPORT_SECONDS) + HOLDER_TIMEOUT_SECONDS)

    def _changed(self, held: Held, now: float, *, at_once: bool) -> None:
        held.changed = self._reports + 1
        due = max(now, self._report_sent + REPORT_GAP_SECONDS) if at_once else now + REPORT_SECONDS
        if self._report_due is None or due < self._report_due:
            self._report_due = due
        if held.last_use + CREDIT_IDLE_SECONDS < self._idle_check:
            self._idle_check = held.last_use + CREDIT_IDLE_SECONDS

    def _busy_with_launcherd(self) -> bool:
        return bool(self._held or self._acquires or self._queues)

    def _report(self, effects: list[Effect], now: float) -> None:
        self._reports += 1
        if now > self._good_until():
            self._heard = -math.inf
            self._confirm_from = self._reports
        uses = tuple(
            CreditUse(
                slot_id=held.slot_id,
                model=held.model,
                credits=held.credits,
                in_use=held.in_use,
                started_total=held.started_total,
                last_use_age_seconds=max(0.0, now - held.last_use),
                waiting=self.waiting(held.model),
            )
            for held in self._held.values()
        )
        if self._unanswered_since is None:
            self._unanswered_since = now
        self._report_sent = now
        self._report_due = now + REPORT_SECONDS if self._busy_with_launcherd() else None
        effects.append(SendReport(self._reports, uses))

    def _return_idle(self, effects: list[Effect], now: float) -> None:
        if now < self._idle_check:
            return
        self._idle_check = math.inf
        for held in self._held.values():
            unused = held.credits - held.in_use
            if held.in_use == 0 and unused > 0 and not held.gone and not self.waiting(held.model):
                if held.last_use + CREDIT_IDLE_SECONDS <= now:
                    held.credits = 0
                    self._changed(held, now, at_once=False)
                    self._give_back(held, unused, effects)
                else:
                    self._idle_check = min(self._idle_check, held.last_use + CREDIT_IDLE_SECONDS)

    # -- invariants ---------------------------------------------------------------------------------------

    def check_invariants(self, *, now: float) -> None:
        """Raises: AssertionError naming what is broken."""
        for held in self._held.values():
            assert 0 <= held.in_use <= held.credits, held
            assert held in self._by_model[held.model], held
            if held.gone or held.giving_back:
                assert held.credits == held.in_use, f"kept unused credits: {held}"
            elif now <= self._good_until():
                free = held.credits - held.in_use
                assert not free or held.model not in self._queues, f"free while somebody waits: {held}"
        assert sum(map(len, self._by_model.values())) == len(self._held)
        assert sum(map(len, self._queues.values())) == len(self._tickets)
        for model, queue in self._queues.items():
            assert queue, f"empty queue of {model}"
            asked = len(self._asked(model))
            assert asked <= len(queue), f"{asked} acquires for {len(queue)} waiting for {model}"
            assert asked or self.in_use() or self._held, f"nobody was asked for {model}"
        for acquire in self._acquires.values():
            assert acquire.withdrawn or acquire.model in self._queues, f"superfluous acquire for {acquire.model}"
        if self._busy_with_launcherd():
            assert self._report_due is not None, "no report is due"
