"""The load queue: one load at a time, in the order of arrival, each with its place made when its turn has come.

Each step is computed anew from the state, so nothing has to be undone when it changes underneath: a victim that turns
out not to be needed any more is simply kept. Source: DESIGN §7 (loads are serialized; the victim is chosen when a load
leaves the queue); TRAPS 19, 22, 29.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.launcherd.eviction import Occupant, Room, Wanted, make_room
from services.launcherd.options import engine_missing
from services.launcherd.slot import COMING, OCCUPYING, RUNNING, Drain, Slot
from services.launcherd.slot_book import SlotBook
from services.launcherd.slot_events import DeviceMeasured, StartEngine
from services.launcherd.slot_words import all_pinned, code_of, requests, too_large, waits_for
from shared.errors import OptionRefused
from shared.ids import ModelName, SlotId
from shared.messages.daemon import Refused
from shared.messages.models import Assignment, ModelLoaded


class LoadQueue:
    """Works on the slots of `book`."""

    def __init__(self, book: SlotBook) -> None:
        self._book = book
        self._head: Slot | None = None
        self._victims: tuple[SlotId, ...] = ()
        self._blocked: list[SlotId] = []

    def drop_unwanted(self) -> None:
        """Queued loads that only a request or an assignment wanted, after that went away.

        An assignment that followed from a request goes with it: else a client that asked once and left would have its
        model loaded later, and another one unloaded for it.
        """
        book = self._book
        for slot in [book.slots[slot_id] for slot_id in book.queue]:
            waiting = book.leases.waiting(slot.name) > 0
            slot.awaited = slot.awaited or waiting
            if slot.asked or slot.restarts or waiting:
                continue
            wish = book.placement.assignments.get(slot.name)
            if wish is None or book.placement.declined(slot.name, book.now):
                book.drop(slot, "nobody waits for it any more", "dropped")
            elif wish.origin == "request" and slot.awaited:
                book.placement.decline(slot.name, "nobody waits for it any more", book.now)
                book.drop(slot, "nobody waits for it any more", "dropped")
            else:
                slot.placed = True

    def load_assigned(self) -> None:
        """A queued slot for each assigned model that has none and is not declined."""
        book = self._book
        for wish in book.placement.assignments.values():
            model = book.models.get(wish.model)
            if model is None or book.of(wish.model) or book.placement.declined(wish.model, book.now):
                continue
            try:
                options = book.options_of(model)
            except OptionRefused:
                continue  # Said to whoever asks for the model.
            slot = book.enqueue(model, options, wish.origin, book.next_order(), wish.reason)
            slot.placed = True

    def call_for_loads(self) -> None:
        """A queued slot for each model that requests wait for and no slot will serve."""
        book = self._book
        for name in book.leases.waiting_models():
            slots = book.of(name)
            if any(slot.state in COMING for slot in slots):
                continue
            drains = [slot.drain.before for slot in slots if slot.state == "draining" and slot.drain]
            first = next(book.leases.line(name, since=max(drains, default=0)), None)
            if first is None:
                continue
            model = book.models.get(name)
            if model is None:
                self._refuse_line(name, "model_file_missing", f"the file of {name} is gone")
                continue
            try:
                options = book.options_of(model)
            except OptionRefused as error:
                self._refuse_line(name, error.code, error.detail)
                continue
            slot = book.enqueue(model, options, "request", first.order, "a request asked for it")
            slot.awaited = True

    def _refuse_line(self, name: ModelName, code: str, detail: str) -> None:
        for waiter in list(self._book.leases.line(name)):
            self._book.refuse(waiter, Refused(code=code_of(code), detail=detail))

    def work(self) -> None:
        """Bring the first load of the queue forward as far as it goes now."""
        book = self._book
        head = book.slots[book.loading] if book.loading else None
        self._victims, self._blocked = (), []
        while head is None and book.device is not None:
            found = self._first(book.device)
            if found is None:
                break
            slot, room = found
            twin = self._still_loaded(slot)
            if twin is not None:
                self._keep_for(slot, twin)
                continue
            if not room.start_now and book.in_grace():
                head = slot
                break
            self._keep_all_but(room.victims)
            if room.start_now and slot.restart_at > book.now:
                self._victims = ()
            elif room.start_now:
                self._start(slot)
            elif self._displace(room.victims, slot):
                continue
            self._victims = room.victims
            head = slot
        if head is None:
            self._keep_all_but(())
        self._head = head

    def describe(self) -> None:
        """Say of each queued load what it waits for, after everything else was done."""
        book, head = self._book, self._head
        for slot_id in book.queue:
            slot = book.slots[slot_id]
            if book.device is None:
                slot.reason = "waits until this node's device is known"
            elif slot is head and book.in_grace():
                slot.reason = "waits for running requests to be announced again after launcherd was restarted"
            elif slot is head and slot.restart_at <= book.now:
                slot.reason = self._waiting_words(self._victims)
            elif head is not None and slot is not head and slot_id not in self._blocked:
                slot.reason = f"waits behind {head.name} in the load queue"

    def _first(self, device: DeviceMeasured) -> tuple[Slot, Room] | None:
        """The first load that may have a place, with what has to go for it. Others stay queued, as blocked."""
        book = self._book
        self._blocked.clear()
        for slot_id in list(book.queue):
            slot = book.slots[slot_id]
            if self._refused(slot, device):
                continue
            only_assigned = self._only_assigned(slot)
            room = self._room(slot, device, only_assigned)
            if not room.blocked:
                return slot, room
            if room.pinned and not only_assigned:
                book.turn_away(slot, "all_pinned", all_pinned(slot.name, room.blocked))
                continue
            slot.reason = f"waits, because {room.blocked}"
            self._blocked.append(slot_id)
        return None

    def _refused(self, head: Slot, device: DeviceMeasured) -> bool:
        """Refuse before starting what can never work here; nothing is unloaded for it."""
        book = self._book
        if missing := engine_missing(head.options, device):
            book.queue.remove(head.slot_id)
            book.give_up(head, "engine_missing", missing)
            return True
        if head.need_bytes > device.capacity_bytes and not head.model.builtin:
            book.queue.remove(head.slot_id)
            size = head.model.size_bytes
            words = too_large(head.name, head.need_bytes, size, head.options.context_tokens, device)
            book.give_up(head, "model_too_large", words)
            return True
        return False

    def _start(self, head: Slot) -> None:
        book = self._book
        book.queue.remove(head.slot_id)
        book.loading = head.slot_id
        head.last_use_at = book.now
        words = "is started again after it ended" if head.restarts else "its engine starts"
        head.move("loading", words if not head.attempt else "second try, with nothing else loaded", book.now)
        book.effects.append(StartEngine(slot_id=head.slot_id, model=head.model, options=head.options))

    def _displace(self, victims: Iterable[SlotId], head: Slot) -> bool:
        """Begin to unload the victims. True if one that has no engine went at once."""
        book = self._book
        gone = False
        for slot_id in victims:
            slot = book.slots[slot_id]
            if slot.name == head.name:
                reason = "is loaded anew with other options" if not head.attempt else "is loaded anew"
            else:
                reason = f"makes room for {head.name}"
                if head.attempt:
                    reason += ", whose first load failed"
            if slot.state == "ready":
                age = book.now - book.last_use_at(slot)
                book.note(slot.name, f"chosen to be unloaded: {reason}; last used {age:.0f} s ago")
                book.start_drain(slot, Drain("eviction", head.order, reason))
            elif slot.state == "restarting" and not self._awaited(slot, head):
                book.decline(slot, reason)
                head.loaders += slot.loaders if slot.name == head.name else []
                slot.loaders = [] if slot.name == head.name else slot.loaders
                book.drop(slot, reason, "eviction")
                gone = True
        return gone

    def _awaited(self, slot: Slot, head: Slot) -> bool:
        """Whether somebody asked for a restarting model before `head` was: it comes up first and serves them."""
        if slot.name == head.name:
            return False
        return bool(slot.loaders) or next(self._book.leases.line(slot.name, before=head.order), None) is not None

    def _still_loaded(self, queued: Slot) -> Slot | None:
        """The slot of the same model and options that has only begun to go: for another model, or because unused."""
        for slot in self._book.of(queued.name):
            going = slot.state == "draining" and slot.drain is not None and slot.drain.by in ("eviction", "idle")
            if going and not queued.attempt and not slot.suspected and slot.options == queued.options:
                return slot
        return None

    def _keep_for(self, queued: Slot, kept: Slot) -> None:
        """What waited for `queued` is served by the slot that is still there, and nothing is loaded."""
        book = self._book
        book.keep(kept, "kept: it is wanted again")
        kept.placed = kept.placed and queued.placed
        if queued.asked:
            kept.asked, kept.origin = True, queued.origin
        for token in queued.loaders:
            loaded = ModelLoaded(model=kept.name, slot_id=kept.slot_id, load_seconds=kept.load_seconds, already=True)
            book.reply(token, loaded)
        queued.loaders.clear()
        book.drop(queued, f"{queued.name} is loaded still", "replaced")

    def _keep_all_but(self, victims: Collection[SlotId]) -> None:
        """Slots that were to make room and need not any more are kept."""
        book = self._book
        for slot in book.slots.values():
            kept = slot.state == "draining" and slot.drain is not None and slot.drain.by == "eviction"
            if kept and slot.slot_id not in victims:
                book.keep(slot, "kept: its place is not needed any more")

    def _waiting_words(self, victims: Iterable[SlotId]) -> str:
        book = self._book
        parts = []
        leaving = [slot_id for slot_id, slot in book.slots.items() if slot.state in ("draining", "stopping")]
        for slot in (book.slots[slot_id] for slot_id in victims or leaving if slot_id in book.slots):
            ledger = book.leases.ledgers.get(slot.slot_id)
            busy = ledger.in_use if ledger is not None else 0
            if slot.state == "draining" and busy:
                parts.append(f"for {slot.name} to finish {requests(busy)}")
            elif slot.state == "draining":
                parts.append(f"for the last requests of {slot.name}")
            elif slot.state == "restarting":
                parts.append(f"for {slot.name} to come back and serve the requests that came before")
            else:
                parts.append(f"for {slot.name} to stop")
        return waits_for(parts)

    def _only_assigned(self, slot: Slot) -> bool:
        """Whether no person and no request wants it here, only the mesh."""
        return slot.placed and not slot.asked and not self._book.leases.waiting(slot.name)

    def _room(self, head: Slot, device: DeviceMeasured, only_assigned: bool) -> Room:
        book = self._book
        wanted = Wanted(
            model=head.name,
            type=head.model.file.type,
            need_bytes=head.need_bytes,
            builtin=head.model.builtin,
            everything=head.attempt > 0,
            npu="npu" in head.processors,
        )
        wish = book.placement.assignments.get(head.name) if only_assigned else None
        occupants = [self._occupant(slot, wish) for slot in book.slots.values() if slot.state in OCCUPYING]
        limit = book.slot_limit(wanted.type)
        return make_room(wanted, occupants, limit=limit, capacity_bytes=device.capacity_bytes)

    def _occupant(self, slot: Slot, wish: Assignment | None) -> Occupant:
        book = self._book
        ledger = book.leases.ledgers.get(slot.slot_id)
        evicted = slot.drain is not None and slot.drain.by == "eviction"
        protected = ""
        if wish is not None:
            ready_seconds = None if slot.ready_at is None else book.now - slot.ready_at
            protected = book.placement.protection(wish, slot.name, ready_seconds)
        return Occupant(
            slot_id=slot.slot_id,
            model=slot.name,
            type=slot.model.file.type,
            need_bytes=0 if slot.model.builtin else slot.need_bytes,
            last_use_at=book.last_use_at(slot),
            busy=(ledger is not None and ledger.in_use > 0) or (slot.state in RUNNING and book.eligible(slot)),
            leaving=slot.state == "stopping" or (slot.state == "draining" and not evicted),
            chosen=slot.state == "draining" and evicted,
            protected=protected,
            pinned=slot.pinned,
            npu="npu" in slot.processors,
            builtin=slot.model.builtin,
        )
