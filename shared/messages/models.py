"""What a model is, as launcherd reports it and everybody else speaks of it."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from shared.ids import ModelName, PeerId, SlotId
from shared.messages.registry import message, part

ModelType = Literal["llm", "embedding", "reranking", "audio", "image"]
MODEL_TYPES: tuple[ModelType, ...] = ("llm", "embedding", "reranking", "audio", "image")

Processor = Literal["cpu", "gpu", "npu"]
"""What a recipe computes on. At most one loaded model of a node may use the NPU."""

LoadOrigin = Literal["flag", "request", "allocation", "promotion"]
"""Why a model is on a node: named by its owner, asked for, placed by the mesh, or promoted."""

SlotState = Literal["queued", "loading", "ready", "draining", "stopping", "restarting", "failed", "unloaded"]


SlotEnd = Literal["", "owner", "idle", "eviction", "dropped", "replaced"]
"""Why a slot is ``unloaded``: by a person; unused for as long as its owner allows; to make room for another model;
nobody waited for its load any more; or another slot of the same model stands or may stand in its place."""


@part
class LocalModel:
    """One model on this node's disk."""

    name: ModelName
    type: ModelType
    path: str
    """First part's file. Local: never sent to another node."""
    file_size_bytes: int
    file_hash: str = ""
    """SHA-256 in hex: of the file, or over the digests of all parts in order; empty until computed."""
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    trained_context_tokens: int = 0
    context_tokens: int = 0
    """What this node would load it with, over all parallel requests."""
    parallel: int = 1
    kv_bytes_per_token: int = 0
    compute_bytes: int = 0
    need_bytes: int = 0
    builtin: bool = False
    """Ships with meshd (the guide model)."""
    recipe: str = "llamacpp"
    """Which kind of engine runs it."""
    labels: tuple[str, ...] = ()
    """What it is good for, in the registry's words: ``reasoning``, ``tool-calling``, ``vision``, ``embeddings``…"""
    checkpoint: str = ""
    """Where it came from: ``org/repo:quant``, a URL, or empty for a file that somebody put there."""


@part
class SkippedFile:
    path: str
    reason: str


@message
class InventoryChanged:
    """launcherd: the models on this node's disk, whole list."""

    models: tuple[LocalModel, ...]
    skipped: tuple[SkippedFile, ...] = ()
    scanning: bool = False


@message
class DeviceChanged:
    """launcherd: what this node can compute with."""

    device: str
    """``cpu``, or the GPU's name."""
    vram_bytes: int
    """What models of type llm may use: totals and reserves, never "free right now"."""
    total_bytes: int
    reserve_bytes: int
    engine: str
    """Which engine runs models, with its version; empty when none is installed."""
    engine_reason: str = ""
    """Why no engine can be used and how to get one; empty when there is one."""
    npus: tuple[str, ...] = ()
    """Names of this machine's NPUs, as far as the kernel knows them."""
    backends: dict[str, str] = field(default_factory=dict)
    """Builds of llama.cpp that a load may name: name -> why it cannot be used and how to get it; empty: it can."""
    recipes: dict[str, str] = field(default_factory=dict)
    """The same for recipes other than llamacpp."""


@message
class SlotChanged:
    """launcherd: one slot's state. ``unloaded`` is the last word on a slot id."""

    slot_id: SlotId
    model: ModelName
    type: ModelType
    state: SlotState
    reason: str
    """In words: why it waits, why it failed, why it was unloaded."""
    origin: LoadOrigin
    need_bytes: int = 0
    pid: int = 0
    port: int = 0
    parallel: int = 0
    in_use: int = 0
    waiting: int = 0
    context_tokens: int = 0
    requests_total: int = 0
    restarts: int = 0
    state_age_seconds: float = 0.0
    last_use_age_seconds: float = 0.0
    load_seconds: float = 0.0
    log_path: str = ""
    ended_by: SlotEnd = ""
    """Only of an ``unloaded`` slot."""
    recipe: str = "llamacpp"
    processors: tuple[Processor, ...] = ("cpu",)
    """What its engine computes on."""
    pinned: bool = False
    checkpoint: str = ""
    """As in ``LocalModel``; the file's path where that is empty."""
    backend: str = ""
    """The build that runs it: the resolved ``llamacpp_backend``."""
    engine_args: tuple[str, ...] = ()
    """The resolved ``llamacpp_args``."""


@message
class LimitsChanged:
    """launcherd: how many models may be loaded at once, for each of ``MODEL_TYPES`` in order; -1 without limit."""

    max_loaded_models: tuple[int, ...]
    reason: str = ""
    """Who said so: the configuration, or a running change."""


