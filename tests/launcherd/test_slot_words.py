"""Sentences for people."""

from __future__ import annotations

from services.launcherd.slot_events import DeviceMeasured
from services.launcherd.slot_words import REASON_LIMIT, clip, code_of, requests, too_large, waits_for


def test_numbers_are_in_the_refusal_of_what_is_too_large() -> None:
    """TRAPS 29: refused before it starts, with the numbers."""
    device = DeviceMeasured(device="GPU", total_bytes=8 * 10**9, reserve_bytes=10**9, engine="e")
    words = too_large("m", 9 * 10**9, 5 * 10**9, 4096, device)
    assert all(part in words for part in ("9.0 GB", "7.0 GB", "8.0 GB", "5.0 GB", "4096", "Nothing was unloaded"))


def test_small_words() -> None:
    assert (requests(1), requests(2)) == ("1 request", "2 requests")
    assert waits_for(["for a to stop", "for b to stop"]) == "waits for a to stop and for b to stop"
    assert waits_for([]) == "waits for its place"
    assert len(clip("x" * 5000)) == REASON_LIMIT
    assert (code_of("engine_exited"), code_of("model_too_large")) == ("load_failed", "model_too_large")
