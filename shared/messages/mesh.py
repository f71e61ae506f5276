"""Nodes, membership and demand: what gossipd and tunneld say."""

from __future__ import annotations

from typing import Literal

from shared.ids import MeshId, ModelName, PeerId
from shared.messages.models import ModelType
from shared.messages.registry import message, part
from shared.messages.trust import Grant

Role = Literal["client", "standby", "worker", "host"]
NodeState = Literal["idle", "joining", "active", "draining", "leaving"]
MemberState = Literal["alive", "suspect", "dead", "left"]


@part
class AvailableModel:
    """A model on a node's disk, with all that others need to compute its need."""

    name: ModelName
    type: ModelType
    file_size_bytes: int
    file_hash: str = ""
    kv_bytes_per_token: int = 0
    compute_bytes: int = 0
    context_tokens: int = 0
    parallel: int = 1
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    builtin: bool = False


@part
class ServedModel:
    """A model that a node serves (``serving``: it means to, ``hosted``: it passed a health check)."""

    model: ModelName
    type: ModelType
    parallel: int = 1
    plan: str = ""


@part
class PlanClaim:
    """A split plan that a node takes part in; larger ``(term, host)`` wins."""

    model: ModelName
    term: int
    hash: str
    host: PeerId
    workers: tuple[PeerId, ...] = ()


@message
class Announcement:
    """A node's signed word about itself. Highest ``(incarnation, seq)`` wins."""

    peer_id: PeerId
    incarnation: int
    seq: int
    mesh_id: MeshId
    version: str
    name: str
    role: Role
    state: NodeState
    addresses: tuple[str, ...] = ()
    device: str = "cpu"
    vram_bytes: int = 0
    available_models: tuple[AvailableModel, ...] = ()
    serving: tuple[ServedModel, ...] = ()
    hosted: tuple[ServedModel, ...] = ()
    requested_models: tuple[ModelName, ...] = ()
    plan: PlanClaim | None = None
    model_source: str = ""
    """Where the models it serves come from, for nodes that may download them."""


@part
class ModelLoad:
    """How busy one hosted model is."""

    model: ModelName
    in_use: int
    waiting: int
    parallel: int
    last_use_age_seconds: float = 0.0


@part
class ModelCount:
    """A grow-only counter: requests for ``model`` that the record's node has counted since it exists."""

    model: ModelName
    requests_total: int


@part
class PeerRtt:
    peer_id: PeerId
    rtt_seconds: float


@message
class LoadRecord:
    """A node's signed, fast-moving half: at most one a second, and only when it moved."""

    peer_id: PeerId
    incarnation: int
    seq: int
    mesh_id: MeshId
    loads: tuple[ModelLoad, ...] = ()
    demand: tuple[ModelCount, ...] = ()
    rtts: tuple[PeerRtt, ...] = ()


@part
class SignedRecord:
    """``payload`` is an encoded record, forwarded verbatim; ``signature`` is Ed25519 over it."""

    payload: bytes
    signature: bytes
    peer_id: PeerId


@message
class SignRecord:
    """Request to tunneld, which owns the node key. Reply ``RecordSigned``."""

    payload: bytes


@message
class RecordSigned:
    record: SignedRecord


@message
class TunnelChanged:
    """tunneld: this node's identity and where it can be reached."""

    peer_id: PeerId
    port: int
    addresses: tuple[str, ...]
    """Multiaddrs that end in ``/p2p/<peer_id>``."""
    reason: str = ""
    """Why no address is reachable from outside, when none is."""


@message
class MeshIdentityChanged:
    mesh_id: MeshId
    mesh_name: str = ""
    """Empty for an unnamed mesh."""


@message
class MemberChanged:
    """gossipd: one node of the mesh. ``is_self`` marks this node."""

    announcement: Announcement
    state: MemberState
    reason: str
    is_self: bool = False
    age_seconds: float = 0.0
    rtt_seconds: float | None = None
    """From this node, when it is known."""
    load: LoadRecord | None = None
    grant: Grant = "member"
    trusted: bool = True
    """False for a guest: it takes no part in a split."""


@part
class ModelDemand:
    model: ModelName
    requests_total: int
    per_minute_1m: float
    per_minute_10m: float


@message
class DemandChanged:
    """gossipd: requests per model over the whole mesh, whole list."""

    demand: tuple[ModelDemand, ...]


@message
class CountUnserved:
    """Request to gossipd: requests that entered here for a model nobody serves. Reply ``Done``."""

    model: ModelName
    count: int = 1


# -- proxyd ------------------------------------------------------------------------------------------------


@part
class ModelSpeed:
    """How fast a model generated in its newest finished request, as its engine measured it."""

    model: ModelName
    tokens_per_second: float


@message
class ProxyChanged:
    """proxyd: where it listens and which worker serves."""

    api_url: str
    console_url: str
    worker_pid: int
    requests_total: int = 0
    requests_active: int = 0
    reason: str = ""
    speeds: tuple[ModelSpeed, ...] = ()
