"""What is remembered of hosts that went away."""

from __future__ import annotations

from services.proxyd.last_seen import FORGET_SECONDS, MODELS_LIMIT, LastSeen
from shared.ids import ModelName

M = ModelName("m")


def test_a_model_that_vanished_names_its_last_hosts_and_when() -> None:
    seen = LastSeen()
    seen.note({M: ("attic", "barn")}, now=0.0)
    assert seen.words(M, now=5.0) is None, "it is served"
    seen.note({}, now=10.0)
    assert seen.words(M, now=52.0) == "attic and barn served it until 42 s ago"
    assert seen.words(M, now=10.0 + 600) == "attic and barn served it until 10 min ago"
    assert seen.words(M, now=10.0 + 3 * 3600) == "attic and barn served it until 3 h ago"
    assert seen.words(M, now=11.0 + FORGET_SECONDS) is None


def test_a_model_that_is_back_is_not_gone() -> None:
    seen = LastSeen()
    seen.note({M: ("attic",)}, now=0.0)
    seen.note({}, now=1.0)
    seen.note({M: ("barn",)}, now=2.0)
    assert seen.words(M, now=3.0) is None


def test_what_was_never_served_elsewhere_is_not_remembered() -> None:
    assert LastSeen().words(M, now=1.0) is None


def test_memory_is_bounded() -> None:
    seen = LastSeen()
    names = [ModelName(f"m{number}") for number in range(MODELS_LIMIT + 5)]
    seen.note(dict.fromkeys(names, ("attic",)), now=0.0)
    seen.note({}, now=1.0)
    assert sum(seen.words(name, now=2.0) is not None for name in names) == MODELS_LIMIT
