"""What the parts of the slot table share: slots, queue, leases, failures, and the steps that change a slot.

Effects are collected here in order. Only `slots.SlotTable` and `load_queue.LoadQueue` write in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from services.launcherd.command_line import EngineOptions
from services.launcherd.failures import FailureRecord
from services.launcherd.leases import LeaseBook, Waiter
from services.launcherd.node_words import device_message, inventory_message, limits_message
from services.launcherd.options import engine_options, options_need_bytes
from services.launcherd.placement import SAFE_SECONDS, Placement
from services.launcherd.recipes import processors
from services.launcherd.slot import COMING, COUNTER_SECONDS, OCCUPYING, RUNNING, Drain, Slot
from services.launcherd.slot_events import (
    DeviceMeasured,
    Effect,
    KnownModel,
    Memory,
    Publish,
    Remember,
    Reply,
    ReplyToken,
    SlotMemory,
    StopEngine,
)
from services.launcherd.slot_words import clip, code_of
from shared.config import NodeConfig, type_limit
from shared.ids import HolderId, ModelName, SlotId
from shared.messages.daemon import Done, Refused
from shared.messages.leases import CreditsConfirmed, LeaseGranted
from shared.messages.models import (
    DeviceChanged,
    InventoryChanged,
    LimitsChanged,
    LoadModel,
    LoadOrigin,
    ModelLoaded,
    ModelType,
    Processor,
    SkippedFile,
    SlotChanged,
    SlotEnd,
)

HEALTH_SECONDS = 10.0
"""A ready engine is asked whether it lives at least so often. Its exit is noticed at once anyway."""
HISTORY_LIMIT = 400
UNCOOLED_CODES = frozenset({"model_file_missing", "model_too_large"})
"""Failures without an attempt: the model may be asked for again at once."""


class SlotBook:
    """See the module. `now` is the time of the stimulus being handled."""

    def __init__(self, config: NodeConfig, *, cores: int, prefix: str, memory: Memory) -> None:
        self.config = config
        self.cores = cores
        self.now = 0.0
        self.models: dict[ModelName, KnownModel] = {}
        self.skipped: tuple[SkippedFile, ...] = ()
        self.device: DeviceMeasured | None = None
        self.slots: dict[SlotId, Slot] = {}
        self.queue: list[SlotId] = []
        self.loading: SlotId | None = None
        self.stopped_at = float("-inf")
        """When the last engine was gone."""
        self.leases = LeaseBook(memory.credits)
        self.placement = Placement(memory.declined)
        self.pinned = set(memory.pinned)
        self.limits_set = memory.limits_set
        """Limits that somebody set while the node ran, until the configured ones change."""
        self.failures: dict[ModelName, FailureRecord] = {}
        self.unloads: dict[ReplyToken, set[SlotId]] = {}
        self.history: deque[tuple[float, ModelName, str]] = deque(maxlen=HISTORY_LIMIT)
        self.grace_until = 0.0
        """Nothing is evicted or stopped before, unless every holder has announced its credits again."""
        self.effects: list[Effect] = []
        self.inventory: InventoryChanged | None = None
        self.device_changed: DeviceChanged | None = None
        self.limits_changed: LimitsChanged | None = None
        self._prefix = prefix
        self._slots_made = 0
        self._order = 0
        self._inventory_stale = False
        self._remembered: object = None
        self._memory_complete = memory.complete

    def next_order(self) -> int:
        self._order += 1
        return self._order

    def apply_config(self, config: NodeConfig) -> None:
        """For later loads; what is loaded stays as it is."""
        if config.models.max_loaded_models != self.config.models.max_loaded_models:
            self.limits_set = ()
        self.config = config
        self._inventory_stale = self.inventory is not None

    def slot_limit(self, type: ModelType) -> int:
        """How many models of `type` may be loaded at once; -1 without limit."""
        return type_limit(self.limits_set or self.config.models.max_loaded_models, type)

    def processors(self, model: KnownModel) -> tuple[Processor, ...]:
        """What its engine computes on here."""
        device = self.device.device if self.device is not None else "cpu"
        return processors(model.recipe, device, self.config.recipes)

    def options_of(self, model: KnownModel, request: LoadModel | None = None) -> EngineOptions:
        """What it would be loaded with now. Raises: OptionRefused."""
        backend = self.device.backend if self.device is not None else ""
        return engine_options(model, self.config, self.cores, request, backend=backend)

    def pin(self, name: ModelName, pinned: bool) -> None:
        """For the model's slots, those to come too."""
        (self.pinned.add if pinned else self.pinned.discard)(name)
        for slot in self.of(name):
            slot.pinned = pinned
            if pinned and slot.state == "draining" and slot.drain is not None and slot.drain.by == "idle":
                self.keep(slot, "kept: it was pinned")

    def in_grace(self) -> bool:
        """Whether holders of an earlier launcherd's credits may still announce themselves."""
        return self.now < self.grace_until and (not self._memory_complete or self.leases.unconfirmed() > 0)

    def of(self, name: ModelName) -> list[Slot]:
        """The model's slots, oldest first."""
        return [slot for slot in self.slots.values() if slot.name == name]

    def take_inventory(self, models: Iterable[KnownModel], skipped: tuple[SkippedFile, ...]) -> None:
        before = self.models
        self._inventory_stale = True
        self.models = {model.name: model for model in models}
        self.skipped = skipped
        for name in before.keys() | self.failures.keys():
            old, model = before.get(name), self.models.get(name)
            if model is None or (old is not None and old.file != model.file):
                # Another file, or none any more: what was learned about the old one says nothing.
                self.failures.pop(name, None)
        for slot in [slot for slot in self.slots.values() if slot.state == "failed" and slot.name not in self.models]:
            self.drop(slot, "its file is gone", "dropped")

    # -- replies ---------------------------------------------------------------------------------------------

    def reply(
        self,
        token: ReplyToken,
        message: Done | Refused | ModelLoaded | LeaseGranted | CreditsConfirmed,
        holder: HolderId | None = None,
    ) -> None:
        self.effects.append(Reply(token=token, message=message, holder=holder))

    def refuse(self, waiter: Waiter, message: Refused) -> None:
        self.leases.remove(waiter)
        self.reply(waiter.token, message)

    def cooling(self, name: ModelName, record: FailureRecord) -> Refused:
        seconds = record.cooling_seconds(self.now)
        detail = f"{name} failed and is not tried again for {seconds:.0f} s: {record.reason}"
        return Refused(code=code_of(record.code), detail=detail, retry_after_seconds=round(seconds, 1))

    def note(self, name: ModelName, sentence: str) -> None:
        """For `why`: what happened to a model."""
        self.history.append((self.now, name, clip(sentence)))

    # -- slots -----------------------------------------------------------------------------------------------

    def make_slot(
        self, model: KnownModel, options: EngineOptions, origin: LoadOrigin, order: int, slot_id: SlotId | None = None
    ) -> Slot:
        if slot_id is None:
            self._slots_made += 1
            slot_id = SlotId(f"{self._prefix}-{self._slots_made}")
        slot = Slot(
            slot_id=slot_id,
            model=model,
            options=options,
            need_bytes=options_need_bytes(model, options),
            origin=origin,
            order=order,
            state="queued",
            reason="",
            since=self.now,
            last_use_at=self.now,
            pinned=model.name in self.pinned,
            processors=self.processors(model),
        )
        self.slots[slot_id] = slot
        return slot

    def enqueue(self, model: KnownModel, options: EngineOptions, origin: LoadOrigin, order: int, reason: str) -> Slot:
        """A new slot at the end of the load queue. It takes the place of a failed one."""
        slot = self.make_slot(model, options, origin, order)
        slot.reason = reason
        self.queue.append(slot.slot_id)
        for old in self.of(model.name):
            if old.state == "failed":
                self.announce(slot)
                self.drop(old, "tried again", "replaced")
        return slot

    def start_drain(self, slot: Slot, drain: Drain) -> None:
        slot.drain = drain
        slot.move("draining", drain.reason, self.now)

    def keep(self, slot: Slot, reason: str) -> None:
        """A draining slot serves on."""
        slot.drain = None
        slot.move("ready", reason, self.now)

    def stop(self, slot: Slot, reason: str) -> None:
        """End its engine; `EngineStopped` or `EngineFailed` follows."""
        self.leases.close(slot.slot_id)
        slot.move("stopping", reason, self.now)
        self.effects.append(StopEngine(slot_id=slot.slot_id, reason=reason))

    def drop(self, slot: Slot, reason: str, ended_by: SlotEnd = "") -> None:
        """The slot's last word. Whoever waited for its load is refused, whoever waited for its end is answered.

        `ended_by` is known already of a slot that was drained or stopped.
        """
        slot.ended_by = slot.drain.by if slot.drain is not None else ended_by
        del self.slots[slot.slot_id]
        self.leases.close(slot.slot_id)
        if slot.slot_id in self.queue:
            self.queue.remove(slot.slot_id)
        if self.loading == slot.slot_id:
            self.loading = None
        if slot.endpoint is not None:
            self.stopped_at = self.now
        slot.endpoint = None
        slot.move("unloaded", clip(reason), self.now)
        self.note(slot.name, f"unloaded: {reason}")
        self.announce(slot)
        for token in slot.loaders:
            self.reply(token, Refused(code="unloaded", detail=f"{slot.name} was not loaded: {reason}"))
        for token, pending in list(self.unloads.items()):
            pending.discard(slot.slot_id)
            if not pending:
                del self.unloads[token]
                self.reply(token, Done(detail="unloaded"))

    def give_up(self, slot: Slot, code: str, detail: str) -> None:
        """The slot stays as *failed*, with the reason, until the model is asked for again."""
        record = self.failure_record(slot.name)
        reason = clip(detail)
        record.fail(
            code, reason, slot.options, now=self.now, cooled=code not in UNCOOLED_CODES
        )
        self.leases.close(slot.slot_id)
        slot.endpoint, slot.drain, slot.hung = None, None, ""
        slot.move("failed", reason, self.now)
        self.note(slot.name, f"failed: {reason}")
        refused = Refused(
            code=code_of(code), detail=reason, retry_after_seconds=round(record.cooling_seconds(self.now), 1) or None
        )
        for token in slot.loaders:
            self.reply(token, refused)
        slot.loaders.clear()
        if not any(other.state in COMING for other in self.of(slot.name)):
            for waiter in list(self.leases.line(slot.name)):
                self.refuse(waiter, refused)
        for old in self.of(slot.name):
            if old.state == "failed" and old is not slot:
                self.drop(old, "failed again", "replaced")

    def turn_away(self, slot: Slot, code: str, detail: str) -> None:
        """Drop a queued load and refuse whoever waits for it: as things are now it has no place."""
        refused = Refused(code=code_of(code), detail=detail)
        for token in slot.loaders:
            self.reply(token, refused)
        slot.loaders.clear()
        for waiter in list(self.leases.line(slot.name)):
            self.refuse(waiter, refused)
        self.drop(slot, detail, "dropped")

    def failure_record(self, name: ModelName) -> FailureRecord:
        return self.failures.setdefault(name, FailureRecord())

    # -- leases ----------------------------------------------------------------------------------------------

    def contended(self) -> bool:
        """Whether a report of credits can lead to anything but new counters."""
        draining = any(slot.state == "draining" for slot in self.slots.values())
        return draining or bool(self.queue) or bool(self.leases.waiting_models())

    def eligible(self, slot: Slot) -> bool:
        """Whether a request waits that this slot still serves."""
        before = slot.drain.before if slot.drain else None
        return next(self.leases.line(slot.name, before=before), None) is not None

    def grant_all(self) -> None:
        for slot in list(self.slots.values()):
            if slot.state not in RUNNING or slot.suspected or slot.endpoint is None:
                continue
            before = slot.drain.before if slot.drain else None
            granted = self.leases.grant(
                slot.slot_id, slot.name, before=before, generous=slot.drain is None, now=self.now
            )
            for waiter, credits in granted:
                lease = LeaseGranted(
                    model=slot.name,
                    slot_id=slot.slot_id,
                    base_url=slot.endpoint.base_url,
                    api_key=slot.endpoint.api_key,
                    credits=credits,
                    parallel=slot.options.parallel,
                    queued_seconds=round(self.now - waiter.since, 6),
                )
                self.reply(waiter.token, lease, waiter.holder)

    def finish_drains(self) -> None:
        """Stop what has no credit out and no request left to serve."""
        if self.in_grace():
            return
        for slot in list(self.slots.values()):
            if slot.state != "draining" or slot.drain is None:
                continue
            if self.leases.ledgers[slot.slot_id].credits == 0 and not self.eligible(slot):
                self.decline(slot, slot.drain.reason)
                self.stop(slot, slot.drain.reason)

    def decline(self, slot: Slot, reason: str) -> None:
        """The model goes, unless it only changes its slot: its assignment does not bring it back by itself.

        What a node that became a client drops has no assignment any more; the next one counts.
        """
        if slot.drain is not None and slot.drain.by == "dropped":
            return
        if not any(other.state in COMING for other in self.of(slot.name) if other is not slot):
            self.placement.decline(slot.name, reason, self.now)

    def recall_all(self) -> None:
        for slot in self.slots.values():
            if slot.slot_id in self.leases.ledgers and not (slot.suspected and slot.drain is None):
                for recall in self.leases.recalls(slot.slot_id, slot.name, draining=slot.drain is not None):
                    self.effects.append(Publish(message=recall))

    def last_use_at(self, slot: Slot) -> float:
        ledger = self.leases.ledgers.get(slot.slot_id)
        return slot.last_use_at if ledger is None else max(slot.last_use_at, ledger.last_use_at)

    def idle_until(self, slot: Slot) -> float:
        """When the slot will have been unused for long enough to be unloaded."""
        ledger = self.leases.ledgers.get(slot.slot_id)
        limit = self.config.models.idle_unload_minutes * 60
        used_at = self.now if ledger is not None and ledger.in_use else self.last_use_at(slot)
        return used_at + limit

    # -- what others see -------------------------------------------------------------------------------------

    def announce(self, slot: Slot) -> None:
        """Publish the slot now."""
        view = self.view(slot)
        slot.published, slot.published_at = view, self.now
        self.effects.append(Publish(message=view))

    def view(self, slot: Slot) -> SlotChanged:
        in_use, waiting = self.counters(slot)
        return slot.view(in_use=in_use, waiting=waiting, now=self.now)

    def counters(self, slot: Slot) -> tuple[int, int]:
        """Requests in flight and requests that wait; the slot's own totals are brought up to date."""
        in_use = 0
        ledger = self.leases.ledgers.get(slot.slot_id)
        if ledger is not None:
            in_use = ledger.in_use
            slot.requests_total = ledger.requests_total
            slot.last_use_at = max(slot.last_use_at, ledger.last_use_at)
        waiting = self.leases.waiting(slot.name)
        if waiting and any(newest is not slot for newest in self.of(slot.name)[-1:]):
            waiting = 0  # They are shown once, on the newest slot of the model.
        return in_use, waiting

    def take_effects(self) -> list[Effect]:
        """The effects of this step: the memory first, publications last."""
        for slot in self.slots.values():
            news = slot.news(*self.counters(slot))
            if news == "state" or (news and slot.published_at + COUNTER_SECONDS <= self.now):
                self.announce(slot)
        self._publish_inventory()
        self._publish_device()
        self._publish_limits()
        effects, self.effects = self.effects, []
        running = tuple(slot.slot_id for slot in self.slots.values() if slot.state in RUNNING)
        key = (self.leases.version(), running, self.placement.memory(), frozenset(self.pinned), self.limits_set)
        if key != self._remembered:
            self._remembered = key
            effects.insert(0, Remember(memory=self.memory()))
        return effects

    def memory(self) -> Memory:
        kept = [slot for slot in self.slots.values() if slot.state in RUNNING]
        return Memory(
            slots={
                slot.slot_id: SlotMemory(
                    model=slot.name,
                    options=slot.options,
                    origin=slot.origin,
                    load_seconds=slot.load_seconds,
                    requests_total=slot.requests_total,
                    restarts=slot.restarts,
                )
                for slot in kept
            },
            credits=self.leases.credits_by_slot(),
            declined=self.placement.memory(),
            pinned=frozenset(self.pinned),
            limits_set=self.limits_set,
        )

    def _publish_inventory(self) -> None:
        if not self._inventory_stale:
            return
        self._inventory_stale = False
        inventory = inventory_message(self.models.values(), self.skipped, self.config, self.cores)
        if inventory != self.inventory:
            self.inventory = inventory
            self.effects.append(Publish(message=inventory))

    def _publish_device(self) -> None:
        if self.device is None:
            return
        others = sum(
            slot.need_bytes
            for slot in self.slots.values()
            if slot.model.file.type != "llm" and not slot.model.builtin and self.occupies(slot)
        )
        changed = device_message(self.device, self.config, others)
        if changed != self.device_changed:
            self.device_changed = changed
            self.effects.append(Publish(message=changed))

    def _publish_limits(self) -> None:
        limits = limits_message(self.config, self.limits_set)
        if limits != self.limits_changed:
            self.limits_changed = limits
            self.effects.append(Publish(message=limits))

    def occupies(self, slot: Slot) -> bool:
        return slot.state in OCCUPYING or slot.state == "loading"

    # -- time ------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        times = [self.leases.next_deadline()]
        idle = self.config.models.idle_unload_minutes > 0
        for slot in self.slots.values():
            if slot.state == "restarting" or (slot.state == "queued" and slot.restart_at > self.now):
                times.append(slot.restart_at)
            elif slot.state in RUNNING and not slot.probing:
                times.append(slot.probe_at)
            if slot.state == "ready" and idle and not slot.pinned:
                times.append(self.idle_until(slot))
            if slot.ready_at is not None and self.queue and slot.ready_at + SAFE_SECONDS > self.now:
                times.append(slot.ready_at + SAFE_SECONDS)
            if slot.news(*self.counters(slot)):
                times.append(slot.published_at + COUNTER_SECONDS)
        if self.grace_until > self.now:
            times.append(self.grace_until)
        return min((at for at in times if at is not None), default=None)

    def check_invariants(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        self.leases.check_invariants()
        loading = [slot for slot in self.slots.values() if slot.state == "loading"]
        stopping = [slot for slot in self.slots.values() if slot.state == "stopping"]
        assert len(loading) <= 1, "two loads at once"
        assert self.loading in {None, *(slot.slot_id for slot in loading + stopping)}
        assert {slot.slot_id for slot in self.slots.values() if slot.state == "queued"} == set(self.queue)
        assert len(self.queue) == len(set(self.queue))
        for slot in self.slots.values():
            assert slot.reason, f"{slot.slot_id} is {slot.state} without a reason"
            assert (slot.slot_id in self.leases.ledgers) == (slot.state in RUNNING), slot
            assert (slot.drain is not None) == (slot.state == "draining") or slot.state == "stopping", slot
            assert slot.state != "unloaded"
            assert not slot.loaders or slot.state in ("queued", "loading", "restarting", "stopping"), slot
        for name in self.leases.waiting_models():
            assert any(slot.state in COMING or slot.state in RUNNING for slot in self.of(name)), name
        for pending in self.unloads.values():
            assert pending <= set(self.slots)
