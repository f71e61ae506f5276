"""What this node says about itself, from what its daemons report. Pure: same inputs, same announcement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.gossipd.mesh_identity import MeshIdentity
from shared.announced import available_model, hosted_models
from shared.ids import ModelName, PeerId, SlotId
from shared.messages.mesh import Announcement, NodeState, Role, ServedModel, TunnelChanged
from shared.messages.models import (
    Assignment,
    AssignmentsChanged,
    DeviceChanged,
    InventoryChanged,
    LocalModel,
    SlotChanged,
)
from shared.messages.trust import Grant
from shared.version import VERSION


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The last word of each daemon of this node; ``None`` until it spoke."""

    node_name: str
    configured: bool
    requested_models: tuple[ModelName, ...] = ()
    tunnel: TunnelChanged | None = None
    inventory: InventoryChanged | None = None
    device: DeviceChanged | None = None
    assignments: AssignmentsChanged | None = None
    draining: bool = False
    """The owner wants no new requests from other nodes."""
    grant: Grant | None = None
    """What this node's certificate lets it do; ``None`` without one."""
    leaving: bool = False
    """It says goodbye: what it has no longer matters to others."""
    client: bool = False
    """The owner wants it only to consume, whatever its certificate allows."""


def announce(
    facts: NodeFacts, slots: dict[SlotId, SlotChanged], identity: MeshIdentity, peer_id: PeerId, seq: int
) -> Announcement:
    """The node's announcement as of now, numbered ``(identity.incarnation, seq)``."""
    hosted = hosted_models(slots.values())
    models = facts.inventory.models if facts.inventory and not facts.leaving else ()
    if facts.leaving:
        hosted = ()
    return Announcement(
        peer_id=peer_id,
        incarnation=identity.incarnation,
        seq=seq,
        mesh_id=identity.mesh_id,
        version=VERSION,
        name=facts.node_name,
        role=_role(facts, hosted),
        state=_state(facts),
        addresses=facts.tunnel.addresses if facts.tunnel else (),
        device=facts.device.device if facts.device else "cpu",
        vram_bytes=facts.device.vram_bytes if facts.device else 0,
        available_models=tuple(available_model(model) for model in models),
        serving=_serving(facts.assignments.assignments if facts.assignments else (), models),
        hosted=hosted,
        requested_models=facts.requested_models,
    )


def same_content(one: Announcement, other: Announcement) -> bool:
    """Whether two announcements differ in nothing but their number."""
    return replace(one, seq=other.seq, incarnation=other.incarnation) == other


def _role(facts: NodeFacts, hosted: tuple[ServedModel, ...]) -> Role:
    if facts.client or facts.grant == "client":
        return "client"
    return "host" if hosted else "standby"


def _state(facts: NodeFacts) -> NodeState:
    if facts.leaving:
        return "leaving"
    if not facts.configured:
        return "idle"
    return "draining" if facts.draining else "active"


def _serving(assignments: Iterable[Assignment], models: Iterable[LocalModel]) -> tuple[ServedModel, ...]:
    by_name = {model.name: model for model in models}
    return tuple(
        ServedModel(model=item.model, type=by_name[item.model].type, parallel=by_name[item.model].parallel)
        for item in sorted(assignments, key=lambda item: item.model)
        if item.model in by_name
    )
