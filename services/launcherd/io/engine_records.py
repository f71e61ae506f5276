"""What launcherd wrote down about its engines, for the launcherd that comes after it.

One JSON file per engine, 0600 because the engine's key is in it, replaced atomically. A record is written before
its process is started and again with the process's identity; every engine process carries its record's path in
its environment, so that one started in between is found too. Nothing is orphaned, nothing foreign is touched.

Source: DESIGN §2 (engines outlive launcherd); PLUMBING §3.5; TRAPS 31, 32.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from services.launcherd.command_line import ENGINE_MARK
from services.launcherd.io.engine import KILL_SECONDS, EngineProcess
from services.launcherd.io.engine_http import EngineAddress
from services.launcherd.io.process import (
    ExitWatch,
    ProcessIdentity,
    is_alive,
    marked_processes,
    send_signal,
    signal_family,
)
from shared.messages.models import MODEL_TYPES, ModelType
from shared.recipes import BUILTIN_RECIPES, LLAMACPP, Recipe

ADOPT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine as it was started. `identity` is None between the decision to start it and its pid."""

    engine_id: str
    identity: ProcessIdentity | None = None
    model_name: str
    model_type: ModelType
    model_parts: tuple[str, ...]
    host: str
    port: int
    api_key: str
    parallel: int
    context_tokens: int
    argv: tuple[str, ...]
    options_fingerprint: str
    log_path: str
    recipe: str = LLAMACPP

    def __repr__(self) -> str:
        """Without the key: records end up in log lines."""
        return f"EngineRecord({self.engine_id}, model={self.model_name}, pid={self.pid}, port={self.port})"

    @property
    def pid(self) -> int:
        return self.identity.pid if self.identity is not None else 0


@dataclass(frozen=True, slots=True)
class Dropped:
    """A record file that was removed, and why."""

    path: str
    reason: str


class EngineRecords:
    """The folder of records. Calls are short and blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, engine_id: str) -> Path:
        """The record's file, which is also the mark its process carries."""
        return self._folder / f"{engine_id}.json"

    def save(self, record: EngineRecord) -> None:
        """Raises: OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path(record.engine_id)
        temporary = path.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(record), file)
        temporary.replace(path)

    def remove(self, engine_id: str) -> None:
        """Forgets a record; nothing happens if there is none. Raises: OSError."""
        self.path(engine_id).unlink(missing_ok=True)

    def load(self) -> tuple[tuple[EngineRecord, ...], tuple[Dropped, ...]]:
        """Every readable record. Broken ones are removed, after any process that carries their mark was killed."""
        records, dropped = [], []
        for path in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
            try:
                record = _read_record(json.loads(path.read_bytes()))
                if record.engine_id != path.stem:
                    raise ValueError(f"it is the record of {record.engine_id}")
                records.append(record)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                for identity, _ in marked_processes(ENGINE_MARK, str(path)):
                    send_signal(identity, signal.SIGKILL)
                path.unlink(missing_ok=True)
                dropped.append(Dropped(str(path), f"broken engine record: {type(error).__name__}: {error}"))
        for leftover in self._folder.glob("*.tmp") if self._folder.is_dir() else ():
            leftover.unlink(missing_ok=True)
        return tuple(records), tuple(dropped)

    async def adopt(
        self,
        record: EngineRecord,
        timeout_seconds: float = ADOPT_SECONDS,
        recipes: Mapping[str, Recipe] = BUILTIN_RECIPES,
    ) -> EngineProcess | None:
        """The recorded engine if it is alive, healthy and knows our key; else None: sweep it."""
        recipe = recipes.get(record.recipe)
        identity = record.identity
        if recipe is None or identity is None or not is_alive(identity):
            return None
        engine = EngineProcess(
            identity,
            EngineAddress(host=record.host, port=record.port, api_key=record.api_key),
            model_parts=record.model_parts,
            log_path=Path(record.log_path),
            recipe=recipe,
        )
        if await engine.accepts_key(timeout_seconds) and engine.is_alive():
            return engine
        engine.release()
        return None

    async def sweep(self, record: EngineRecord, grace_seconds: float = 2.0) -> bool:
        """Ends whatever is left of a recorded engine and removes the record. True if a process was running.

        Raises: OSError when the record cannot be removed.
        """
        leftovers = await asyncio.to_thread(self._processes, record)
        deadline = asyncio.get_running_loop().time() + grace_seconds
        for number, until in ((signal.SIGTERM, deadline), (signal.SIGKILL, deadline + KILL_SECONDS)):
            for identity in leftovers:
                signal_family(identity, number)
                if number == signal.SIGTERM:
                    signal_family(identity, signal.SIGCONT)
            await _until_gone(leftovers, until)
        # A wrapper's children may have left its session, or have been started while it was ended.
        late = await asyncio.to_thread(self._processes, record)
        for identity in late:
            send_signal(identity, signal.SIGKILL)
        await _until_gone(late, deadline + 2 * KILL_SECONDS)
        self.remove(record.engine_id)
        return bool(leftovers)

    def sweep_strays(self) -> int:
        """Kills processes that carry the mark of a record that does not exist; returns how many. Blocking."""
        killed = 0
        for identity, mark in marked_processes(ENGINE_MARK, f"{self._folder}/"):
            killed += not os.path.exists(mark) and send_signal(identity, signal.SIGKILL)
        return killed

    def _processes(self, record: EngineRecord) -> list[ProcessIdentity]:
        mark = str(self.path(record.engine_id))
        found = [identity for identity, _ in marked_processes(ENGINE_MARK, mark)]
        if record.identity is not None and is_alive(record.identity) and record.identity not in found:
            found.append(record.identity)
        return found


def with_identity(record: EngineRecord, identity: ProcessIdentity) -> EngineRecord:
    """The record of a process that has started."""
    return replace(record, identity=identity)


async def _until_gone(identities: Sequence[ProcessIdentity], deadline: float) -> None:
    loop = asyncio.get_running_loop()
    gone = [loop.create_future() for _ in identities]
    watches = [ExitWatch(identity, future.set_result) for identity, future in zip(identities, gone, strict=True)]
    if gone:
        await asyncio.wait(gone, timeout=max(0.0, deadline - loop.time()))
    for watch in watches:
        watch.close()


def _read_record(raw: Any) -> EngineRecord:
    """Raises: ValueError, KeyError, TypeError for anything but what `save` wrote."""
    identity = raw["identity"]
    record = EngineRecord(
        engine_id=_text(raw["engine_id"]),
        identity=None
        if identity is None
        else ProcessIdentity(_number(identity["pid"]), _number(identity["start_time"]), _text(identity["boot_id"])),
        model_name=_text(raw["model_name"]),
        model_type=raw["model_type"],
        model_parts=tuple(_text(part) for part in raw["model_parts"]),
        host=_text(raw["host"]),
        port=_number(raw["port"]),
        api_key=_text(raw["api_key"]),
        parallel=_number(raw["parallel"]),
        context_tokens=_number(raw["context_tokens"]),
        argv=tuple(_text(argument) for argument in raw["argv"]),
        options_fingerprint=_text(raw["options_fingerprint"]),
        log_path=_text(raw["log_path"]),
        recipe=_text(raw.get("recipe", LLAMACPP)),
    )
    if record.model_type not in MODEL_TYPES or not 0 < record.port < 65_536:
        raise ValueError(f"model type {record.model_type!r}, port {record.port}")
    if record.identity is not None and record.identity.pid < 2:
        raise ValueError(f"pid {record.pid}")
    return record


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text expected, not {value!r}")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"number expected, not {value!r}")
    return value
