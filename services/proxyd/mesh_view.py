"""What proxyd knows of the mesh, mirrored from the other daemons, and what a request's model name means by it.

Each daemon's word is kept apart, so that a restart of one replaces only what came from it. About this node itself
launcherd's slots are believed before electiond's routes: those lag, and stand still while electiond is down.

Source: DESIGN §8 (unknown model, no model, ``auto``, not ready).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.codec import Message
from shared.ids import ModelName, PeerId, SlotId
from shared.messages.mesh import MemberChanged, TunnelChanged
from shared.messages.models import (
    CatalogChanged,
    CatalogStatus,
    InventoryChanged,
    LocalModel,
    MeshModel,
    ModelType,
    RouteHost,
    RoutesChanged,
    SlotChanged,
    SlotState,
)

AUTO = "auto"
_STARTING: tuple[SlotState, ...] = ("queued", "loading", "restarting")


@dataclass(frozen=True, slots=True)
class Ready:
    """The model runs on ``hosts``; ``local`` when one of them is this node."""

    model: ModelName
    type: ModelType
    hosts: tuple[RouteHost, ...]
    local: bool
    suspects: frozenset[PeerId] = frozenset()
    """Those of ``hosts`` that their peers do not hear from."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """The mesh has the model, but it does not run. ``starting_here``: this node is already at it."""

    model: ModelName
    type: ModelType
    reason: str
    starting_here: bool


@dataclass(frozen=True, slots=True)
class Unsettled:
    """This node has just started and may yet learn what is meant."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """No model of that name; ``nearest`` are existing names like it."""

    name: str
    nearest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrongType:
    """The model exists but cannot answer this route."""

    model: ModelName
    type: ModelType


@dataclass(frozen=True, slots=True)
class Unnamed:
    """The request names no model and there is not exactly one ready to stand for it."""

    ready: tuple[ModelName, ...]


@dataclass(frozen=True, slots=True)
class NoneReady:
    """``auto`` was asked for and nothing is ready or starting."""

    reason: str


Resolution = Ready | NotReady | Unsettled | Unknown | WrongType | Unnamed | NoneReady


class MeshView:
    """Mirrored state and queries on it. ``replace`` on a daemon's snapshot, ``apply`` on each publication."""

    def __init__(self) -> None:
        self.self_id = PeerId("")
        self.routes: dict[ModelName, tuple[ModelType, tuple[RouteHost, ...]]] = {}
        self.slots: dict[SlotId, SlotChanged] = {}
        self.members: dict[PeerId, MemberChanged] = {}
        self._catalog: dict[ModelName, MeshModel] | None = None
        self._inventory: dict[ModelName, LocalModel] | None = None
        self._scanning = True
        self._merged: dict[ModelName, MeshModel] = {}
        self._local_names: dict[ModelName, ModelName] = {}
        self._mesh_names: dict[ModelName, ModelName] = {}
        self._ready: dict[ModelName, Ready] = {}
        self.version = 0
        """Moves with every change; for those who wait for one."""

    # -- mirroring ----------------------------------------------------------------------------------------

    def replace(self, daemon: str, messages: Iterable[Message]) -> None:
        """A snapshot: all that is known from ``daemon``."""
        match daemon:
            case "launcherd":
                self.slots.clear()
                self._inventory = None
            case "electiond":
                self._catalog = None
                self.routes = {}
            case "gossipd":
                self.members.clear()
        for message in messages:
            self._take(message)
        self._derive_models()

    def apply(self, message: Message) -> None:
        """One publication. Messages of other kinds are ignored."""
        if isinstance(message, MemberChanged) and not message.is_self:
            # Several a second in a large mesh, and none changes what models there are.
            self._take(message)
            self._derive_ready()
        elif self._take(message):
            self._derive_models()

    def _take(self, message: Message) -> bool:
        match message:
            case SlotChanged(slot_id=slot_id, state="unloaded"):
                self.slots.pop(slot_id, None)
            case SlotChanged(slot_id=slot_id):
                self.slots[slot_id] = message
            case InventoryChanged(models=models, scanning=scanning):
                self._inventory = {model.name: model for model in models}
                self._scanning = scanning
            case CatalogChanged(models=models):
                self._catalog = {model.name: model for model in models}
            case RoutesChanged(routes=routes):
                self.routes = {route.model: (route.type, route.hosts) for route in routes}
            case MemberChanged(announcement=announcement, state=state, is_self=is_self):
                if is_self:
                    self.self_id = announcement.peer_id
                if state in ("dead", "left") and not is_self:
                    self.members.pop(announcement.peer_id, None)
                else:
                    self.members[announcement.peer_id] = message
            case TunnelChanged(peer_id=peer_id):
                self.self_id = peer_id
            case _:
                return False
        return True

    def _derive_models(self) -> None:
        merged = dict(self._catalog or {})
        self._local_names = {name: model.name_here for name, model in merged.items() if model.name_here}
        self._mesh_names = {here: name for name, here in self._local_names.items()}
        running = self._running()
        for here, model in (self._inventory or {}).items():
            name = self.mesh_name(here)
            if name not in merged:
                merged[name] = _from_inventory(model, self.self_id)
        for name, slot in running.items():
            merged[name] = _with_slot(merged.get(name), slot, self.self_id)
        self._merged = merged
        self._derive_ready()

    def _running(self) -> dict[ModelName, SlotChanged]:
        """The best slot of each model on this node, by the mesh's name for it."""
        running: dict[ModelName, SlotChanged] = {}
        for slot in self.slots.values():
            name = self.mesh_name(slot.model)
            other = running.get(name)
            if other is None or _slot_rank(slot.state) > _slot_rank(other.state):
                running[name] = slot
        return running

    def _derive_ready(self) -> None:
        self.version += 1
        self._ready = {}
        suspects = frozenset(peer_id for peer_id, member in self.members.items() if member.state == "suspect")
        for name, (model_type, hosts) in self.routes.items():
            others = tuple(self._with_load(name, host) for host in hosts if host.peer_id != self.self_id)
            if others:
                doubtful = suspects & {host.peer_id for host in others} if suspects else suspects
                self._ready[name] = Ready(name, model_type, others, False, doubtful)
        for name, slot in self._running().items():
            if slot.state == "ready":
                parallel = max(1, slot.parallel)
                here = RouteHost(
                    peer_id=self.self_id, parallel=parallel, load=(slot.in_use + slot.waiting) / parallel
                )
                known = self._ready.get(name)
                hosts = (here, *(known.hosts if known else ()))
                self._ready[name] = Ready(name, slot.type, hosts, True, known.suspects if known else frozenset())

    def _with_load(self, name: ModelName, host: RouteHost) -> RouteHost:
        """The route's host with its node's own word on how busy it is; routes say nothing of that."""
        member = self.members.get(host.peer_id)
        loads = [load for load in member.load.loads if load.model == name] if member is not None and member.load else []
        if not loads:
            return host
        parallel = max(1, sum(load.parallel for load in loads))
        return replace(host, parallel=parallel, load=sum(load.in_use + load.waiting for load in loads) / parallel)

    # -- queries ------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether both this node's models and the mesh's catalog have been heard since proxyd started."""
        return self._catalog is not None and self._inventory is not None and not self._scanning

    def models(self) -> list[MeshModel]:
        """The whole mesh's catalog, with this node's newest word on its own slots, by name."""
        return [self._merged[name] for name in sorted(self._merged)]

    def model(self, name: str) -> MeshModel | None:
        return self._merged.get(ModelName(name))

    def ready_models(self, model_type: ModelType) -> list[Ready]:
        """Local first, then larger, then by name."""
        found = [ready for ready in self._ready.values() if ready.type == model_type]
        return sorted(found, key=lambda ready: (not ready.local, -self._size(ready.model), ready.model))

    def hosts_elsewhere(self) -> dict[ModelName, tuple[str, ...]]:
        """Names of the other nodes that serve each model."""
        found = {
            name: tuple(self.node_name(host.peer_id) for host in hosts if host.peer_id != self.self_id)
            for name, (_, hosts) in self.routes.items()
        }
        return {name: nodes for name, nodes in found.items() if nodes}

    def local_name(self, name: ModelName) -> ModelName:
        """What this node's launcherd calls a model of the mesh: another one where two files have the same name."""
        return self._local_names.get(name, name)

    def mesh_name(self, here: ModelName) -> ModelName:
        """The mesh's name for what this node's launcherd calls ``here``."""
        return self._mesh_names.get(here, here)

    def on_disk_here(self, name: ModelName) -> bool:
        model = self._merged.get(name)
        return model is not None and self.self_id in model.nodes_on_disk

    def node_name(self, peer_id: PeerId) -> str:
        member = self.members.get(peer_id)
        return member.announcement.name if member is not None and member.announcement.name else str(peer_id)

    def resolve(self, name: str | None, model_type: ModelType, *, settled: bool | None = None) -> Resolution:
        """What a request for ``name`` on a route of ``model_type`` means now.

        ``settled``: true to decide with what is known, although some daemon has not been heard yet.
        """
        if name is None:
            ready = self.ready_models(model_type)
            return ready[0] if len(ready) == 1 else Unnamed(tuple(sorted(item.model for item in ready)))
        known = self._ready.get(ModelName(name))
        if known is not None:
            return known if known.type == model_type else WrongType(known.model, known.type)
        model = self._merged.get(ModelName(name)) or self._merged.get(ModelName(name.removesuffix(".gguf")))
        if model is None:
            return self._resolve_unlisted(name, model_type, self.settled if settled is None else settled)
        if model.type != model_type:
            return WrongType(model.name, model.type)
        return self._ready.get(model.name) or self._not_ready(model)

    def _resolve_unlisted(self, name: str, model_type: ModelType, settled: bool) -> Resolution:
        if name == AUTO:
            ready = self.ready_models(model_type)
            if ready:
                return ready[0]
            starting = [
                slot for slot in self.slots.values() if slot.type == model_type and slot.state in _STARTING
            ]
            if starting:
                largest = max((self.mesh_name(slot.model) for slot in starting), key=lambda of: (self._size(of), of))
                return self._not_ready(self._merged[largest])
            if settled:
                return NoneReady(f"no model of type {model_type} is ready")
        if not settled:
            return Unsettled("this node has just started and is still reading its models")
        names = [model.name for model in self._merged.values()]
        return Unknown(name, tuple(difflib.get_close_matches(name[:64], names, n=3, cutoff=0.4)))

    def _not_ready(self, model: MeshModel) -> NotReady:
        here = self.local_name(model.name)
        starting = any(slot.model == here and slot.state in _STARTING for slot in self.slots.values())
        return NotReady(model.name, model.type, model.reason or f"{model.name} is not loaded", starting)

    def waiting_reason(self, name: ModelName) -> str:
        """Why a request for this model has to wait now, in words."""
        ready = self._ready.get(name)
        model = self._merged.get(name)
        if ready is not None:
            here = self.local_name(name)
            busy = [slot for slot in self.slots.values() if slot.model == here and slot.state == "ready"]
            parallel = sum(slot.parallel for slot in busy)
            return f"all {parallel} places of {name} are in use" if parallel else f"{name} is busy"
        return (model.reason if model is not None else "") or f"{name} is not loaded yet"

    def _size(self, name: ModelName) -> int:
        model = self._merged.get(name)
        return model.file_size_bytes if model is not None else 0


