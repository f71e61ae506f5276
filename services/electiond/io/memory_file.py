"""``state/elections.json``: what a restart of electiond alone must not forget.

It belongs to one run of the node: a node that was down starts afresh, so the file names the supervisord it is from.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from services.electiond.stimuli import NO_MEMORY, Memory
from shared.ids import ModelName
from shared.io import log


def this_run() -> str:
    """The supervisord that started this process: its pid and, where /proc has it, when it started.

    In a container supervisord has the same pid every time.
    """
    parent = os.getppid()
    try:
        stat = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
        return f"{parent}-{stat.rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return str(parent)


class MemoryFile:
    """``run`` identifies this run of the node (its supervisord)."""

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run

    def load(self) -> Memory:
        """The memory of this run; empty when there is none, or the file is damaged (it costs only a placement)."""
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
            if value["run"] != self._run:
                return NO_MEMORY
            declined = tuple((ModelName(str(name)), str(reason)) for name, reason in value["declined"])
            named = tuple(ModelName(str(name)) for name in value["named"])
            return Memory(declined=declined, held_by_owner=bool(value["held_by_owner"]), named=named)
        except FileNotFoundError:
            return NO_MEMORY
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("memory_lost", path=self._path, reason=error)
            return NO_MEMORY

    def save(self, memory: Memory) -> None:
        """A full disk costs only a placement after the next restart: it is logged."""
        text = json.dumps(
            {
                "run": self._run,
                "declined": memory.declined,
                "held_by_owner": memory.held_by_owner,
                "named": memory.named,
            }
        )
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            log.warning("memory_not_saved", path=self._path, reason=error.strerror or error)
