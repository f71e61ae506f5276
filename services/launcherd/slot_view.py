"""What the slot table has to say about itself: in one line, in sentences, and as a snapshot."""

from __future__ import annotations

from collections.abc import Iterator

from services.launcherd.model_names import find_name, not_found_words, skipped_words
from services.launcherd.slot import RUNNING, Slot
from services.launcherd.slot_book import SlotBook
from services.launcherd.slot_words import requests
from shared.ids import ModelName
from shared.messages.leases import CreditsRecalled
from shared.messages.models import DeviceChanged, InventoryChanged, LimitsChanged, SlotChanged
from shared.words import size_words

EVENTS_SHOWN = 12
Snapshot = InventoryChanged | DeviceChanged | LimitsChanged | SlotChanged | CreditsRecalled


def state_line(book: SlotBook) -> str:
    """One line for people."""
    if book.device is not None and not book.device.engine:
        return "no inference engine: " + book.device.engine_reason
    counts: dict[str, int] = {}
    for slot in book.slots.values():
        word = "loaded" if slot.state in RUNNING else "waiting" if slot.state == "queued" else slot.state
        counts[word] = counts.get(word, 0) + 1
    loaded = counts.pop("loaded", 0)
    parts = [f"{loaded} model{'s' if loaded != 1 else ''} loaded"]
    parts += [f"{count} {word}" for word, count in counts.items()]
    return ", ".join([*parts, f"{len(book.models)} on disk"])


def snapshot(book: SlotBook) -> Iterator[Snapshot]:
    """The whole published state."""
    yield book.inventory or InventoryChanged(models=(), scanning=True)
    if book.device_changed is not None:
        yield book.device_changed
    if book.limits_changed is not None:
        yield book.limits_changed
    for slot in book.slots.values():
        yield book.view(slot)
    yield from book.leases.active_recalls()


def explain(book: SlotBook, subject: str, now: float) -> tuple[str, ...]:
    """Why a model is loaded, waits, failed, or is not here; empty when nothing is known about the subject."""
    if skipped := skipped_words(subject, book.skipped):
        return (f"{skipped}.",)
    names = book.models.keys() | {name for _, name, _ in book.history} | {slot.name for slot in book.slots.values()}
    by_slot = next((slot.name for slot in book.slots.values() if slot.slot_id == subject), None)
    name = by_slot or find_name(subject, names)
    if name is None:
        return ()
    sentences = [*_on_disk(book, name), *(_slot_words(book, slot, now) for slot in book.of(name))]
    sentences += _placement(book, name, now)
    record = book.failures.get(name)
    if record is not None and record.cooling_seconds(now):
        sentences.append(f"It failed and may be tried again in {record.cooling_seconds(now):.0f} s.")
    waiting = book.leases.waiting(name)
    if waiting:
        sentences.append(f"{requests(waiting).capitalize()} wait{'s' if waiting == 1 else ''} for it.")
    events = [(at, words) for at, model, words in book.history if model == name][-EVENTS_SHOWN:]
    sentences += [f"{_age(now - at)} ago: {words}." for at, words in reversed(events)]
    return tuple(sentences)


def _on_disk(book: SlotBook, name: ModelName) -> list[str]:
    known = book.models.get(name)
    if known is None:
        return [not_found_words(name, book.models).capitalize() + "."]
    file = known.file
    words = f"{name} is on this node's disk: {file.type}, {size_words(known.size_bytes)}, {file.path}."
    if book.of(name):
        return [words]
    return [words, "It is not loaded" + (", but pinned for when it is." if name in book.pinned else ".")]


def _slot_words(book: SlotBook, slot: Slot, now: float) -> str:
    words = f"It is {slot.state} since {_age(now - slot.since)} (slot {slot.slot_id}, {slot.origin}): {slot.reason}."
    if slot.pinned:
        words += " It is pinned: it is not unloaded for another model."
    ledger = book.leases.ledgers.get(slot.slot_id)
    if ledger is not None:
        used = "now" if ledger.in_use else f"{_age(now - book.last_use_at(slot))} ago"
        words += f" {requests(ledger.in_use)} of {ledger.parallel} in use, last used {used}."
    return words


def _placement(book: SlotBook, name: ModelName, now: float) -> list[str]:
    wish = book.placement.assignments.get(name)
    declined = book.placement.declined(name, now)
    if wish is None:
        return []
    words = f"It belongs on this node ({wish.origin}: {wish.reason})"
    return [f"{words}, but is not loaded again until it is asked for: {declined}." if declined else f"{words}."]


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