_SLOT_ORDER: tuple[SlotState, ...] = (
    "unloaded", "failed", "stopping", "draining", "queued", "restarting", "loading", "ready",
)  # fmt: skip


def _slot_rank(state: SlotState) -> int:
    return _SLOT_ORDER.index(state)


def _slot_status(state: SlotState) -> CatalogStatus:
    match state:
        case "ready":
            return "ready"
        case "queued" | "loading" | "restarting":
            return "loading"
        case "failed":
            return "failed"
        case "draining" | "stopping" | "unloaded":
            return "unloaded"


def _from_inventory(model: LocalModel, self_id: PeerId) -> MeshModel:
    return MeshModel(
        name=model.name,
        type=model.type,
        status="unloaded",
        reason="on this node's disk, not loaded",
        file_size_bytes=model.file_size_bytes,
        need_bytes=model.need_bytes,
        context_tokens=model.context_tokens,
        architecture=model.architecture,
        quantization=model.quantization,
        parameters=model.parameters,
        nodes_on_disk=(self_id,),
        builtin=model.builtin,
    )


def _with_slot(model: MeshModel | None, slot: SlotChanged, self_id: PeerId) -> MeshModel:
    """The catalog's entry with launcherd's newer word about this node's slot."""
    status = _slot_status(slot.state)
    if model is None:
        model = MeshModel(name=slot.model, type=slot.type, status=status, reason=slot.reason)
    elsewhere = tuple(peer for peer in model.hosts if peer != self_id)
    if status == "ready":
        return replace(
            model, status=status, reason=slot.reason, hosts=(self_id, *elsewhere),
            nodes_serving=(self_id, *(peer for peer in model.nodes_serving if peer != self_id)),
        )  # fmt: skip
    if elsewhere:
        return replace(model, status="ready", hosts=elsewhere)
    return replace(model, status=status, reason=slot.reason, hosts=())
