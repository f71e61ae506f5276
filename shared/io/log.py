"""One structured line per effect on stdout; supervisord keeps and rotates it.

``2026-11-20T23:50:00.123Z info event=model_ready model=qwen slot=3f1c reason="loaded in 2.1 s"``
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from typing import Any, TextIO

_stream: TextIO = sys.stdout


def use_stream(stream: TextIO) -> None:
    """Log elsewhere: the keeper's stdout belongs to supervisord's event protocol."""
    global _stream
    _stream = stream


def format_fields(fields: dict[str, Any]) -> str:
    """``key=value`` pairs; a value with blanks, quotes or line breaks is quoted and stays on one line."""
    parts = []
    for key, value in fields.items():
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        if not text or any(char.isspace() or char in "\"'=\\" or not char.isprintable() for char in text):
            escaped = "".join(
                char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
            ).replace('"', "'")
            text = f'"{escaped}"'
        parts.append(f"{key}={text}")
    return " ".join(parts)


def _write(level: str, event: str, fields: dict[str, Any]) -> None:
    now = datetime.datetime.now(datetime.UTC)
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.") + f"{now.microsecond // 1000:03d}Z"
    _put(f"{stamp} {level} {format_fields({'event': event, **fields})}\n")


def _put(line: str) -> None:
    try:
        try:
            _stream.write(line)
        except UnicodeEncodeError:
            _stream.write(line.encode("ascii", "backslashreplace").decode())
        _stream.flush()
    except (OSError, ValueError):
        # A full disk or a vanished supervisord must not take the daemon down with its log.
        return


def info(event: str, **fields: Any) -> None:
    _write("info", event, fields)


def warning(event: str, **fields: Any) -> None:
    _write("warning", event, fields)


def error(event: str, **fields: Any) -> None:
    _write("error", event, fields)


def ready(daemon: str, **fields: Any) -> None:
    """The bare line ``NAME ready`` that scripts wait for, and the same as a log line."""
    _put(f"{daemon} ready\n")
    info("ready", daemon=daemon, **fields)


class LogOnce:
    """Logs the first occurrence of a key and then each doubling of its count, so that a flood stays readable."""

    def __init__(self, write: Callable[..., None] = warning) -> None:
        self._write = write
        self._counts: dict[str, int] = {}

    def __call__(self, key: str, event: str, **fields: Any) -> None:
        if len(self._counts) > 1000:
            self._counts.clear()
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count & (count - 1) == 0:
            self._write(event, count=count, **fields)
