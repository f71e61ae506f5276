"""What a restarted launcherd must know, in one small file under the state directory, replaced atomically."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from services.launcherd.slot_events import Memory
from shared.ids import ModelName

LOGS_LIMIT = 50
"""Models whose newest engine log is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The file's content. `logs` is the newest engine log of each model, newest last; `run` the node's start."""

    memory: Memory = field(default_factory=Memory)
    logs: dict[ModelName, str] = field(default_factory=dict)
    run: str = ""


_ADAPTER = TypeAdapter(Written)


class MemoryFile:
    """Reads once, writes often: a write is one small file without a sync, since only launcherd's own death counts."""

    def __init__(self, path: Path, run: str = "") -> None:
        """`run` names this start of the whole node: a model unloaded by hand is declined until the next one."""
        self._path = path
        self._run = run
        self._memory = Memory()
        self._logs: OrderedDict[ModelName, str] = OrderedDict()

    def read(self) -> Memory:
        """What was written last. Nothing yet: an empty memory. Unreadable: an incomplete one."""
        try:
            written = _ADAPTER.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return self._memory
        except (OSError, ValidationError):
            return Memory(complete=False)
        same_run = written.run == self._run
        self._memory = written.memory if same_run else replace(written.memory, declined={}, limits_set=())
        self._logs = OrderedDict(written.logs)
        return self._memory

    def write(self, memory: Memory) -> None:
        """Raises: OSError."""
        self._memory = memory
        self._save()

    def log_of(self, model: ModelName) -> str:
        """Path of the model's newest engine log; empty if there was none."""
        return self._logs.get(model, "")

    def logs(self) -> tuple[str, ...]:
        """Every log that is some model's newest."""
        return tuple(self._logs.values())

    def new_log(self, model: ModelName, path: str) -> list[str]:
        """An engine writes a new log; returns paths of logs that are nobody's newest any more. Raises: OSError."""
        dropped = [old] if (old := self._logs.pop(model, "")) and old != path else []
        self._logs[model] = path
        while len(self._logs) > LOGS_LIMIT:
            dropped.append(self._logs.popitem(last=False)[1])
        self._save()
        return dropped

    def _save(self) -> None:
        data = _ADAPTER.dump_json(Written(memory=self._memory, logs=dict(self._logs), run=self._run))
        temporary = self._path.with_name(f".{self._path.name}.new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(self._path)
