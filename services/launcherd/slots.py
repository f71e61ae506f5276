"""The slot table: what runs on this node, what waits, what has to go. A pure state machine.

Theory of operation. Three kinds of demand call for a model: requests that wait for it (`leases.LeaseBook`), loads
asked for by people, and assignments (`placement.Placement`). Each becomes a queued slot; one slot at a time leaves the
queue (`load_queue.LoadQueue`), and only then it is decided what has to go for it. A model that has to go drains: no
new requests, credits are recalled, and its engine is stopped when the last credit is back. Nothing here ever waits:
what takes time is an effect, and its ending is a stimulus.

==========  =================================================  ==========================================
state       stimulus                                           next state
==========  =================================================  ==========================================
(none)      request, LoadModel, assignment                     queued
queued      first in the queue, and there is room              loading
queued      nobody wants it any more; unloaded                 unloaded
queued      it needs more than the node has; no engine         failed
loading     EngineReady                                        ready; waiting requests get leases at once
loading     EngineFailed, for the first time                   queued in front; everything else is evicted
loading     EngineFailed, again, or the file is missing        failed
loading     unloaded                                           stopping
ready       chosen as victim; unloaded; idle for too long      draining
draining    the load it made room for needs none any more      ready
draining    last credit back                                   stopping
ready       EngineExited                                       restarting (a new slot), or failed
ready       EngineHung                                         stopping, then as EngineExited
restarting  back-off over                                      queued in front
stopping    EngineStopped                                      unloaded
failed      asked for again after the cool-down                unloaded; a new slot is queued
==========  =================================================  ==========================================

A new slot is published before the one that it replaces is, so that the model never seems abandoned in between.
Source: DESIGN §7; TRAPS 18-24, 29, 32, 35.
"""

from __future__ import annotations

from dataclasses import replace

from services.launcherd.failures import CRASH_WINDOW_SECONDS, restart_delay_seconds
from services.launcherd.load_queue import LoadQueue
from services.launcherd.options import engine_missing
from services.launcherd.slot import RUNNING, Drain, Slot
from services.launcherd.slot_book import HEALTH_SECONDS, SlotBook
from services.launcherd.slot_events import (
    AcquireAsked,
    AssignmentsGiven,
    CallerGone,
    ConfigApplied,
    CreditsReported,
    CreditsReturned,
    DeviceMeasured,
    Effect,
    EngineAdopted,
    EngineExited,
    EngineFailed,
    EngineHealthy,
    EngineHung,
    EngineLoading,
    EngineReady,
    EngineStopped,
    InventoryScanned,
    LimitsAsked,
    LoadAsked,
    Memory,
    PinAsked,
    ProbeEngine,
    Stimulus,
    StopEngine,
    SuspicionRaised,
    UnloadAsked,
    WithdrawAsked,
)
from services.launcherd.slot_requests import SlotRequests
from services.launcherd.slot_words import clip
from shared.config import NodeConfig
from shared.io.drive import Tick
from shared.messages.daemon import Done, Refused
from shared.messages.leases import CREDIT_GRACE_SECONDS, EngineSuspected
from shared.messages.models import ModelLoaded
from shared.recipes import LLAMACPP

SETTLE_SECONDS = 10.0
"""A load that began so soon after another engine ended may have met memory that was not free yet…"""
SETTLE_LIMIT = 2
"""…and is tried again so often, after 1 and 2 s, before it counts as failed. Source: TRAPS 28."""
BLAMELESS_CODES = frozenset({"model_file_missing", "engine_missing", "option_refused", "state_not_writable"})
"""Load failures for which nothing that runs is to blame: unloading it would not help."""
LOADING_WORDS = {
    "starting": "its engine starts",
    "loading": "its engine reads the model",
    "answering": "its engine answers its first request",
}


