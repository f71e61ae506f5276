"""Token counts and speed from the end of an engine's answer, read once, after the last byte was forwarded.

Works on the first and last few kilobytes, so that it costs the same for any answer and needs no stream parser. A
quoted ``\\"usage\\":`` inside generated text is escaped in JSON and therefore never matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KEPT_BYTES = 16 * 1024
"""llama.cpp's last event with usage and timings is under 2 KB."""

_FIELD = re.compile(
    rb'"((?:prompt|completion|input|output|cache_read_input|cache_creation_input)_tokens|(?:prompt|cache|predicted)_n|predicted_per_second)"'
    rb"\s*:\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine counted; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_second: float | None = None


NOTHING = Usage()


def read_usage(first: bytes, last: bytes) -> Usage:
    """``first`` and ``last``: how the body begins and ends; ``first`` matters only to Anthropic streams, whose
    prompt tokens come with the first event."""
    usage_at = last.rfind(b'"usage"')
    timings_at = last.rfind(b'"timings"')
    if usage_at < 0 and timings_at < 0:
        return NOTHING
    found = _fields(last, min(at for at in (usage_at, timings_at) if at >= 0))
    prompt = found.get(b"prompt_tokens", _input_tokens(found))
    if prompt is None and b"prompt_n" in found:
        prompt = found[b"prompt_n"] + found.get(b"cache_n", 0.0)
    if prompt is None and first is not last:
        prompt = _input_tokens(_fields(first, max(0, first.find(b'"usage"'))))
    completion = found.get(b"completion_tokens", found.get(b"output_tokens", found.get(b"predicted_n")))
    return Usage(
        prompt_tokens=None if prompt is None else int(prompt),
        completion_tokens=None if completion is None else int(completion),
        tokens_per_second=found.get(b"predicted_per_second") or None,
    )


def _input_tokens(found: dict[bytes, float]) -> float | None:
    """Anthropic counts what came from the cache apart; here a prompt's tokens are all of them."""
    fresh = found.get(b"input_tokens")
    if fresh is None:
        return None
    return fresh + found.get(b"cache_read_input_tokens", 0.0) + found.get(b"cache_creation_input_tokens", 0.0)


def _fields(text: bytes, start: int) -> dict[bytes, float]:
    return {key: float(value) for key, value in _FIELD.findall(text, start)}


class BodyEnds:
    """Keeps the first and the last ``KEPT_BYTES`` of what passes by, whatever passes."""

    __slots__ = ("_kept", "_parts", "first")

    def __init__(self) -> None:
        self.first = b""
        self._parts: list[bytes] = []
        self._kept = 0

    def add(self, data: bytes) -> None:
        if not self.first:
            self.first = data if len(data) <= KEPT_BYTES else data[:KEPT_BYTES]
        self._parts.append(data)
        self._kept += len(data)
        if self._kept > 2 * KEPT_BYTES:
            tail = b"".join(self._parts)[-KEPT_BYTES:]
            self._parts = [tail]
            self._kept = len(tail)

    @property
    def last(self) -> bytes:
        tail = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        return tail[-KEPT_BYTES:] if len(tail) > KEPT_BYTES else tail

    def usage(self) -> Usage:
        return read_usage(self.first, self.last)
