"""What people and holders ask the slot table for, and the answer each gets at once or is owed.

Works on the shared `SlotBook`; what follows from a request is done when the table settles.
"""

from __future__ import annotations

from services.launcherd.leases import Waiter
from services.launcherd.model_names import find_name, not_found_words
from services.launcherd.slot import COMING, RUNNING, Drain
from services.launcherd.slot_book import SlotBook
from services.launcherd.slot_events import (
    AcquireAsked,
    CallerGone,
    LimitsAsked,
    PinAsked,
    ReplyToken,
    UnloadAsked,
    WithdrawAsked,
)
from services.launcherd.slot_words import requests
from shared.config import parse_limits
from shared.errors import ConfigError, OptionRefused
from shared.messages.daemon import Done, Refused
from shared.messages.models import LoadModel, ModelLoaded, SlotEnd

IDLE_WORDS = (
    "this node is idle: it has no mesh.toml. 'meshctl up' writes one, or load a model with 'meshctl load MODEL'"
)


class SlotRequests:
    """Each method handles one kind of request."""

    def __init__(self, book: SlotBook) -> None:
        self._book = book

    def load(self, token: ReplyToken, request: LoadModel) -> None:
        book = self._book
        name = find_name(request.model, book.models)
        if name is None:
            detail = not_found_words(request.model, book.models, book.skipped)
            book.reply(token, Refused(code="model_not_found", detail=detail))
            return
        model = book.models[name]
        try:
            options = book.options_of(model, request)
        except OptionRefused as error:
            book.reply(token, Refused(code=error.code, detail=error.detail))
            return
        slot = next((slot for slot in reversed(book.of(name)) if slot.state in COMING), None)
        record = book.failures.get(name)
        if slot is None and record is not None and record.options == options and record.cooling_seconds(book.now):
            book.reply(token, book.cooling(name, record))
            return
        book.placement.request(name)
        if request.pinned is not None:
            book.pin(name, request.pinned)
        if slot is None or slot.options != options:
            words = "asked for" if slot is None else "asked for with other options"
            slot = book.enqueue(model, options, request.origin, book.next_order(), words)
        slot.asked, slot.placed, slot.origin = True, False, request.origin
        if slot.state == "ready":
            loaded = ModelLoaded(model=name, slot_id=slot.slot_id, load_seconds=slot.load_seconds, already=True)
            book.reply(token, loaded)
        elif request.wait:
            slot.loaders.append(token)
        else:
            book.reply(token, Done(detail=f"{name} will be loaded"))

    def unload(self, asked: UnloadAsked) -> None:
        book, request = self._book, asked.request
        slots = list(book.slots.values())
        if request.model:
            known = {*book.models, *(slot.name for slot in slots)}
            name = find_name(request.model, known)
            if name is None:
                detail = not_found_words(request.model, book.models, book.skipped)
                book.reply(asked.token, Refused(code="model_not_found", detail=detail))
                return
            slots = book.of(name)
        by: SlotEnd = "dropped" if asked.of_client else "owner"
        reason = "this node only consumes now" if asked.of_client else "unloaded by request"
        for slot in slots:
            if not asked.of_client:
                book.placement.decline(slot.name, reason, book.now)
            if slot.state in ("queued", "loading", "restarting"):
                words = f"{slot.name} was unloaded while the request waited for it; ask again to load it"
                for waiter in list(book.leases.line(slot.name)):
                    self.refuse(waiter, "client" if asked.of_client else "unloaded", words)
            if slot.state == "ready":
                book.start_drain(slot, Drain(by, book.next_order(), reason))
            elif slot.state == "draining" and slot.drain is not None:
                slot.drain = Drain(by, slot.drain.before, reason)
            elif slot.state in ("loading", "stopping"):
                slot.drain = Drain(by, 0, reason)
                slot.hung = ""  # Not to be restarted.
                if slot.state == "loading":
                    book.stop(slot, reason)
            else:
                book.failures.pop(slot.name, None)
                book.drop(slot, reason, by)
        pending = [slot for slot in slots if slot.slot_id in book.slots]
        if not slots:
            what = f"{request.model} is not loaded" if request.model else "no model is loaded"
            book.reply(asked.token, Done(detail=f"{what}: nothing to do"))
        elif pending and request.wait:
            book.unloads[asked.token] = {slot.slot_id for slot in pending}
        else:
            book.reply(asked.token, Done(detail="being unloaded" if pending else "unloaded"))

    def acquire(self, asked: AcquireAsked) -> None:
        book, request, token = self._book, asked.request, asked.token
        name = find_name(request.model, book.models.keys() | {slot.name for slot in book.slots.values()})
        slots = book.of(name) if name is not None else []
        coming = any(slot.state in COMING for slot in slots)
        waiting = book.leases.waiting(name) if name is not None else 0
        earlier = book.leases.find(request.holder, request.request_id)
        record = book.failures.get(name) if name is not None and not coming else None
        refused: Refused | None = None
        if not book.config.configured:
            refused = Refused(code="idle", detail=IDLE_WORDS)
        elif name is None:
            refused = Refused(code="model_not_found", detail=not_found_words(request.model, book.models, book.skipped))
        elif not request.load and not any(slot.state in RUNNING for slot in slots):
            refused = Refused(code="not_loaded", detail=f"{name} is not loaded on this node")
        elif record is not None and record.cooling_seconds(book.now):
            refused = book.cooling(name, record)
        elif earlier is None and waiting >= book.config.engine.queue_limit:
            parallel = max((slot.options.parallel for slot in slots), default=1)
            refused = Refused(
                code="overloaded",
                detail=f"{requests(waiting)} wait for {name} already, which is the limit (engine.queue_limit)",
                retry_after_seconds=float(min(60, max(1, waiting // parallel))),
            )
        if refused is not None or name is None:
            book.reply(token, refused or Refused(code="model_not_found", detail=request.model))
            return
        if earlier is not None:
            book.reply(earlier.token, Refused(code="repeated", detail="the same request was sent again"))
            book.leases.renew(earlier, token)
            return
        book.placement.request(name)
        waiter = Waiter(book.next_order(), token, request.holder, request.request_id, name, book.now)
        book.leases.enqueue(waiter)

    def caller_gone(self, gone: CallerGone) -> None:
        book = self._book
        waiter = book.leases.find_token(gone.token)
        if waiter is not None:
            book.leases.remove(waiter)
        for slot in book.slots.values():
            if gone.token in slot.loaders:
                slot.loaders.remove(gone.token)
        book.unloads.pop(gone.token, None)
        if gone.granted is not None and gone.holder is not None:
            ledger = book.leases.ledgers.get(gone.granted.slot_id)
            if ledger is not None:
                ledger.take_back(gone.holder, gone.granted.credits)

    def withdraw(self, asked: WithdrawAsked) -> None:
        waiter = self._book.leases.find(asked.request.holder, asked.request.request_id)
        if waiter is not None:
            self.refuse(waiter, "withdrawn", "the request was withdrawn by its holder")
        self._book.reply(asked.token, Done())

    def pin(self, asked: PinAsked) -> None:
        book, request = self._book, asked.request
        name = find_name(request.model, book.models.keys() | book.pinned | {slot.name for slot in book.slots.values()})
        if name is None:
            detail = not_found_words(request.model, book.models, book.skipped)
            book.reply(asked.token, Refused(code="model_not_found", detail=detail))
            return
        book.pin(name, request.pinned)
        if request.pinned:
            loaded = "" if book.of(name) else "; it is not loaded now"
            book.reply(asked.token, Done(detail=f"{name} is pinned: it is not unloaded for another model{loaded}"))
        else:
            book.reply(asked.token, Done(detail=f"{name} is not pinned"))

    def set_limits(self, asked: LimitsAsked) -> None:
        book = self._book
        try:
            limits = parse_limits(asked.request.limits, source="internal/set")
        except ConfigError as error:
            book.reply(asked.token, Refused(code=error.code, detail=error.detail))
            return
        book.limits_set = limits
        book.reply(asked.token, Done(detail=f"max_loaded_models is {' '.join(map(str, limits))}"))

    def refuse(self, waiter: Waiter, code: str, detail: str) -> None:
        self._book.refuse(waiter, Refused(code=code, detail=detail))