class SlotTable:
    """launcherd's core. `prefix` makes slot ids of this boot unlike those of any other."""

    def __init__(self, config: NodeConfig, *, cores: int, prefix: str, memory: Memory | None = None) -> None:
        self.book = SlotBook(config, cores=cores, prefix=prefix, memory=memory or Memory())
        self.queue = LoadQueue(self.book)
        self._requests = SlotRequests(self.book)

    def handle(self, stimulus: Stimulus | Tick, *, now: float) -> list[Effect]:
        book = self.book
        book.now = now
        quiet = False
        match stimulus:
            case InventoryScanned(models=models, skipped=skipped):
                book.take_inventory(models, skipped)
            case DeviceMeasured():
                self._measured(stimulus)
            case ConfigApplied(config=config):
                book.apply_config(config)
            case AssignmentsGiven(assignments=assignments):
                book.placement.give(assignments)
            case LoadAsked(token=token, request=request):
                self._requests.load(token, request)
            case UnloadAsked():
                self._requests.unload(stimulus)
            case AcquireAsked():
                self._requests.acquire(stimulus)
            case WithdrawAsked():
                self._requests.withdraw(stimulus)
            case PinAsked():
                self._requests.pin(stimulus)
            case LimitsAsked():
                self._requests.set_limits(stimulus)
            case CreditsReported(token=token, request=report):
                book.reply(token, book.leases.report(report, now))
                quiet = not book.contended()
            case CreditsReturned(token=token, request=returned):
                book.leases.give_back(returned, now)
                book.reply(token, Done())
            case SuspicionRaised(token=token, request=suspicion):
                self._suspect(suspicion)
                book.reply(token, Done())
            case CallerGone():
                self._requests.caller_gone(stimulus)
            case EngineAdopted():
                self._adopt(stimulus)
            case EngineLoading(slot_id=slot_id, phase=phase):
                slot = book.slots.get(slot_id)
                if slot is not None and slot.state == "loading":
                    slot.reason = LOADING_WORDS.get(phase, phase)
            case EngineReady():
                self._ready(stimulus)
            case EngineFailed():
                self._load_failed(stimulus)
            case EngineExited(slot_id=slot_id, how=how, last_words=words):
                slot = book.slots.get(slot_id)
                if slot is not None and slot.state in RUNNING:
                    self._crashed(slot, f"its engine {how}", words)
            case EngineHung():
                self._hung(stimulus)
            case EngineHealthy(slot_id=slot_id):
                slot = book.slots.get(slot_id)
                if slot is not None:
                    if slot.suspected and slot.state == "ready":
                        slot.reason = "answers again"
                    slot.probing = slot.suspected = False
                    slot.probe_at = now + HEALTH_SECONDS
            case EngineStopped(slot_id=slot_id):
                slot = book.slots.get(slot_id)
                if slot is not None and slot.state == "stopping":
                    if slot.hung:
                        self._crashed(slot, slot.hung, "")
                    else:
                        book.drop(slot, slot.reason)
            case Tick():
                self._tick()
        if not quiet:
            self._settle()
        return book.take_effects()

    def next_deadline(self) -> float | None:
        return self.book.next_deadline()

    def check_invariants(self) -> None:
        """Raises AssertionError when the machine contradicts itself."""
        self.book.check_invariants()

    # -- engines ---------------------------------------------------------------------------------------------

    def _measured(self, device: DeviceMeasured) -> None:
        book = self.book
        book.device = device
        for slot in book.slots.values():
            slot.processors = book.processors(slot.model)
            if slot.state == "queued" and slot.options.recipe == LLAMACPP and not slot.options.backend:
                slot.options = replace(slot.options, backend=device.backend)
        for slot in [slot for slot in book.slots.values() if slot.state == "failed"]:
            record = book.failures.get(slot.name)
            if record is not None and record.code == "engine_missing" and not engine_missing(slot.options, device):
                del book.failures[slot.name]
                book.drop(slot, "an engine was installed since", "replaced")

    def _adopt(self, adopted: EngineAdopted) -> None:
        book, memory = self.book, adopted.memory
        slot = book.make_slot(adopted.model, memory.options, memory.origin, book.next_order(), adopted.slot_id)
        slot.endpoint, slot.load_seconds = adopted.endpoint, memory.load_seconds
        slot.requests_total, slot.restarts = memory.requests_total, memory.restarts
        slot.asked = True
        book.grace_until = book.now + CREDIT_GRACE_SECONDS
        self._open(slot, "kept while launcherd was restarted")

    def _ready(self, ready: EngineReady) -> None:
        book = self.book
        slot = book.slots.get(ready.slot_id)
        if slot is None or slot.state != "loading":
            return
        book.loading = None
        slot.endpoint, slot.load_seconds, slot.attempt = ready.endpoint, ready.load_seconds, 0
        self._open(slot, f"loaded in {ready.load_seconds:.1f} s")
        for token in slot.loaders:
            loaded = ModelLoaded(model=slot.name, slot_id=slot.slot_id, load_seconds=slot.load_seconds, already=False)
            book.reply(token, loaded)
        slot.loaders.clear()

    def _open(self, slot: Slot, reason: str) -> None:
        book = self.book
        slot.move("ready", reason, book.now)
        slot.ready_at = slot.last_use_at = book.now
        slot.probe_at = book.now + HEALTH_SECONDS
        book.leases.open(slot.slot_id, slot.options.parallel, slot.requests_total, book.now)
        book.note(slot.name, reason)

    def _load_failed(self, failed: EngineFailed) -> None:
        book = self.book
        slot = book.slots.get(failed.slot_id)
        if slot is None or slot.state not in ("loading", "stopping"):
            return
        if book.loading == slot.slot_id:
            book.loading = None
        if slot.state == "stopping":
            book.drop(slot, slot.reason)
        elif failed.code in BLAMELESS_CODES:
            book.give_up(slot, failed.code, failed.detail)
        elif slot.restarts:
            self._crashed(slot, f"its engine could not be restarted: {failed.detail}", "")
        elif self._may_settle(slot, failed.code):
            slot.settling += 1
            delay = restart_delay_seconds(slot.settling)
            slot.restart_at = book.now + delay
            words = f"the device may not have freed all memory yet; tried again in {delay:.0f} s ({failed.detail})"
            slot.move("queued", clip(words), book.now)
            book.queue.insert(0, slot.slot_id)
        elif slot.attempt:
            book.give_up(slot, failed.code, f"{failed.detail}; tried twice, the second time with nothing else loaded")
        else:
            slot.attempt = 1
            book.note(slot.name, f"its first load failed: {failed.detail}")
            words = f"its first load failed ({failed.detail}); one more try with nothing else loaded"
            slot.move("queued", words, book.now)
            book.queue.insert(0, slot.slot_id)

    def _may_settle(self, slot: Slot, code: str) -> bool:
        """Whether another engine was on the GPU moments before: drivers free its memory late."""
        book = self.book
        on_gpu = book.device is not None and book.device.device != "cpu"
        recently = slot.since - book.stopped_at < SETTLE_SECONDS
        return on_gpu and recently and slot.settling < SETTLE_LIMIT and code != "load_timed_out"

    def _hung(self, hung: EngineHung) -> None:
        slot = self.book.slots.get(hung.slot_id)
        if slot is not None and slot.state in RUNNING:
            slot.hung = f"its engine hung: {hung.detail}"
            self.book.leases.close(slot.slot_id)
            slot.move("stopping", slot.hung, self.book.now)
            self.book.effects.append(StopEngine(slot_id=slot.slot_id, reason=slot.hung))

    def _crashed(self, slot: Slot, what: str, last_words: str) -> None:
        """An engine that was ready is gone, or did not come back."""
        book = self.book
        book.leases.close(slot.slot_id)
        reason = f"{what}; its last words: {last_words}" if last_words else what
        record = book.failure_record(slot.name)
        if slot.ready_at is not None and book.now - slot.ready_at > CRASH_WINDOW_SECONDS:
            record.recovered()
        if slot.drain is not None:
            book.decline(slot, slot.drain.reason)
            book.drop(slot, f"{reason}, while it was {slot.drain.reason}")
            return
        delay = record.crash(book.now)
        if delay is None:
            count = len(record.crash_times)
            book.give_up(slot, "engine_crashed", f"crashed {count} times within 60 s, the last time: {reason}")
            return
        book.note(slot.name, reason)
        heir = book.make_slot(slot.model, slot.options, slot.origin, slot.order)
        heir.asked, heir.placed = slot.asked, slot.placed
        heir.restarts = slot.restarts + 1
        heir.last_use_at, heir.restart_at = slot.last_use_at, book.now + delay
        heir.loaders, slot.loaders = slot.loaders, []
        heir.move("restarting", f"{reason}; started again in {delay:.0f} s", book.now)
        book.announce(heir)
        book.drop(slot, reason, "replaced")

    # -- time ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        book = self.book
        for waiter in book.leases.lapse(book.now):
            book.reply(waiter.token, Refused(code="holder_gone", detail="its holder stopped reporting"))
        idle_seconds = book.config.models.idle_unload_minutes * 60
        for slot in list(book.slots.values()):
            if slot.state == "restarting" and slot.restart_at <= book.now:
                slot.move("queued", "its engine ended and is started again", book.now)
                book.queue.insert(0, slot.slot_id)
            elif slot.state in RUNNING and not slot.probing and slot.probe_at <= book.now:
                self._probe(slot, eager=False)
            if slot.state == "ready" and idle_seconds and not slot.pinned and book.idle_until(slot) <= book.now:
                minutes = book.config.models.idle_unload_minutes
                book.start_drain(slot, Drain("idle", book.next_order(), f"unused for {minutes:g} min"))

    def _probe(self, slot: Slot, *, eager: bool) -> None:
        slot.probing = True
        self.book.effects.append(ProbeEngine(slot_id=slot.slot_id, eager=eager))

    def _suspect(self, suspicion: EngineSuspected) -> None:
        slot = self.book.slots.get(suspicion.slot_id)
        if slot is not None and slot.state in RUNNING and not slot.suspected:
            slot.suspected = True
            if slot.state == "ready":
                # Most are just long at work. One that drains goes on saying for whom it goes.
                slot.reason = "has sent nothing for a while; its engine is asked whether it lives"
            self.book.note(slot.name, f"its engine was reported as not answering: {suspicion.detail[:300]}")
            if not slot.probing:
                self._probe(slot, eager=True)

    # -- after every stimulus --------------------------------------------------------------------------------

    def _settle(self) -> None:
        book = self.book
        self.queue.drop_unwanted()
        self.queue.call_for_loads()
        self.queue.load_assigned()
        book.grant_all()
        self.queue.work()
        # What was displaced while it was restarting may have been waited for.
        self.queue.call_for_loads()
        book.grant_all()
        book.finish_drains()
        book.recall_all()
        self.queue.describe()
