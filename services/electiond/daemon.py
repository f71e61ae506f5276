"""electiond's shell: mirrors gossipd and launcherd, runs the elections machine, publishes what it derives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.electiond.elections import Elections
from services.electiond.io.memory_file import MemoryFile, this_run
from services.electiond.stimuli import (
    ConfigApplied,
    Effect,
    LauncherReplaced,
    MembersReplaced,
    Memory,
    PlaceRequested,
    Publish,
    Reply,
    Stimulus,
)
from shared import codec
from shared.config import NodeConfig, changed_keys, load_config
from shared.errors import RequestRefused, StillStarting
from shared.ids import ModelName
from shared.io import log
from shared.io.bus import BusServer, Mirror
from shared.io.drive import Drive, Tasks, Tick
from shared.io.lifecycle import StopSignal, environment
from shared.messages.daemon import ConfigReloaded, ExplainSubject, Explanation, ReloadConfig, StoryEntry
from shared.messages.mesh import MemberChanged
from shared.messages.models import (
    MODEL_TYPES,
    AssignmentsChanged,
    CatalogChanged,
    DeviceChanged,
    InventoryChanged,
    LimitsChanged,
    PlaceModel,
    RoutesChanged,
    SlotChanged,
)
from shared.messages.trust import PeersWanted
from shared.paths import NodePaths


def config_stimulus(config: NodeConfig, limits: LimitsChanged | None = None) -> ConfigApplied:
    """``limits`` is what launcherd goes by, which may have been changed while the node runs."""
    each = limits.max_loaded_models if limits else [config.slot_limit(type) for type in MODEL_TYPES]
    return ConfigApplied(
        configured=config.configured,
        named=tuple(ModelName(name) for name in config.models.serve),
        slot_limits=dict(zip(MODEL_TYPES, each, strict=False)),
        client=config.node.client,
    )


class Electiond:
    """Owns the machine's surroundings for the life of the process."""

    def __init__(self, paths: NodePaths, config: NodeConfig) -> None:
        self.paths = paths
        self.config = config
        self.tasks = Tasks()
        self.memory = MemoryFile(paths.state / "elections.json", run=this_run())
        self.elections = Elections(self.memory.load())
        self.drive: Drive[Stimulus, Effect] = Drive(
            self.elections, self.perform, quiet=(Tick, SlotChanged, MemberChanged)
        )
        self.bus = BusServer("electiond", paths, self, self.answer, self.tasks)
        self._limits: LimitsChanged | None = None
        self._tokens = 0
        self._logged_routes = ""
        self._replies: dict[int, asyncio.Future[codec.Message]] = {}

    def start(self) -> None:
        self.drive.post(config_stimulus(self.config))
        self.bus.start()
        Mirror("launcherd", self.paths, self.on_launcher, self.on_message).start(self.tasks)
        Mirror("gossipd", self.paths, self.on_members, self.on_message).start(self.tasks)
        self.tasks.start(self.drive.run(), "elections")

    # -- stimuli ------------------------------------------------------------------------------------------

    def on_message(self, message: codec.Message) -> None:
        match message:
            case InventoryChanged() | DeviceChanged() | SlotChanged() | MemberChanged() | PeersWanted():
                self.drive.post(message)
            case LimitsChanged():
                self._limit(message)

    def _limit(self, limits: LimitsChanged) -> None:
        if limits != self._limits:
            self._limits = limits
            self.drive.post(config_stimulus(self.config, limits))

    def on_launcher(self, messages: list[codec.Message]) -> None:
        inventory = next((item for item in messages if isinstance(item, InventoryChanged)), None)
        device = next((item for item in messages if isinstance(item, DeviceChanged)), None)
        slots = tuple(item for item in messages if isinstance(item, SlotChanged))
        for limits in messages:
            if isinstance(limits, LimitsChanged):
                self._limit(limits)
        self.drive.post(LauncherReplaced(inventory=inventory, device=device, slots=slots))

    def on_members(self, messages: list[codec.Message]) -> None:
        wanted = next((item for item in messages if isinstance(item, PeersWanted)), PeersWanted(peers=()))
        self.drive.post(wanted)
        self.drive.post(MembersReplaced(tuple(item for item in messages if isinstance(item, MemberChanged))))

    # -- effects ------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        match effect:
            case Publish(message=message):
                self.bus.publish(message)
                self.log_published(message)
            case Reply(token=token, message=message):
                future = self._replies.pop(token, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case Memory():
                self.memory.save(effect)

    def log_published(self, message: CatalogChanged | AssignmentsChanged | RoutesChanged) -> None:
        match message:
            case AssignmentsChanged(assignments=assignments, idle_reason=reason):
                for item in assignments:
                    log.info("assigned", model=item.model, origin=item.origin, reason=item.reason)
                if not assignments:
                    log.info("unassigned", reason=reason)
            case RoutesChanged(routes=routes):
                # How busy hosts are is in there too, and changes all the time.
                shown = " ".join(f"{route.model}({len(route.hosts)})" for route in routes) or "none"
                if shown != self._logged_routes:
                    self._logged_routes = shown
                    log.info("routes", models=shown)
            case CatalogChanged(models=models):
                ready = sum(1 for model in models if model.status == "ready")
                log.info("catalog", models=len(models), ready=ready)

    # -- what the bus server tells and asks -----------------------------------------------------------------

    def state_line(self) -> str:
        if not self.elections.settled:
            return "waits for launcherd and gossipd to report"
        assignments = self.elections.assigned.assignments
        if assignments:
            return f"{len(self.elections.catalog.models)} models known, assigned: " + ", ".join(
                item.model for item in assignments
            )
        return self.elections.assigned.idle_reason or "no assignment"

    def snapshot(self) -> Iterable[codec.Message]:
        if not self.elections.settled:
            raise StillStarting("electiond has just started and waits for launcherd and gossipd; ask again in a moment")
        return (self.elections.catalog, self.elections.assigned, self.elections.routes)

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return self.drive.story(limit, asyncio.get_running_loop().time())

    async def answer(self, request: codec.Message, _deadline_seconds: float) -> codec.Message:
        match request:
            case PlaceModel(model=model, avoid=avoid):
                self._tokens += 1
                future: asyncio.Future[codec.Message] = asyncio.get_running_loop().create_future()
                self._replies[self._tokens] = future
                self.drive.post(PlaceRequested(self._tokens, model, avoid))
                return await future
            case ExplainSubject(subject=subject):
                return Explanation(sentences=self.elections.explain(subject))
            case ReloadConfig():
                new = load_config(self.paths.config_file, environment())
                mine = ("models.serve", "models.max_loaded_models", "node.client")
                changed = tuple(key for key in changed_keys(self.config, new) if key in mine)
                self.config = new
                self.drive.post(config_stimulus(new, self._limits))
                return ConfigReloaded(changed=changed, needs_restart=())
        raise RequestRefused("not_for_me", f"electiond does not serve {type(request).__name__}")


async def main(paths: NodePaths, config: NodeConfig) -> None:
    """Run until SIGTERM."""
    daemon = Electiond(paths, config)
    stop = StopSignal()
    daemon.start()
    log.ready("electiond")
    kind = await stop.wait_or(daemon.tasks)
    log.info("stopping", daemon="electiond", kind=kind)
    await daemon.tasks.cancel()
    daemon.bus.close()
