"""What a node's status consists of: the words of ``meshctl status --json`` and of the management port.

:mod:`shared.status_view` builds it, :mod:`shared.status_hints` says what to do next about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.messages.models import SlotState

Overall = Literal["down", "idle", "starting", "degraded", "ready"]
ModelStatusWord = Literal["unloaded", "loading", "ready", "needs_capacity", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process as supervisord sees it. ``restarts`` counts starts after the first, None when nobody knows."""

    name: str
    state: str
    """supervisord's word in lower case: running, starting, backoff, fatal, exited, stopped, stopping."""
    pid: int = 0
    uptime_seconds: float | None = None
    down_seconds: float | None = None
    reason: str = ""
    log_path: str = ""
    restarts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    name: str
    state: str
    """``running`` when the process runs and answers, ``silent`` when it runs and does not, else supervisord's word
    (``unknown`` without supervisord)."""
    pid: int
    """The process that supervisord started; ``kill`` it and supervisord starts another."""
    serving_pid: int
    """The process that answers: proxyd's worker, else the same."""
    uptime_seconds: float | None
    restarts: int | None
    detail: str
    """The daemon's own line, or why it is not running."""
    version: str
    down_seconds: float | None
    log_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HereStatus:
    """The model's slot on this node."""

    state: SlotState
    reason: str
    origin: str
    busy: int
    parallel: int
    waiting: int
    context_tokens: int
    requests_total: int
    restarts: int
    load_seconds: float
    state_age_seconds: float
    last_use_age_seconds: float
    pid: int
    port: int
    log_path: str
    recipe: str = "llamacpp"
    processors: tuple[str, ...] = ()
    """What it computes on: cpu, gpu, npu."""
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    name: str
    type: str
    status: ModelStatusWord
    reason: str
    hosts: tuple[str, ...]
    """Names of the nodes that serve it now; the node id where no name is known."""
    host_ids: tuple[str, ...]
    nodes_on_disk: int
    on_disk_here: bool
    size_bytes: int
    need_bytes: int
    context_tokens: int
    architecture: str
    quantization: str
    parameters: int
    builtin: bool
    requested: bool
    path: str
    here: HereStatus | None
    tokens_per_second: float | None = None
    """Of the newest request that this node's proxyd finished, as the engine measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """The connections with another node, as this node's tunneld says."""

    state: str
    """connecting, connected, waiting, closed."""
    reason: str
    """How it is connected, why it waits, why it closed."""
    transport: str
    """``quic+tcp`` control and bulk, ``quic``, ``tcp``; empty while there is no connection."""
    rtt_ms: float | None
    """Windowed minimum."""
    address: str
    """Where the peer is, as a multiaddr without its id; empty while there is no connection."""
    retry_in_seconds: float | None
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One node of the mesh, this one included (``is_self``), or one that is only dialled (state ``unknown``)."""

    peer_id: str
    name: str
    state: str
    reason: str
    role: str
    node_state: str
    version: str
    device: str
    vram_bytes: int
    addresses: tuple[str, ...]
    hosted: tuple[str, ...]
    models_on_disk: int
    age_seconds: float
    is_self: bool
    grant: str = ""
    """member, client, issuer, guest."""
    trusted: bool = True
    """False for a guest that nobody trusts like a member."""
    link: LinkStatus | None = None
    """None for this node, and while tunneld says nothing about the peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinStepStatus:
    """One step of the newest join since gossipd's start."""

    name: str
    state: str
    """waiting, done, failed."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """URLs and multiaddrs; empty while the daemon that listens there has not said so."""

    api: str = ""
    console: str = ""
    mesh: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    api: int | None = None
    console: int | None = None
    mesh: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    peer_id: str
    name: str
    version: str
    role: str
    state: str
    mesh_id: str
    mesh_name: str
    device: str
    vram_bytes: int
    total_bytes: int
    engine: str
    engine_reason: str
    scanning: bool
    max_loaded_models: tuple[int, ...] = ()
    """For llm, embedding, reranking, audio, image; -1 without limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadView:
    """A download of this node that has not ended, or failed."""

    model: str
    checkpoint: str
    state: str
    reason: str
    bytes_done: int
    bytes_total: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedView:
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsView:
    total: int = 0
    active: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    overall: Overall
    summary: str
    """One sentence for the first line of the screen."""
    node: NodeView
    addresses: Addresses
    ports: Ports
    requests: RequestsView
    daemons: tuple[DaemonStatus, ...]
    models: tuple[ModelStatus, ...]
    skipped: tuple[SkippedView, ...]
    downloads: tuple[DownloadView, ...] = ()
    peers: tuple[PeerStatus, ...]
    join: tuple[JoinStepStatus, ...] = ()
    """Empty unless somebody asked this gossipd to join."""
    hints: tuple[str, ...]
    """What to do next, each a sentence or a command."""
