"""A held slot says when it gives back, and keeps the engine's key out of logs."""

from __future__ import annotations

from shared.credit_events import Held
from shared.ids import ModelName, SlotId


def held() -> Held:
    return Held(SlotId("s"), ModelName("m"), "http://127.0.0.1:1", "secret-key", 4)


def test_a_recalled_or_suspect_slot_gives_back() -> None:
    slot = held()
    assert not slot.giving_back
    slot.suspect = True
    assert slot.giving_back
    slot.suspect, slot.recalled_at = False, 1.0
    assert slot.giving_back


def test_the_engines_key_does_not_show() -> None:
    assert "secret-key" not in repr(held())
