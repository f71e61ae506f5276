"""Brings one model up: a record first, then the process, then a first answer; all of it or nothing.

Source: DESIGN §2, §7; TRAPS 28, 30, 32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from services.launcherd.command_line import Engine, EngineOptions, build_command, fingerprint
from services.launcherd.io.engine import EngineProcess, OnProgress, free_port, new_api_key, start_engine
from services.launcherd.io.engine_records import EngineRecord, EngineRecords, with_identity
from services.launcherd.model_info import ModelFile
from shared.errors import EnginePortTaken, StateNotWritable
from shared.recipes import BUILTIN_RECIPES, LLAMACPP, Recipe

PORT_ATTEMPTS = 5


async def launch_engine(
    engine: Engine,
    model: ModelFile,
    options: EngineOptions,
    *,
    engine_id: str,
    records: EngineRecords,
    log_path: Path,
    environ: Mapping[str, str],
    ready_timeout_seconds: float,
    on_progress: OnProgress | None = None,
    recipe: Recipe = BUILTIN_RECIPES[LLAMACPP],
    checkpoint: str = "",
    projector: str = "",
) -> tuple[EngineProcess, EngineRecord]:
    """A ready engine with `resolve_options` options, and its record, which is on disk.

    Another port is tried when one was taken. After a failure, and when it is cancelled, no process and no record
    is left. Raises: LoadFailed of the kind that fits.
    """
    for attempt in range(1, PORT_ATTEMPTS + 1):
        command = build_command(
            engine,
            model,
            options,
            port=free_port(),
            api_key=new_api_key(),
            environ=environ,
            mark=str(records.path(engine_id)),
            recipe=recipe,
            checkpoint=checkpoint,
            projector=projector,
        )
        record = EngineRecord(
            engine_id=engine_id,
            model_name=model.name,
            model_type=model.type,
            model_parts=model.parts,
            host=command.host,
            port=command.port,
            api_key=command.api_key,
            parallel=options.parallel,
            context_tokens=options.context_tokens,
            argv=command.argv,
            options_fingerprint=fingerprint(engine, model, options),
            log_path=str(log_path),
            recipe=recipe.name,
        )
        process: EngineProcess | None = None
        try:
            _save(records, record)
            process = await start_engine(command, log_path)
            record = with_identity(record, process.identity)
            _save(records, record)
            await process.wait_ready(ready_timeout_seconds, on_progress)
        except EnginePortTaken:
            await _undo(process, records, engine_id)
            if attempt == PORT_ATTEMPTS:
                raise
        except BaseException:
            # Cancelled, too: whoever gave up on this load must not find its engine later.
            await asyncio.shield(_undo(process, records, engine_id))
            raise
        else:
            return process, record
    raise AssertionError("the last attempt returns or raises")


async def _undo(process: EngineProcess | None, records: EngineRecords, engine_id: str) -> None:
    if process is not None:
        await process.stop(grace_seconds=1.0)
    try:
        records.remove(engine_id)
    except OSError:
        pass  # The load's own error matters more; a record without a process is swept at the next start.


def _save(records: EngineRecords, record: EngineRecord) -> None:
    try:
        records.save(record)
    except OSError as error:
        raise StateNotWritable(
            f"the engine's record {records.path(record.engine_id)} cannot be written: {error.strerror or error}; "
            "free space on that disk or make the folder writable"
        ) from error
