"""Sentences for people."""

from __future__ import annotations

import pytest

from services.launcherd.slot_events import DeviceMeasured
from services.launcherd.slot_words import REASON_LIMIT, clip, code_of, requests, size, too_large, waits_for


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")],
)
def test_size(count: int, words: str) -> None:
    assert size(count) == words


def test_numbers_are_in_the_refusal_of_what_is_too_large() -> None:
    """TRAPS 29: refused before it starts, with the numbers."""
    device = DeviceMeasured(device="GPU", total_bytes=8 << 30, reserve_bytes=1 << 30, engine="e")
    words = too_large("m", 9 << 30, 5 << 30, 4096, device)
    assert all(part in words for part in ("9.0 GiB", "7.0 GiB", "8.0 GiB", "5.0 GiB", "4096", "Nothing was unloaded"))


def test_small_words() -> None:
    assert (requests(1), requests(2)) == ("1 request", "2 requests")
    assert waits_for(["for a to stop", "for b to stop"]) == "waits for a to stop and for b to stop"
    assert waits_for([]) == "waits for its place"
    assert len(clip("x" * 5000)) == REASON_LIMIT
    assert (code_of("engine_exited"), code_of("model_too_large")) == ("load_failed", "model_too_large")
