"""Token counts and speed from the end of an engine's answer, read once, after the last byte was forwarded.

A small answer is parsed as the JSON it is. Of streams and large answers the first and last few kilobytes are searched,
so that it costs the same whatever their size and needs no stream parser. A quoted ``\\"usage\\":`` inside generated
text is escaped in JSON and therefore never matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

KEPT_BYTES = 16 * 1024
"""llama.cpp's last event with usage and timings is under 2 KB."""
PARSED_BYTES = 4 * 1024
"""Up to here parsing (1 µs for a short chat answer) is cheaper than searching."""

_FIELD = re.compile(
    rb'"((?:prompt|completion|cached|(?:cache_read_|cache_creation_)?input|output)_tokens|(?:prompt|cache|predicted)_n|'
    rb"prompt_ms|predicted_per_second)\"\s*:\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
)

Numbers = dict[str, Any]
"""What an answer says under the names that matter; other values may be anything."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the engine counted; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_per_second: float | None = None
    cached_tokens: int | None = None
    """Those of the prompt that were not computed again."""
    prompt_seconds: float | None = None
    """The engine's own time for the prompt."""


NOTHING = Usage()
_LARGEST = 1e15
"""No count is larger; infinity is no integer."""


def read_usage(first: bytes, last: bytes) -> Usage:
    """``first`` and ``last``: how the body begins and ends; ``first`` matters only to Anthropic streams, whose
    prompt tokens come with the first event."""
    if first is last and len(last) <= PARSED_BYTES and last.startswith(b"{"):
        return _parsed(last)
    usage_at = last.rfind(b'"usage"')
    timings_at = last.rfind(b'"timings"')
    if usage_at < 0 and timings_at < 0:
        return NOTHING
    found = _fields(last, min(at for at in (usage_at, timings_at) if at >= 0))
    return _usage(found, _fields(first, max(0, first.find(b'"usage"'))) if first is not last else found)


def _parsed(body: bytes) -> Usage:
    try:
        answer = from_json(body)
    except ValueError:
        return NOTHING
    found: Numbers = {}
    for key in ("usage", "timings"):
        part = answer.get(key)
        if isinstance(part, dict):
            found.update(part)
    if "cache_n" not in found:
        details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
        if isinstance(details, dict):
            found["cached_tokens"] = details.get("cached_tokens")
    return _usage(found, found) if found else NOTHING


def _usage(found: Numbers, first: Numbers) -> Usage:
    prompt = _number(found, "prompt_tokens")
    if prompt is None:
        prompt = _input_tokens(found)
    if prompt is None:
        fresh = _number(found, "prompt_n")
        prompt = _input_tokens(first) if fresh is None else fresh + (_number(found, "cache_n") or 0)
    completion = None
    for key in ("completion_tokens", "output_tokens", "predicted_n"):
        completion = _number(found, key)
        if completion is not None:
            break
    cached = _number(found, "cache_n")
    if cached is None:
        cached = _number(found, "cached_tokens")
    if cached is None:
        cached = _number(found if "cache_read_input_tokens" in found else first, "cache_read_input_tokens")
    prompt_milliseconds = _number(found, "prompt_ms")
    return Usage(
        prompt_tokens=None if prompt is None else int(prompt),
        completion_tokens=None if completion is None else int(completion),
        tokens_per_second=_number(found, "predicted_per_second") or None,
        cached_tokens=None if cached is None else int(cached),
        prompt_seconds=None if prompt_milliseconds is None else prompt_milliseconds / 1000,
    )


def _input_tokens(found: Numbers) -> float | None:
    """Anthropic counts what came from the cache apart; here a prompt's tokens are all of them."""
    fresh = _number(found, "input_tokens")
    if fresh is None:
        return fresh
    cached = (_number(found, "cache_read_input_tokens"), _number(found, "cache_creation_input_tokens"))
    return fresh + sum(count for count in cached if count is not None)


def _number(found: Numbers, key: str) -> float | None:
    value = found.get(key)
    return value if isinstance(value, (int, float)) and value < _LARGEST else None


def _fields(text: bytes, start: int) -> Numbers:
    return {key.decode("ascii"): float(value) for key, value in _FIELD.findall(text, start)}


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
