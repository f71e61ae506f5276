"""Chance that repeats: choices by a hash of a seed and what is chosen for, so that a run can be replayed."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T", bound=str)


def number(*parts: object) -> int:
    """64 bits that depend on all of ``parts``."""
    text = "\x00".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def shuffled(items: Iterable[T], *parts: object) -> list[T]:
    """``items`` in an order that ``parts`` decide and the order of ``items`` does not."""
    return sorted(items, key=lambda item: (number(*parts, item), item))


def some(items: Iterable[T], count: int, *parts: object) -> list[T]:
    """``count`` of ``items``, or all of them."""
    return shuffled(items, *parts)[:count]
