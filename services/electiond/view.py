"""What electiond knows: this node at first hand from launcherd, the others from their announcements.

The same pure rules run on every node over the same nodes, so all derive the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared.announced import available_model, hosted_models
from shared.ids import ModelName, PeerId
from shared.messages.mesh import Announcement, AvailableModel, MemberChanged, ServedModel
from shared.messages.models import DeviceChanged, LocalModel, SlotChanged
from shared.need import need_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """One node as the rules see it. ``peer_id`` is empty while this node does not know its own id yet."""

    peer_id: PeerId
    name: str
    vram_bytes: int
    device: str
    models: Mapping[ModelName, AvailableModel] = field(default_factory=dict)
    hosted: tuple[ServedModel, ...] = ()
    serving: tuple[ServedModel, ...] = ()
    requested: tuple[ModelName, ...] = ()
    addresses: tuple[str, ...] = ()
    is_self: bool = False

    def has(self, model: ModelName) -> bool:
        return model in self.models

    def hosts(self, model: ModelName) -> bool:
        return any(item.model == model for item in self.hosted)

    def fits(self, model: AvailableModel) -> bool:
        """Whether the model fits the node when nothing else is loaded."""
        return model_need_bytes(model) <= self.vram_bytes


def model_need_bytes(model: AvailableModel) -> int:
    """Memory that ``model`` takes, as every node computes it."""
    return need_bytes(
        file_size_bytes=model.file_size_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        compute_bytes=model.compute_bytes,
        context_tokens=model.context_tokens,
        parallel=model.parallel,
    )


def node_of(member: MemberChanged) -> Node:
    """A node from its announcement."""
    said: Announcement = member.announcement
    return Node(
        peer_id=said.peer_id,
        name=said.name,
        vram_bytes=said.vram_bytes,
        device=said.device,
        models={model.name: model for model in said.available_models},
        hosted=said.hosted,
        serving=said.serving,
        requested=said.requested_models,
        addresses=said.addresses,
        is_self=member.is_self,
    )


def own_node(
    member: MemberChanged | None,
    models: Iterable[LocalModel],
    device: DeviceChanged | None,
    slots: Iterable[SlotChanged],
    wanted: tuple[ModelName, ...],
) -> Node:
    """This node at first hand; gossipd adds only its name, id and addresses, and may be down."""
    said = member.announcement if member else None
    return Node(
        peer_id=said.peer_id if said else PeerId(""),
        name=said.name if said else "this node",
        vram_bytes=device.vram_bytes if device else 0,
        device=device.device if device else "cpu",
        models={model.name: available_model(model) for model in models},
        hosted=hosted_models(slots),
        requested=wanted,
        addresses=said.addresses if said else (),
        is_self=True,
    )
