"""What electiond knows: this node at first hand from launcherd, the others from their announcements.

The same pure rules run on every node over the same nodes, so all derive the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shared.announced import available_model, hosted_models
from shared.ids import ModelName, PeerId, SlotId
from shared.messages.mesh import Announcement, AvailableModel, MemberChanged, ModelLoad, ServedModel
from shared.messages.models import Assignment, DeviceChanged, InventoryChanged, LocalModel, SlotChanged
from shared.need import need_bytes

Standing = Literal["active", "suspect", "draining", "client"]
"""What may be asked of a node: anything; nothing new while its silence is looked into; nothing new because its owner
said so; never anything, it only consumes."""


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
    standing: Standing = "active"
    trusted: bool = True
    """False for a guest: whole models only."""
    may_download: bool = False
    """Whether it can get a model's file by itself."""
    may_split: bool = False
    """Whether it can run one model together with other nodes."""
    loads: Mapping[ModelName, ModelLoad] = field(default_factory=dict)
    local_names: Mapping[ModelName, ModelName] = field(default_factory=dict)
    """What the node itself calls the models that have another name in the mesh."""

    def has(self, model: ModelName) -> bool:
        return model in self.models

    def hosts(self, model: ModelName) -> bool:
        return any(item.model == model for item in self.hosted)

    def serves(self, model: ModelName) -> bool:
        """Hosts it, or means to."""
        return any(item.model == model for item in (*self.hosted, *self.serving))

    def fits(self, model: AvailableModel) -> bool:
        """Whether the model fits the node when nothing else is loaded."""
        return model_need_bytes(model) <= self.vram_bytes

    def local_name(self, model: ModelName) -> ModelName:
        """What the node itself calls ``model``."""
        return self.local_names.get(model, model)

    def mesh_name(self, local: ModelName) -> ModelName:
        """What the mesh calls the model that the node itself calls ``local``."""
        return next((name for name, mine in self.local_names.items() if mine == local), local)

    @property
    def is_active(self) -> bool:
        """Whether it serves something, or is about to."""
        return bool(self.hosted or self.serving)


def model_need_bytes(model: AvailableModel) -> int:
    """Memory that ``model`` takes, as every node computes it."""
    return need_bytes(
        file_size_bytes=model.file_size_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        compute_bytes=model.compute_bytes,
        context_tokens=model.context_tokens,
        parallel=model.parallel,
    )


def stem(name: str) -> ModelName:
    """The catalog name that a file name or path stands for."""
    return ModelName(name.rsplit("/", 1)[-1].removesuffix(".gguf"))


def node_of(member: MemberChanged) -> Node:
    """A node from its announcement. A client serves nothing, whatever it says it has."""
    said: Announcement = member.announcement
    standing = standing_of(member)
    client = standing == "client"
    return Node(
        peer_id=said.peer_id,
        name=said.name or str(said.peer_id),
        vram_bytes=0 if client else said.vram_bytes,
        device=said.device,
        models={} if client else {model.name: model for model in said.available_models},
        hosted=() if client else said.hosted,
        serving=() if client else said.serving,
        requested=tuple(map(stem, said.requested_models)),
        addresses=said.addresses,
        is_self=member.is_self,
        standing=standing,
        trusted=member.trusted,
        loads={load.model: load for load in member.load.loads} if member.load else {},
    )


def standing_of(member: MemberChanged) -> Standing:
    """What may be asked of a member that is alive or suspected."""
    said = member.announcement
    if member.grant == "client" or said.role == "client":
        return "client"
    if said.state != "active" and not (member.is_self and said.state in ("idle", "joining")):
        return "draining"
    return "suspect" if member.state == "suspect" and not member.is_self else "active"


def own_node(
    member: MemberChanged | None,
    models: Iterable[LocalModel],
    device: DeviceChanged | None,
    slots: Iterable[SlotChanged],
    wanted: tuple[ModelName, ...],
    assigned: Iterable[Assignment] = (),
    client: bool = False,
) -> Node:
    """This node at first hand; gossipd adds only its name, id, grant and addresses, and may be down."""
    said = member.announcement if member else None
    standing: Standing = standing_of(member) if member else "active"
    available = {model.name: available_model(model) for model in models}
    if client or standing == "client":
        standing, available = "client", {}
    return Node(
        peer_id=said.peer_id if said else PeerId(""),
        name=said.name if said else "this node",
        vram_bytes=device.vram_bytes if device else 0,
        device=device.device if device else "cpu",
        models=available,
        hosted=hosted_models(slots),
        serving=tuple(
            ServedModel(model=item.model, type=available[item.model].type, parallel=available[item.model].parallel)
            for item in assigned
            if item.model in available
        ),
        requested=wanted,
        addresses=said.addresses if said else (),
        is_self=True,
        standing=standing,
        trusted=member.trusted if member else True,
    )


@dataclass(slots=True)
class View:
    """First-hand reports and announcements, as they came."""

    members: dict[PeerId, MemberChanged] = field(default_factory=dict)
    inventory: InventoryChanged | None = None
    device: DeviceChanged | None = None
    slots: dict[SlotId, SlotChanged] = field(default_factory=dict)

    @property
    def own(self) -> MemberChanged | None:
        return next((member for member in self.members.values() if member.is_self), None)

    def others(self) -> list[Node]:
        """The other nodes that are there, suspected ones too, by peer id, under the names they use themselves."""
        there = (item for item in self.members.values() if not item.is_self and item.state in ("alive", "suspect"))
        return sorted(map(node_of, there), key=lambda node: node.peer_id)

    def nodes(
        self, named: tuple[ModelName, ...], assigned: Iterable[Assignment] = (), client: bool = False
    ) -> list[Node]:
        """All nodes that are there by peer id, this one built at first hand."""
        models = self.inventory.models if self.inventory else ()
        mine = own_node(self.own, models, self.device, self.slots.values(), named, assigned, client)
        return sorted([mine, *self.others()], key=lambda node: node.peer_id)
