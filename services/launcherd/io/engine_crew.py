"""Carries out what the slot table wants done to engines; every ending comes back as a stimulus.

One task per slot that loads, runs or stops. The table never waits for any of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from services.launcherd.command_line import Engine, EngineOptions
from services.launcherd.io.engine import EngineProcess, Progress
from services.launcherd.io.engine_records import EngineRecord, EngineRecords
from services.launcherd.io.launch import launch_engine
from services.launcherd.io.process import ProcessIdentity, family
from services.launcherd.model_info import readiness_timeout_seconds
from services.launcherd.slot_events import (
    EngineEndpoint,
    EngineExited,
    EngineFailed,
    EngineHealthy,
    EngineHung,
    EngineLoading,
    EngineReady,
    EngineStopped,
    StartEngine,
    Stimulus,
)
from shared.errors import LoadFailed
from shared.ids import SlotId
from shared.io import log
from shared.io.drive import Tasks
from shared.recipes import Recipe

STOP_GRACE_SECONDS = 5.0
LAST_WORDS_LINES = 4
WORKING_CPU_SHARE = 0.2
"""A silent engine that uses this share of a core is computing, not hung: a long prompt on a slow CPU."""
WORKING_LIMIT = 40
"""…for at most so many times `hang_seconds`: an endless loop computes as well."""

FindEngine = Callable[[EngineOptions], Engine]


class EngineCrew:
    """All engine processes of this node. Create it inside the running loop."""

    def __init__(self, folder: Path, post: Callable[[Stimulus], None], tasks: Tasks) -> None:
        self.records = EngineRecords(folder)
        self._folder = folder
        self._post = post
        self._tasks = tasks
        self._launches: dict[SlotId, asyncio.Task[None]] = {}
        self._processes: dict[SlotId, EngineProcess] = {}
        self._stopping: set[SlotId] = set()

    def log_path(self, slot_id: SlotId) -> Path:
        return self._folder / f"{slot_id}.log"

    def start(self, effect: StartEngine, find: FindEngine, recipe: Recipe, *, least_readiness_seconds: float) -> None:
        """Ends in `EngineReady` or `EngineFailed`. `find` may block, and raise EngineMissing."""
        name = f"launch of {effect.slot_id}"
        task = self._tasks.start(self._launch(effect, find, recipe, least_readiness_seconds), name)
        self._launches[effect.slot_id] = task

    def stop(self, slot_id: SlotId) -> None:
        """Ends in `EngineStopped`, whatever the engine was doing."""
        self._stopping.add(slot_id)
        self._tasks.start(self._stop(slot_id), f"stop of {slot_id}")

    def probe(self, slot_id: SlotId, hang_seconds: float) -> None:
        """Ends in `EngineHealthy` or `EngineHung`, or in the engine's exit."""
        process = self._processes.get(slot_id)
        if process is not None:
            self._tasks.start(self._probe(slot_id, process, hang_seconds), f"probe of {slot_id}")

    async def adopt(self, record: EngineRecord, recipes: Mapping[str, Recipe]) -> EngineEndpoint | None:
        """Take over an engine of an earlier launcherd if it is healthy."""
        process = await self.records.adopt(record, recipes=recipes)
        if process is None:
            return None
        slot_id = SlotId(record.engine_id)
        self._processes[slot_id] = process
        return _endpoint(process)

    def watch(self, slot_id: SlotId) -> None:
        """Report the exit of an adopted engine from now on."""
        self._tasks.start(self._watch(slot_id, self._processes[slot_id]), f"watch of {slot_id}")

    async def stop_all(self) -> None:
        """The node goes down: end every engine, all at the same time."""
        launches = list(self._launches.values())
        for task in launches:
            task.cancel()
        await asyncio.gather(*launches, return_exceptions=True)
        processes = dict(self._processes)
        results = await asyncio.gather(
            *(process.stop(STOP_GRACE_SECONDS) for process in processes.values()), return_exceptions=True
        )
        for slot_id, result in zip(processes, results, strict=True):
            if isinstance(result, BaseException):
                log.error("engine_not_stopped", slot=slot_id, reason=str(result))
            else:
                self._forget(slot_id)

    async def sweep(self, record: EngineRecord) -> bool:
        """End what is left of an engine that is not to be adopted. True if a process was running."""
        return await self.records.sweep(record, STOP_GRACE_SECONDS)

    # -- tasks -----------------------------------------------------------------------------------------------

    async def _launch(
        self, effect: StartEngine, find: FindEngine, recipe: Recipe, least_readiness_seconds: float
    ) -> None:
        slot_id, file = effect.slot_id, effect.model.file
        loop = asyncio.get_running_loop()
        started = loop.time()
        phase = ""

        def tell(progress: Progress) -> None:
            nonlocal phase
            if progress.phase != phase:
                phase = progress.phase
                self._post(EngineLoading(slot_id=slot_id, phase=phase))

        try:
            process, _ = await launch_engine(
                await asyncio.to_thread(find, effect.options),
                file,
                effect.options,
                engine_id=slot_id,
                records=self.records,
                log_path=self.log_path(slot_id),
                environ=os.environ,
                ready_timeout_seconds=readiness_timeout_seconds(effect.model.size_bytes, least_readiness_seconds),
                on_progress=tell,
                recipe=recipe,
                checkpoint=effect.model.checkpoint,
                projector=effect.model.projector,
            )
        except LoadFailed as error:
            self._post(EngineFailed(slot_id=slot_id, code=error.code, detail=error.detail))
            return
        finally:
            self._launches.pop(slot_id, None)
        self._processes[slot_id] = process
        self._post(
            EngineReady(slot_id=slot_id, endpoint=_endpoint(process), load_seconds=round(loop.time() - started, 3))
        )
        self.watch(slot_id)

    async def _watch(self, slot_id: SlotId, process: EngineProcess) -> None:
        status = await process.wait_exited()
        if slot_id in self._stopping:
            return
        self._forget(slot_id)
        words = await asyncio.to_thread(process.log_tail, LAST_WORDS_LINES)
        self._post(EngineExited(slot_id=slot_id, how=str(status), last_words=" | ".join(words)))

    async def _stop(self, slot_id: SlotId) -> None:
        launch = self._launches.pop(slot_id, None)
        if launch is not None:
            launch.cancel()
            await asyncio.wait([launch])
        process = self._processes.get(slot_id)
        while process is not None:
            try:
                await process.stop(STOP_GRACE_SECONDS)
                break
            except LoadFailed as error:
                # Its memory is still taken: the slot stays until the kernel lets go of it.
                log.error("engine_not_stopped", slot=slot_id, pid=process.pid, reason=error.detail)
        self._forget(slot_id)
        self._stopping.discard(slot_id)
        self._post(EngineStopped(slot_id=slot_id))

    async def _probe(self, slot_id: SlotId, process: EngineProcess, hang_seconds: float) -> None:
        silent_seconds = 0.0
        while True:
            before = _cpu_seconds(process.identity)
            if await process.probe(hang_seconds):
                self._post(EngineHealthy(slot_id=slot_id))
                return
            if slot_id in self._stopping or not process.is_alive():
                return
            silent_seconds += hang_seconds
            working = _cpu_seconds(process.identity) - before >= WORKING_CPU_SHARE * hang_seconds
            if not working or silent_seconds >= WORKING_LIMIT * hang_seconds:
                detail = f"no answer for {silent_seconds:.3g} s"
                self._post(EngineHung(slot_id=slot_id, detail=detail))
                return

    def _forget(self, slot_id: SlotId) -> None:
        process = self._processes.pop(slot_id, None)
        if process is not None:
            process.release()
        try:
            self.records.remove(slot_id)
        except OSError as error:
            log.warning("record_not_removed", slot=slot_id, reason=str(error))


def _endpoint(process: EngineProcess) -> EngineEndpoint:
    address = process.address
    return EngineEndpoint(
        pid=process.pid,
        port=address.port,
        base_url=f"http://{address.host}:{address.port}",
        api_key=address.api_key,
        log_path=str(process.log_path),
    )


def _cpu_seconds(leader: ProcessIdentity) -> float:
    """CPU time so far of an engine, which may be the child of a wrapper script; what is gone counts nothing."""
    seconds = 0.0
    for member in (leader, *family(leader)):
        try:
            times = psutil.Process(member.pid).cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system
    return seconds


def unused_logs(folder: Path, kept: Sequence[str]) -> list[str]:
    """Engine logs in `folder` that are not in `kept`. Blocking."""
    names = {Path(path).name for path in kept}
    return [str(path) for path in folder.glob("*.log") if path.name not in names]


def remove_logs(paths: Sequence[str]) -> None:
    """Remove logs and what was kept of them when they grew too long. Blocking."""
    for path in paths:
        for file in (Path(path), Path(f"{path}.1")):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("log_not_removed", path=str(file), reason=error.strerror)
