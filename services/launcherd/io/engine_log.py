"""One log file per engine. The engine writes it itself, so that it needs no launcherd to live; we keep it small."""

from __future__ import annotations

import os
from pathlib import Path

LOG_LIMIT_BYTES = 8 << 20
KEPT_BYTES = 1 << 20
"""How much of a log that grew too long is kept, in the file with `.1` at its end."""
TAIL_BYTES = 1 << 16


def open_log(path: Path) -> int:
    """An empty log, 0600, as a descriptor for the engine; an older one keeps the name with `.1`. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(_older(path))
    # Appending: after a truncation the engine goes on at the new end instead of leaving a hole.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)


def trim_log(path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> bool:
    """Empties a log that is longer than the limit, keeping its end in the `.1` file. Blocking; True if it did."""
    try:
        size = path.stat().st_size
        if size <= limit_bytes:
            return False
        with open(path, "rb") as file:
            file.seek(max(0, size - KEPT_BYTES))
            kept = file.read()
        older = _older(path)
        older.touch(mode=0o600)
        older.write_bytes(kept[kept.find(b"\n") + 1 :])
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def log_tail(path: Path, lines: int) -> tuple[str, ...]:
    """The last non-empty lines, at most 64 KiB of them; empty when there is no log."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    found = text.split("\n")
    if start > 0:
        found = found[1:]
    shown = ["".join(c if c.isprintable() or c == "\t" else "�" for c in line.rstrip()) for line in found]
    return tuple([line for line in shown if line][-lines:]) if lines > 0 else ()


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")
