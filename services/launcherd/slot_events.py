"""What the slot table is told and what it wants done: two closed unions beside their machine, `slots.SlotTable`.

Requests come with a token; exactly one `Reply` answers each token, whatever happens, unless its caller went away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from services.launcherd.command_line import EngineOptions
from services.launcherd.model_info import ModelFile
from shared.config import NodeConfig
from shared.ids import HolderId, ModelName, SlotId
from shared.messages.daemon import Done, Refused
from shared.messages.leases import (
    AcquireLease,
    CreditsConfirmed,
    CreditsRecalled,
    EngineSuspected,
    LeaseGranted,
    ReportCredits,
    ReturnCredits,
    WithdrawAcquire,
)
from shared.messages.models import (
    Assignment,
    DeviceChanged,
    InventoryChanged,
    LimitsChanged,
    LoadModel,
    LoadOrigin,
    ModelLoaded,
    PinModel,
    SetMaxLoadedModels,
    SkippedFile,
    SlotChanged,
    UnloadModel,
)

ReplyToken = NewType("ReplyToken", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model on this node's disk. `file_hash` is empty until computed."""

    file: ModelFile
    file_hash: str = ""
    builtin: bool = False
    recipe: str = "llamacpp"
    """Which kind of engine runs it: a name of `recipes`."""
    labels: tuple[str, ...] = ()
    checkpoint: str = ""
    """Where it came from, as the registry knows; empty for a file that somebody put there."""
    projector: str = ""
    """The file with which it sees or hears: `mmproj-NAME.gguf` beside it."""
    projector_bytes: int = 0

    @property
    def name(self) -> ModelName:
        return ModelName(self.file.name)

    @property
    def size_bytes(self) -> int:
        """All that is read into memory when it is loaded."""
        return self.file.file_size_bytes + self.projector_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """A ready engine: its process and where requests go."""

    pid: int
    port: int
    base_url: str
    api_key: str
    log_path: str

    def __repr__(self) -> str:
        return f"EngineEndpoint(pid={self.pid}, port={self.port})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMemory:
    """What a restarted launcherd must know of a running engine besides its process."""

    model: ModelName
    options: EngineOptions
    origin: LoadOrigin
    load_seconds: float = 0.0
    requests_total: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What outlives launcherd: loaded slots, who holds how many credits on which, and declined assignments."""

    slots: Mapping[SlotId, SlotMemory] = field(default_factory=dict)
    credits: Mapping[SlotId, Mapping[HolderId, int]] = field(default_factory=dict)
    declined: Mapping[ModelName, str] = field(default_factory=dict)
    pinned: frozenset[ModelName] = frozenset()
    limits_set: tuple[int, ...] = ()
    """``max_loaded_models`` as somebody set it while the node ran; empty: as configured."""
    complete: bool = True
    """False when what was written down could not be read."""


# -- stimuli -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryScanned:
    models: tuple[KnownModel, ...]
    skipped: tuple[SkippedFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMeasured:
    """`reserve_bytes` is what models may not use of `total_bytes`; `engine` is empty when there is none."""

    device: str
    total_bytes: int
    reserve_bytes: int
    engine: str
    engine_reason: str = ""
    backend: str = ""
    """Which build of llama.cpp that is: what runs a model whose load names none."""
    missing_backends: Mapping[str, str] = field(default_factory=dict)
    """Builds of llama.cpp that are not installed: name to the words why and how to get it…"""
    missing_recipes: Mapping[str, str] = field(default_factory=dict)
    """…and recipes whose program is not."""
    npus: tuple[str, ...] = ()

    @property
    def capacity_bytes(self) -> int:
        return max(0, self.total_bytes - self.reserve_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigApplied:
    config: NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentsGiven:
    assignments: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAsked:
    token: ReplyToken
    request: LoadModel


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadAsked:
    token: ReplyToken
    request: UnloadModel
    of_client: bool = False
    """Nobody asked: the node became one that only consumes. Nothing is declined, electiond has taken it all back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireAsked:
    token: ReplyToken
    request: AcquireLease


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawAsked:
    token: ReplyToken
    request: WithdrawAcquire


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditsReported:
    token: ReplyToken
    request: ReportCredits


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditsReturned:
    token: ReplyToken
    request: ReturnCredits


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionRaised:
    token: ReplyToken
    request: EngineSuspected


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAsked:
    token: ReplyToken
    request: PinModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsAsked:
    token: ReplyToken
    request: SetMaxLoadedModels


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerGone:
    """Nobody waits for this token's reply any more. `granted` is a lease that was under way to it."""

    token: ReplyToken
    granted: LeaseGranted | None = None
    holder: HolderId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdopted:
    """A healthy engine of an earlier launcherd; its slot keeps its id."""

    slot_id: SlotId
    model: KnownModel
    memory: SlotMemory
    endpoint: EngineEndpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoading:
    """How far a load has come: `starting`, `loading`, `answering` (its first request)."""

    slot_id: SlotId
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    slot_id: SlotId
    endpoint: EngineEndpoint
    load_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """A load that did not become ready. `code` is the error's; nothing of the engine is left."""

    slot_id: SlotId
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExited:
    """A ready engine ended by itself. `how` completes "its engine …"."""

    slot_id: SlotId
    how: str
    last_words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHung:
    """A ready engine did not answer a probe for `hang_seconds`."""

    slot_id: SlotId
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealthy:
    slot_id: SlotId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStopped:
    """The answer to `StopEngine`: nothing of the engine is left."""

    slot_id: SlotId


Stimulus = (
    InventoryScanned
    | DeviceMeasured
    | ConfigApplied
    | AssignmentsGiven
    | LoadAsked
    | UnloadAsked
    | AcquireAsked
    | WithdrawAsked
    | CreditsReported
    | CreditsReturned
    | SuspicionRaised
    | PinAsked
    | LimitsAsked
    | CallerGone
    | EngineAdopted
    | EngineLoading
    | EngineReady
    | EngineFailed
    | EngineExited
    | EngineHung
    | EngineHealthy
    | EngineStopped
)


# -- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Ends in `EngineReady` or `EngineFailed`, or in `EngineStopped` after a `StopEngine`."""

    slot_id: SlotId
    model: KnownModel
    options: EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEngine:
    """Ends in `EngineStopped`."""

    slot_id: SlotId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeEngine:
    """Ends in `EngineHealthy`, `EngineHung` or `EngineExited`. `eager`: somebody saw it misbehave."""

    slot_id: SlotId
    eager: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    token: ReplyToken
    message: Done | Refused | ModelLoaded | LeaseGranted | CreditsConfirmed
    holder: HolderId | None = None
    """Who gets the credits of a `LeaseGranted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    message: InventoryChanged | DeviceChanged | LimitsChanged | SlotChanged | CreditsRecalled


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember:
    """Write this down before any later effect: a reply that grants a credit must not outrun its record."""

    memory: Memory


Effect = StartEngine | StopEngine | ProbeEngine | Reply | Publish | Remember