# -- requests launcherd serves ----------------------------------------------------------------------------


@message
class LoadModel:
    """Request: make a model ready. Reply ``ModelLoaded`` when it is, or ``Refused``.

    With ``wait`` false the reply comes as soon as the load is queued (``Done``).
    """

    model: ModelName
    origin: LoadOrigin = "request"
    context_tokens: int = 0
    """0: as configured."""
    parallel: int = 0
    extra_args: tuple[str, ...] | None = None
    """``llamacpp_args``; None: as configured, empty: none."""
    backend: str = ""
    """``llamacpp_backend``, an installed build; empty: as configured."""
    pinned: bool | None = None
    """Pin or unpin it; None: leave that as it is."""
    wait: bool = True


@message
class ModelLoaded:
    model: ModelName
    slot_id: SlotId
    load_seconds: float
    already: bool
    """True when it was ready with the same resolved options: nothing was done."""


@message
class UnloadModel:
    """Request: unload one model, or all of them when ``model`` is empty. Busy ones finish first."""

    model: ModelName | None = None
    wait: bool = True


@message
class PinModel:
    """Request: a pinned model is not evicted for another one and not unloaded when idle. Reply ``Done``, ``Refused``.

    It holds until it is taken back, over restarts, whether the model is loaded or not.
    """

    model: ModelName
    pinned: bool = True


@message
class SetMaxLoadedModels:
    """Request: other limits from now on, until the configuration's own change. Reply ``Done`` or ``Refused``.

    One number for every type, or one each in the order of ``MODEL_TYPES``, the rest 1. What is loaded above a lower
    limit stays until something is loaded.
    """

    limits: tuple[int, ...]


@message
class RescanModels:
    """Request: read the models folders again. Reply ``Done`` when the scan has finished."""


@message
class GetEngineLog:
    """Request: the last lines of the newest engine log of ``model``. Reply ``EngineLog`` or ``Refused``."""

    model: ModelName
    lines: int = 200


@message
class EngineLog:
    path: str
    lines: tuple[str, ...]


# -- the mesh's view, kept by electiond -------------------------------------------------------------------

CatalogStatus = Literal["unloaded", "loading", "ready", "needs_capacity", "failed"]


@part
class MeshModel:
    """A model of the mesh: the union of what its nodes have and what their owners asked for."""

    name: ModelName
    type: ModelType
    status: CatalogStatus
    reason: str
    source: str = ""
    file_size_bytes: int = 0
    need_bytes: int = 0
    context_tokens: int = 0
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    nodes_on_disk: tuple[PeerId, ...] = ()
    nodes_serving: tuple[PeerId, ...] = ()
    hosts: tuple[PeerId, ...] = ()
    requested: bool = False
    builtin: bool = False
    name_here: ModelName = ModelName("")
    """What this node's launcherd calls it, where that is another name; empty: ``name``."""


@message
class CatalogChanged:
    """electiond: the whole catalog."""

    models: tuple[MeshModel, ...]


@part
class Assignment:
    """``model`` belongs on this node, for this ``reason``."""

    model: ModelName
    origin: LoadOrigin
    reason: str


@message
class AssignmentsChanged:
    """electiond: what this node should serve. launcherd makes it so."""

    assignments: tuple[Assignment, ...]
    idle_reason: str = ""
    """Why there is none, when there is none."""


@part
class RouteHost:
    peer_id: PeerId
    addresses: tuple[str, ...] = ()
    parallel: int = 1
    load: float = 0.0
    """Busy share of ``parallel``, 0..1 and above when requests wait; of other nodes in steps of a quarter."""
    name_there: ModelName = ModelName("")
    """What that node calls the model, where that is another name; empty: the route's."""


@part
class Route:
    model: ModelName
    type: ModelType
    hosts: tuple[RouteHost, ...]


@message
class RoutesChanged:
    """electiond: healthy hosts of every routable model, whole table."""

    routes: tuple[Route, ...]


@message
class PlaceModel:
    """Request to electiond: a request needs this model and no host serves it.

    Reply ``ModelPlaced``, or ``Refused`` with code ``model_not_found``, ``idle``, ``needs_capacity``.
    """

    model: ModelName
    avoid: tuple[PeerId, ...] = ()
    """Nodes that this request has tried in vain."""


@message
class ModelPlaced:
    """``peer_id`` is the node to ask: the lease taken there loads the model. This node's own id, or empty: here."""

    model: ModelName
    peer_id: PeerId
    reason: str
    name_there: ModelName = ModelName("")
    """What that node calls the model, where that is another name; empty: ``model``."""
