"""Token counts and speed from the end of an engine's answer, read once, after the last byte was forwarded.

Works on the first and last few kilobytes, so that it costs the same for any answer and needs no stream parser. A
quoted ``\\"usage\\":`` inside generated text is escaped in JSON and therefore never matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

KEPT_BYTES = 16 * 1024
"""llama.cpp's last event with usage and timings is under 2 KB."""

_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_TIMINGS = re.compile(rb'"timings"\s*:\s*\{')
_NUMBER = re.compile(rb'"(\w+)"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)')


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
    if b'"usage"' not in last and b'"timings"' not in last:
        return NOTHING
    usage = _last_numbers(_USAGE, last)
    timings = _last_numbers(_TIMINGS, last)
    prompt = usage.get(b"prompt_tokens", usage.get(b"input_tokens"))
    if prompt is None and timings:
        prompt = timings.get(b"prompt_n", 0.0) + timings.get(b"cache_n", 0.0)
    if prompt is None and first:
        prompt = _last_numbers(_USAGE, first).get(b"input_tokens")
    completion = usage.get(b"completion_tokens", usage.get(b"output_tokens", timings.get(b"predicted_n")))
    speed = timings.get(b"predicted_per_second")
    return Usage(
        prompt_tokens=None if prompt is None else int(prompt),
        completion_tokens=None if completion is None else int(completion),
        tokens_per_second=speed if speed is not None and speed > 0 else None,
    )


def _last_numbers(pattern: re.Pattern[bytes], text: bytes) -> dict[bytes, float]:
    """The numbers of the last object that ``pattern`` finds, nested ones (details) not overriding outer ones."""
    match = None
    for found in pattern.finditer(text):
        match = found
    if match is None:
        return {}
    numbers: dict[bytes, float] = {}
    end = _object_end(text, match.end())
    for key, value in _NUMBER.findall(text, match.end(), end):
        numbers.setdefault(key, float(value))
    return numbers


def _object_end(text: bytes, start: int) -> int:
    depth = 1
    for brace in re.finditer(rb"[{}]", text[start : start + 2048]):
        depth += 1 if brace[0] == b"{" else -1
        if depth == 0:
            return start + brace.start()
    return len(text)


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
