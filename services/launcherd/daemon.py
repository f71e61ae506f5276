"""launcherd's shell: bus in, slot table in the middle, engines out. It decides nothing.

Start: the memory and the engine records of the launcherd before are read, its healthy engines adopted, the rest swept;
only then the bus is bound, so that nobody ever sees a launcherd that has forgotten its engines.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import psutil

from services.launcherd.io.device import measure_device
from services.launcherd.io.engine_binary import Installed, find_installed, look_for_programs
from services.launcherd.io.engine_crew import EngineCrew, remove_logs, unused_logs
from services.launcherd.io.engine_log import log_tail
from services.launcherd.io.engine_records import EngineRecord
from services.launcherd.io.library import LOOK_SECONDS
from services.launcherd.io.memory_file import MemoryFile
from services.launcherd.io.model_store import ModelStore
from services.launcherd.io.npu import find_npus
from services.launcherd.model_names import find_name
from services.launcherd.options import listed_options
from services.launcherd.slot_events import (
    AcquireAsked,
    AssignmentsGiven,
    CallerGone,
    ConfigApplied,
    CreditsReported,
    CreditsReturned,
    Effect,
    EngineAdopted,
    EngineFailed,
    EngineHealthy,
    KnownModel,
    LimitsAsked,
    LoadAsked,
    Memory,
    PinAsked,
    ProbeEngine,
    Publish,
    Remember,
    Reply,
    ReplyToken,
    SlotMemory,
    StartEngine,
    Stimulus,
    StopEngine,
    SuspicionRaised,
    UnloadAsked,
    WithdrawAsked,
)
from services.launcherd.slot_view import explain, snapshot, state_line
from services.launcherd.slots import SlotTable
from shared import codec
from shared.config import NodeConfig, changed_keys, load_config
from shared.errors import RequestRefused
from shared.ids import HolderId, ModelName, SlotId
from shared.io import log
from shared.io.bus import BusServer, Mirror
from shared.io.drive import Drive, Tasks, Tick
from shared.io.fresh_ids import new_boot_id
from shared.io.lifecycle import StopSignal, environment
from shared.messages.daemon import ConfigReloaded, Done, ExplainSubject, Explanation, Refused, ReloadConfig, StoryEntry
from shared.messages.downloads import CancelPull, DeleteModel, PullModel
from shared.messages.leases import (
    AcquireLease,
    EngineSuspected,
    LeaseGranted,
    ReportCredits,
    ReturnCredits,
    WithdrawAcquire,
)
from shared.messages.models import (
    AssignmentsChanged,
    EngineLog,
    GetEngineLog,
    LoadModel,
    PinModel,
    RescanModels,
    SetMaxLoadedModels,
    SlotChanged,
    UnloadModel,
)
from shared.paths import NodePaths
from shared.recipes import BUILTIN_RECIPES, LLAMACPP

NAME = "launcherd"
OWN_SECTIONS = ("node.", "models.", "engine.", "recipes.")
MEASURED_KEYS = ("node.", "engine.path", "engine.backend", "recipes.")
LOG_LINES_LIMIT = 2_000
CLIENT_WORDS = (
    "this node is a client (node.client in mesh.toml), it loads nothing itself; name another one with --node, or run "
    "'meshctl up --no-client'"
)
RESCAN_SECONDS = 1.0
"""A request for an unknown model looks at the folders again, but not more often."""


Asking = Callable[[ReplyToken], Stimulus]


class Launcher:
    """Binds the slot table to this node's bus, folders and engines."""

    def __init__(self, paths: NodePaths, config: NodeConfig, memory: Memory, file: MemoryFile, tasks: Tasks) -> None:
        self.paths = paths
        self.config = config
        self.file = file
        self.tasks = tasks
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        self.table = SlotTable(config, cores=cores, prefix=new_boot_id()[:8], memory=memory)
        self.drive: Drive[Stimulus, Effect] = Drive(
            self.table, self.perform, quiet=(Tick, CreditsReported, CreditsReturned, EngineHealthy)
        )
        self.store = ModelStore(
            paths, config, tasks, post=self.drive.post, publish=self._publish, unload=self._unload
        )
        self.library = self.store.library
        self.crew = EngineCrew(paths.engines, self._engine_news, tasks)
        self.bus: BusServer | None = None
        self.installed = Installed()
        self._measured = asyncio.Event()
        self._tokens = itertools.count(1)
        self._replies: dict[ReplyToken, asyncio.Future[codec.Message]] = {}
        self._told: dict[SlotId, str] = {}
        # electiond's word. It forgets a client's assignments by itself; unloading before that would decline them.
        self._nothing_assigned = False
        self._rescanned_at = -RESCAN_SECONDS

    # -- what the bus asks of every daemon -------------------------------------------------------------------

    def state_line(self) -> str:
        return state_line(self.table.book)

    def snapshot(self) -> Iterable[codec.Message]:
        self.table.book.now = asyncio.get_running_loop().time()
        return (*snapshot(self.table.book), *self.store.snapshot())

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        now = asyncio.get_running_loop().time()
        entries = (*self.drive.story(limit, now), *self.store.story(limit, now))
        return tuple(sorted(entries, key=lambda entry: -entry.age_seconds)[-limit:])

    # -- effects ---------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        match effect:
            case StartEngine(slot_id=slot_id, model=model):
                self._start(effect)
                log.info("engine_starts", slot=slot_id, model=model.name)
            case StopEngine(slot_id=slot_id, reason=reason):
                self.crew.stop(slot_id)
                log.info("engine_stops", slot=slot_id, reason=reason)
            case ProbeEngine(slot_id=slot_id):
                self.crew.probe(slot_id, self.config.engine.hang_seconds)
            case Reply():
                self._reply(effect)
            case Publish(message=message):
                self._publish(message)
                if isinstance(message, SlotChanged):
                    self._tell(message)
            case Remember(memory=memory):
                try:
                    self.file.write(memory)
                except OSError as error:
                    log.error("memory_not_written", reason=str(error))

    def _publish(self, message: codec.Message) -> None:
        if self.bus is not None:
            self.bus.publish(message)

    def _start(self, effect: StartEngine) -> None:
        slot_id, name = effect.slot_id, effect.model.name
        try:
            dropped = self.file.new_log(name, str(self.crew.log_path(slot_id)))
        except OSError as error:
            log.error("memory_not_written", reason=str(error))
            dropped = []
        self.tasks.start(asyncio.to_thread(remove_logs, dropped), "old logs")
        recipe = self.config.recipes.get(effect.options.recipe, BUILTIN_RECIPES[LLAMACPP])
        seconds = self.config.engine.readiness_seconds
        self.crew.start(effect, self.installed.engine, recipe, least_readiness_seconds=seconds)

    def _reply(self, reply: Reply) -> None:
        future = self._replies.pop(reply.token, None)
        if future is not None and not future.done():
            future.set_result(reply.message)
        elif isinstance(reply.message, LeaseGranted):
            self.drive.post(CallerGone(token=reply.token, granted=reply.message, holder=reply.holder))

    def _tell(self, slot: SlotChanged) -> None:
        """Log a slot's state once."""
        if self._told.get(slot.slot_id) == slot.state:
            return
        self._told[slot.slot_id] = slot.state
        if slot.state == "unloaded":
            del self._told[slot.slot_id]
        write = log.warning if slot.state in ("failed", "restarting") else log.info
        write(f"model_{slot.state}", model=slot.model, slot=slot.slot_id, pid=slot.pid, reason=slot.reason)

    def _engine_news(self, news: Stimulus) -> None:
        self.drive.post(news)
        if isinstance(news, EngineFailed) and news.code == "engine_missing":
            # It was there when it was looked for; perhaps another one is there now.
            self.tasks.start(self.measure(), "device")

    # -- requests --------------------------------------------------------------------------------------------

    async def handle(self, request: codec.Message, deadline_seconds: float) -> codec.Message:
        match request:
            case AcquireLease(model=model, holder=holder):
                await self._look_for(model)
                reply = await self._ask(lambda token: AcquireAsked(token=token, request=request), holder)
                return self._checked(reply)
            case ReportCredits():
                return await self._ask(lambda token: CreditsReported(token=token, request=request))
            case ReturnCredits():
                return await self._ask(lambda token: CreditsReturned(token=token, request=request))
            case WithdrawAcquire():
                return await self._ask(lambda token: WithdrawAsked(token=token, request=request))
            case EngineSuspected():
                return await self._ask(lambda token: SuspicionRaised(token=token, request=request))
            case LoadModel() if self.config.node.client:
                raise RequestRefused("client", CLIENT_WORDS)
            case LoadModel(model=model, backend=backend):
                # Before that the build that runs what names none is not known, and equal options look different.
                await self._measured.wait()
                await self._look_for(model)
                if backend in self.installed.missing_backends:
                    await self._look_for_programs(backend)
                return self._checked(await self._ask(lambda token: LoadAsked(token=token, request=request)))
            case UnloadModel():
                return await self._ask(lambda token: UnloadAsked(token=token, request=request))
            case PinModel(model=model, pinned=pinned):
                await self._look_for(model)
                reply = await self._ask(lambda token: PinAsked(token=token, request=request))
                if isinstance(reply, Done):
                    log.info("model_pinned" if pinned else "model_unpinned", model=model)
                return reply
            case SetMaxLoadedModels(limits=limits):
                reply = await self._ask(lambda token: LimitsAsked(token=token, request=request))
                if isinstance(reply, Done):
                    log.info("limits_set", max_loaded_models=" ".join(map(str, limits)))
                return reply
            case PullModel() | CancelPull() | DeleteModel():
                return await self.store.handle(request)
            case RescanModels():
                found = await self.library.scan()
                return Done(detail=f"{len(found.models)} models, {len(found.skipped)} files skipped")
            case GetEngineLog(model=model, lines=lines):
                return await self._engine_log(model, max(1, min(lines, LOG_LINES_LIMIT)))
            case ExplainSubject(subject=subject):
                now = asyncio.get_running_loop().time()
                said = (*explain(self.table.book, subject, now), *self.store.explain(subject, now))
                return Explanation(sentences=said)
            case ReloadConfig():
                return await self._reload()
        raise RequestRefused("not_for_me", f"launcherd does not serve {type(request).__name__}")

    async def _ask(self, stimulus: Asking, holder: HolderId | None = None) -> codec.Message:
        """Post a stimulus with a token and wait for the reply to it."""
        token = ReplyToken(next(self._tokens))
        future: asyncio.Future[codec.Message] = asyncio.get_running_loop().create_future()
        self._replies[token] = future
        self.drive.post(stimulus(token))
        try:
            return await future
        except asyncio.CancelledError:
            self._replies.pop(token, None)
            lost = future.result() if future.done() and not future.cancelled() else None
            granted = lost if isinstance(lost, LeaseGranted) else None
            self.drive.post(CallerGone(token=token, granted=granted, holder=holder))
            raise

    async def _unload(self, model: ModelName) -> codec.Message:
        request = UnloadModel(model=model)
        return await self._ask(lambda token: UnloadAsked(token=token, request=request))

    async def _look_for(self, model: str) -> None:
        """Read the folders again if the model is not known: its file may have come a moment ago."""
        name = find_name(model, self.table.book.models)
        if name is not None:
            if self.table.book.models[name].recipe in self.installed.missing_recipes:
                await self._look_for_programs()
            return
        now = asyncio.get_running_loop().time()
        if now - self._rescanned_at >= RESCAN_SECONDS or not self.table.book.models:
            self._rescanned_at = now
            await self.library.scan()

    async def _look_for_programs(self, backend: str = "") -> None:
        """Measure again if a program came or went, or the build of that name did not run and perhaps does now."""
        found = await asyncio.to_thread(look_for_programs, self.config, os.environ)
        if found.seen != self.installed.seen or backend in found.builds:
            await self.measure()

    def _checked(self, reply: codec.Message) -> codec.Message:
        """Look at the folders again after a file turned out to be gone."""
        if isinstance(reply, Refused) and reply.code == "model_file_missing":
            self.tasks.start(self.library.scan(), "scan after a missing file")
        return reply

    async def _engine_log(self, asked: str, lines: int) -> EngineLog:
        book = self.table.book
        known = book.models.keys() | {slot.name for slot in book.slots.values()}
        name = find_name(asked, known) or ModelName(asked)
        path = self.file.log_of(name)
        if not path:
            raise RequestRefused("no_log", f"no engine has run for {name} on this node yet; 'meshctl load {name}'")
        return EngineLog(path=path, lines=await asyncio.to_thread(log_tail, self._log_file(path), lines))

    def _log_file(self, path: str) -> Path:
        """Only ever a file of the engines' folder, whatever was written down."""
        return self.paths.engines / os.path.basename(path)

    async def _reload(self) -> ConfigReloaded:
        """Raises: ConfigError, and nothing changed."""
        config = await asyncio.to_thread(load_config, self.paths.config_file, environment())
        changed = [key for key in changed_keys(self.config, config) if key.startswith(OWN_SECTIONS)]
        if config.configured != self.config.configured:
            changed.append("mesh.toml")
        self.config = config
        self.store.configure(config)
        self.drive.post(ConfigApplied(config=config))
        if any(key.startswith(MEASURED_KEYS) for key in changed):
            await self.measure()
        await self.library.scan()
        self._unload_of_client()
        log.info("config_reloaded", changed=",".join(changed))
        return ConfigReloaded(changed=tuple(changed), needs_restart=())

    # -- start and upkeep ------------------------------------------------------------------------------------

    async def measure(self) -> None:
        """Find the engine and what it can use."""
        installed = await asyncio.to_thread(find_installed, self.config)
        reason = installed.reason
        device = await asyncio.to_thread(measure_device, self.config.node, installed.default(), reason)
        self.installed = installed
        self.drive.post(
            replace(
                device,
                backend=installed.backend,
                missing_backends=installed.missing_backends,
                missing_recipes=installed.missing_recipes,
                npus=await asyncio.to_thread(find_npus),
            )
        )
        self._measured.set()
        log.info("device", device=device.device, capacity_bytes=device.capacity_bytes, engine=device.engine or "none")
        if reason:
            log.warning("no_engine", reason=reason)

    async def look_for_engine(self) -> None:
        """For ever: engines that were installed or removed."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self._measured.is_set():
                continue
            await self._look_for_programs()
            # One that is there but does not run yet may be waiting for its driver.
            if not self.installed.backend and (await asyncio.to_thread(find_installed, self.config)).backend:
                await self.measure()

    async def adopt(self, memory: Memory) -> None:
        """Take over healthy engines whose model is still on disk; end all others."""
        records, dropped = await asyncio.to_thread(self.crew.records.load)
        for item in dropped:
            log.warning("record_dropped", path=item.path, reason=item.reason)
        if records:
            found = await self.library.scan()
            models = {model.name: model for model in found.models}
            await asyncio.gather(*(self._adopt(record, memory, models) for record in records))
        killed = await asyncio.to_thread(self.crew.records.sweep_strays)
        if killed:
            log.warning("strays_killed", count=killed)
        kept = [*self.file.logs(), *(record.log_path for record in records)]
        await asyncio.to_thread(lambda: remove_logs(unused_logs(self.paths.engines, kept)))

    async def _adopt(self, record: EngineRecord, memory: Memory, models: dict[ModelName, KnownModel]) -> None:
        slot_id, name = SlotId(record.engine_id), ModelName(record.model_name)
        model = models.get(name)
        wanted = model is not None and model.file.parts == record.model_parts
        endpoint = await self.crew.adopt(record, self.config.recipes) if wanted else None
        if model is None or endpoint is None:
            running = await self.crew.sweep(record)
            log.info("engine_swept", slot=slot_id, model=name, was_running=running)
            return
        remembered = memory.slots.get(slot_id)
        if remembered is None or remembered.model != name:
            options = listed_options(model, self.config, self.table.book.cores)
            options = replace(options, parallel=record.parallel, context_tokens=record.context_tokens)
            remembered = SlotMemory(model=name, options=options, origin="request")
        self.drive.post(EngineAdopted(slot_id=slot_id, model=model, memory=remembered, endpoint=endpoint))
        self.crew.watch(slot_id)
        log.info("engine_adopted", slot=slot_id, model=name, pid=endpoint.pid)

    def assignments_snapshot(self, messages: list[codec.Message]) -> None:
        for message in messages:
            self.assignments_changed(message)

    def assignments_changed(self, message: codec.Message) -> None:
        if isinstance(message, AssignmentsChanged):
            self.drive.post(AssignmentsGiven(assignments=message.assignments))
            self._nothing_assigned = not message.assignments
            self._unload_of_client()

    def _unload_of_client(self) -> None:
        """A node that only consumes keeps nothing loaded; running requests finish."""
        if self.config.node.client and self._nothing_assigned:
            token = ReplyToken(next(self._tokens))
            self.drive.post(UnloadAsked(token=token, request=UnloadModel(wait=False), of_client=True))


async def main(paths: NodePaths, config: NodeConfig) -> None:
    """Runs until it is told to stop. Raises: MeshError when it cannot start."""
    stop = StopSignal()
    tasks = Tasks()
    file = MemoryFile(paths.state / "launcherd.json", run=str(os.getppid()))
    memory = file.read()
    launcher = Launcher(paths, config, memory, file, tasks)
    await launcher.adopt(memory)
    machine = tasks.start(launcher.drive.run(), "slot table")
    # One turn of the loop: adopted engines are in the table before anybody can ask about them.
    await asyncio.sleep(0)
    launcher.bus = BusServer(NAME, paths, launcher, launcher.handle, tasks)
    launcher.bus.start()
    launcher.store.start()
    tasks.start(launcher.measure(), "device")
    tasks.start(launcher.library.scan(), "first scan")
    tasks.start(launcher.library.watch(), "models folders")
    tasks.start(launcher.library.hash_all(lambda: launcher.table.book.loading is not None), "hashes")
    tasks.start(launcher.look_for_engine(), "engine")
    mirror = Mirror("electiond", paths, launcher.assignments_snapshot, launcher.assignments_changed)
    mirror.start(tasks)
    log.ready(NAME)
    kind = await stop.wait_or(tasks)
    log.info("stopping", daemon=NAME, kind=kind)
    if kind == "node":
        machine.cancel()
        await launcher.crew.stop_all()
    launcher.bus.close()
    mirror.close()
