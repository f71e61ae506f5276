"""Shell of the credit book: performs its effects on the bus and hands out leases.

The book is driven directly, not through a queue: a request that finds a free credit must not wait a turn of the
event loop for it. One timer is armed for the book's next deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable

from shared.codec import Message
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
from shared.credits import CreditBook
from shared.errors import DaemonUnreachable, RequestRefused
from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.io import log
from shared.io.bus import BusClient
from shared.io.drive import STORY_LIMIT, Tasks, brief
from shared.messages.daemon import StoryEntry
from shared.messages.leases import (
    AcquireLease,
    CreditsConfirmed,
    CreditsRecalled,
    EngineSuspected,
    LeaseGranted,
    ReportCredits,
    ReturnCredits,
    WithdrawAcquire,
)
from shared.messages.models import SlotChanged

REPORT_DEADLINE_SECONDS = 2.0
RETURN_DEADLINE_SECONDS = 60.0
"""A return must arrive: launcherd would count the credits as ours as long as we live."""
ACQUIRE_SLACK_SECONDS = 10.0
SUSPICION_GAP_SECONDS = 2.0
"""Least time between probes asked for one slot."""
_QUIET = (Tick, ReportConfirmed, Wanted, Unwanted)


class Lease:
    """The right to run one request on one engine, until released."""

    __slots__ = ("api_key", "base_url", "held", "model", "released", "slot_id")

    def __init__(self, held: Held) -> None:
        self.held = held
        self.slot_id = held.slot_id
        self.model = held.model
        self.base_url = held.base_url
        self.api_key = held.api_key
        self.released = False


class LeaseClient:
    """Leases from this node's launcherd.

    The worker feeds it launcherd's publications (:meth:`on_message`, :meth:`on_snapshot`) and calls
    :meth:`on_new_boot` when a new launcherd answers. ``queue_limit`` is ``engine.queue_limit``.
    """

    def __init__(
        self,
        client: BusClient,
        tasks: Tasks,
        holder: HolderId,
        *,
        queue_limit: int = 256,
        wait_seconds: float = 600.0,
        daemon: str = "proxyd",
    ) -> None:
        self.holder = holder
        self._book = CreditBook(holder, queue_limit=queue_limit)
        self._client = client
        self._tasks = tasks
        self._daemon = daemon
        self._wait_seconds = wait_seconds
        self._loop = asyncio.get_running_loop()
        self._tickets = 0
        self._waiting: dict[Ticket, asyncio.Future[Lease]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._suspected: dict[SlotId, float] = {}
        self._story: deque[tuple[float, str, tuple[str, ...]]] = deque(maxlen=STORY_LIMIT)

    # -- requests -----------------------------------------------------------------------------------------

    def try_acquire(self, model: ModelName) -> Lease | None:
        """A lease on a free credit, at once and without a message; None when it takes waiting."""
        held = self._book.start(model, now=self._loop.time())
        if held is None:
            return None
        self._arm()
        return Lease(held)

    async def acquire(self, model: ModelName, request_id: RequestId) -> Lease:
        """Wait for a lease, loading the model on this node if need be. Cancel it to leave the queue.

        Raises: RequestRefused with launcherd's code and reason; DaemonUnreachable.
        """
        self._tickets += 1
        ticket = self._tickets
        future: asyncio.Future[Lease] = self._loop.create_future()
        self._waiting[ticket] = future
        self._step(Wanted(ticket, request_id, model))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._step(Unwanted(ticket))

    def release(self, lease: Lease) -> None:
        """The request has ended. Releasing twice is harmless."""
        if lease.released:
            return
        lease.released = True
        effects = self._book.finish(lease.held, now=self._loop.time())
        if effects:
            self._perform("finish", effects)
        self._arm()

    def suspect(self, lease: Lease, detail: str, *, broken: bool) -> None:
        """The engine misbehaved: ask launcherd to probe it. ``broken``: start nothing there until it has."""
        if broken:
            self._step(Suspected(lease.slot_id))
        now = self._loop.time()
        if now - self._suspected.get(lease.slot_id, -SUSPICION_GAP_SECONDS) < SUSPICION_GAP_SECONDS:
            return
        if len(self._suspected) > 1000:
            self._suspected.clear()
        self._suspected[lease.slot_id] = now
        log.warning("engine_suspected", slot=lease.slot_id, model=lease.model, reason=detail)
        self._tasks.start(self._tell(EngineSuspected(slot_id=lease.slot_id, detail=detail)), "engine suspected")

    # -- what launcherd publishes --------------------------------------------------------------------------

    def on_message(self, message: Message) -> None:
        match message:
            case CreditsRecalled(slot_id=slot_id, holder=holder, active=active) if holder == self.holder:
                self._step(Recalled(slot_id, active))
            case SlotChanged(slot_id=slot_id, state="unloaded" | "failed"):
                self._step(SlotEnded(slot_id, for_good=True))
            case SlotChanged(slot_id=slot_id, state="restarting"):
                self._step(SlotEnded(slot_id, for_good=False))

    def on_snapshot(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.on_message(message)

    def on_new_boot(self) -> None:
        self._step(LauncherdBooted())

    # -- for people ---------------------------------------------------------------------------------------

    def waiting(self, model: ModelName) -> int:
        return self._book.waiting(model)

    def silent_seconds(self) -> float:
        """How long launcherd has not answered; 0 while it does or has no reason to."""
        return self._book.silent_seconds(self._loop.time())

    def held(self) -> list[Held]:
        return self._book.held()

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        now = self._loop.time()
        return tuple(
            StoryEntry(age_seconds=round(now - at, 3), stimulus=stimulus, effects=effects)
            for at, stimulus, effects in list(self._story)[-limit:]
        )

    async def close(self) -> None:
        """Stop reporting. Whoever takes over has a holder id of its own; these credits lapse or are returned."""
        if self._timer is not None:
            self._timer.cancel()
        for held in self._book.held():
            if held.credits > held.in_use and not held.gone:
                count = held.credits - held.in_use
                message = ReturnCredits(
                    holder=self.holder, request_id=RequestId(f"{self.holder}#close"), slot_id=held.slot_id, count=count
                )
                await self._tell(message, deadline_seconds=0.5)

    # -- driving the book ---------------------------------------------------------------------------------

    def _step(self, stimulus: Stimulus) -> None:
        effects = self._book.handle(stimulus, now=self._loop.time())
        if effects:
            self._perform(stimulus, effects)
        self._arm()

    def _perform(self, stimulus: Stimulus | str, effects: list[Effect]) -> None:
        if not isinstance(stimulus, (*_QUIET, str)):
            self._story.append((self._loop.time(), brief(stimulus), tuple(brief(effect) for effect in effects)))
        for effect in effects:
            match effect:
                case Started(ticket=ticket, held=held):
                    self._started(ticket, held)
                case Refuse():
                    future = self._waiting.pop(effect.ticket, None)
                    if future is not None and not future.done():
                        future.set_exception(RequestRefused(effect.code, effect.detail, effect.retry_after_seconds))
                case SendAcquire():
                    self._tasks.start(self._acquire(effect), "acquire lease")
                case SendWithdraw(acquire_id=acquire_id):
                    withdraw = WithdrawAcquire(holder=self.holder, request_id=acquire_id)
                    self._tasks.start(self._tell(withdraw), "withdraw acquire")
                case SendReport():
                    self._tasks.start(self._report(effect), "report credits")
                case SendReturn(return_id=return_id, slot_id=slot_id, count=count):
                    give_back = ReturnCredits(
                        holder=self.holder, request_id=return_id, slot_id=slot_id, count=count
                    )
                    self._tasks.start(self._tell(give_back, deadline_seconds=RETURN_DEADLINE_SECONDS), "return credits")

    def _started(self, ticket: Ticket, held: Held) -> None:
        future = self._waiting.pop(ticket, None)
        lease = Lease(held)
        if future is None or future.done():
            # Its client left in this very turn of the loop.
            self._loop.call_soon(self.release, lease)
        else:
            future.set_result(lease)

    def _arm(self) -> None:
        due = self._book.report_due
        if due is None:
            due = self._book.next_deadline()
        if due is None or due >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at = float("inf")
        self._step(Tick())
        deadline = self._book.next_deadline()
        if self._timer is None and deadline is not None:
            self._timer_at = max(deadline, self._loop.time())
            self._timer = self._loop.call_at(self._timer_at, self._tick)

    # -- the bus ------------------------------------------------------------------------------------------

    async def _acquire(self, effect: SendAcquire) -> None:
        request = AcquireLease(holder=self.holder, request_id=effect.acquire_id, model=effect.model)
        try:
            # Longer than any request waits: whoever gives up first is the request, which withdraws.
            reply = await self._client.request(request, deadline_seconds=self._wait_seconds + ACQUIRE_SLACK_SECONDS)
        except RequestRefused as error:
            self._step(AcquireRefused(effect.acquire_id, error.code, error.detail, error.retry_after_seconds))
            return
        except DaemonUnreachable as error:
            self._step(AcquireRefused(effect.acquire_id, error.code, error.detail))
            return
        if isinstance(reply, LeaseGranted):
            self._step(AcquireGranted(effect.acquire_id, reply))
        else:
            self._step(AcquireRefused(effect.acquire_id, "schema", f"launcherd answered {type(reply).__name__}"))

    async def _report(self, effect: SendReport) -> None:
        report = ReportCredits(holder=self.holder, daemon=self._daemon, pid=os.getpid(), uses=effect.uses)
        try:
            reply = await self._client.request(report, deadline_seconds=REPORT_DEADLINE_SECONDS)
        except (RequestRefused, DaemonUnreachable):
            # The next report is due in a second; the book knows how long silence may last.
            return
        if isinstance(reply, CreditsConfirmed):
            self._step(ReportConfirmed(effect.number, reply.revoked, reply.recalled))

    async def _tell(self, message: Message, *, deadline_seconds: float = 5.0) -> None:
        try:
            await self._client.request(message, deadline_seconds=deadline_seconds)
        except (RequestRefused, DaemonUnreachable) as error:
            log.warning("launcherd_not_told", message=type(message).__name__, reason=error.detail)
