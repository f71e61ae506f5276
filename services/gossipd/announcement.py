"""What this node says about itself, from what its daemons report. Pure: same inputs, same announcement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.gossipd.mesh_identity import MeshIdentity
from shared.ids import ModelName, PeerId, SlotId
from shared.messages.mesh import Announcement, AvailableModel, NodeState, Role, ServedModel, TunnelChanged
from shared.messages.models import (
    Assignment,
    AssignmentsChanged,
    DeviceChanged,
    InventoryChanged,
    LocalModel,
    SlotChanged,
)
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


def announce(
    facts: NodeFacts, slots: dict[SlotId, SlotChanged], identity: MeshIdentity, peer_id: PeerId, seq: int
) -> Announcement:
    """The node's announcement as of now, numbered ``(identity.incarnation, seq)``."""
    hosted = _hosted(slots.values())
    models = facts.inventory.models if facts.inventory else ()
    return Announcement(
        peer_id=peer_id,
        incarnation=identity.incarnation,
        seq=seq,
        mesh_id=identity.mesh_id,
        version=VERSION,
        name=facts.node_name,
        role=_role(hosted),
        state=_state(facts),
        addresses=facts.tunnel.addresses if facts.tunnel else (),
        device=facts.device.device if facts.device else "cpu",
        vram_bytes=facts.device.vram_bytes if facts.device else 0,
        available_models=tuple(_available(model) for model in models),
        serving=_serving(facts.assignments.assignments if facts.assignments else (), models),
        hosted=hosted,
        requested_models=facts.requested_models,
    )


def same_content(one: Announcement, other: Announcement) -> bool:
    """Whether two announcements differ in nothing but their number."""
    return replace(one, seq=other.seq, incarnation=other.incarnation) == other


def _role(hosted: tuple[ServedModel, ...]) -> Role:
    return "host" if hosted else "standby"


def _state(facts: NodeFacts) -> NodeState:
    return "active" if facts.configured else "idle"


def _available(model: LocalModel) -> AvailableModel:
    return AvailableModel(
        name=model.name,
        type=model.type,
        file_size_bytes=model.file_size_bytes,
        file_hash=model.file_hash,
        kv_bytes_per_token=model.kv_bytes_per_token,
        compute_bytes=model.compute_bytes,
        context_tokens=model.context_tokens,
        parallel=model.parallel,
        architecture=model.architecture,
        quantization=model.quantization,
        parameters=model.parameters,
        builtin=model.builtin,
    )


def _serving(assignments: Iterable[Assignment], models: Iterable[LocalModel]) -> tuple[ServedModel, ...]:
    by_name = {model.name: model for model in models}
    return tuple(
        ServedModel(model=item.model, type=by_name[item.model].type, parallel=by_name[item.model].parallel)
        for item in sorted(assignments, key=lambda item: item.model)
        if item.model in by_name
    )


def _hosted(slots: Iterable[SlotChanged]) -> tuple[ServedModel, ...]:
    return tuple(
        ServedModel(model=slot.model, type=slot.type, parallel=slot.parallel)
        for slot in sorted(slots, key=lambda slot: slot.model)
        if slot.state == "ready"
    )
