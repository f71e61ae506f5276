"""The real electiond machines on the world's nodes, with an engine that loads in a second.

gossipd's publications reach each node's elections as they would over the bus; what electiond assigns is told to gossipd
and becomes ready after a while, and so the other nodes hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from services.electiond.elections import Elections
from services.electiond.placements import is_free, serving_names
from services.electiond.stimuli import ConfigApplied, Effect, LauncherReplaced, MembersReplaced, Publish, Stimulus
from services.electiond.view import Node as SeenNode
from services.electiond.view import node_of
from shared import codec
from shared.ids import ModelName, PeerId, SlotId
from shared.io.drive import Tick
from shared.messages.mesh import MemberChanged
from shared.messages.models import (
    MODEL_TYPES,
    AssignmentsChanged,
    DeviceChanged,
    InventoryChanged,
    LocalModel,
    SlotChanged,
)
from shared.messages.trust import PeersWanted
from tests.simulation.world import Node, World

GB = 10**9
LOAD_SECONDS = 1.0
STEP_SECONDS = 0.25
"""How exactly electiond's deadlines are kept."""
Disk = Mapping[str, int]
"""Model names and file sizes in GB."""


class ElectionsWorld:
    """``disks``: what each node has. ``vram_gb``: what each offers."""

    def __init__(self, world: World, disks: Sequence[Disk], vram_gb: Sequence[int]) -> None:
        self.world = world
        self.disks = disks
        self.vram_gb = vram_gb
        self.elections: dict[int, Elections] = {}
        self.assigned: dict[int, AssignmentsChanged] = {}
        self.changes: list[tuple[float, int, tuple[str, ...]]] = []
        """Every change of assignments: when, on which node, which models."""
        self.broken: set[int] = set()
        """Nodes whose engine never becomes ready and says nothing."""
        world.on_publish.append(self._heard)
        world.at(STEP_SECONDS, self._step)

    # -- what happens to nodes ------------------------------------------------------------------------------------

    def start(self, *indexes: int) -> None:
        for index in indexes:
            node = self.world.nodes[index]
            self.elections[index] = Elections()
            self.assigned[index] = AssignmentsChanged(assignments=())
            self.world.start(index)
            inventory = InventoryChanged(models=tuple(_model(name, size) for name, size in self.disks[index].items()))
            vram = self.vram_gb[index] * GB
            device = DeviceChanged(device="cpu", vram_bytes=vram, total_bytes=vram, reserve_bytes=0, engine="e")
            self.world.tell(node, inventory)
            self.world.tell(node, device)
            config = ConfigApplied(configured=True, named=(), slot_limits=dict.fromkeys(MODEL_TYPES, 1))
            self.tell(node, config)
            assert node.gossip is not None
            said = node.gossip.snapshot(now=self.world.local(node))
            for message in said:
                if isinstance(message, PeersWanted):
                    self.tell(node, message)
            self.tell(node, LauncherReplaced(inventory=inventory, device=device, slots=()))
            self.tell(node, MembersReplaced(tuple(item for item in said if isinstance(item, MemberChanged))))

    def kill(self, index: int) -> None:
        self.world.kill(index)
        del self.elections[index]
        self.assigned.pop(index)

    # -- the machines ---------------------------------------------------------------------------------------------

    def tell(self, node: Node, stimulus: Stimulus | Tick) -> None:
        machine = self.elections.get(node.index)
        if machine is None:
            return
        effects = machine.handle(stimulus, now=self.world.local(node))
        machine.check_invariants()
        for effect in effects:
            self._perform(node, effect)

    def _heard(self, node: Node, message: codec.Message) -> None:
        if isinstance(message, MemberChanged | PeersWanted):
            self.tell(node, message)

    def _step(self) -> None:
        for index, machine in list(self.elections.items()):
            node = self.world.nodes[index]
            deadline = machine.next_deadline()
            if deadline is not None and deadline <= self.world.local(node):
                self.tell(node, Tick())
        self.world.at(STEP_SECONDS, self._step)

    def _perform(self, node: Node, effect: Effect) -> None:
        if not isinstance(effect, Publish) or not isinstance(effect.message, AssignmentsChanged):
            return
        before = {item.model for item in self.assigned[node.index].assignments}
        now = tuple(item.model for item in effect.message.assignments)
        self.assigned[node.index] = effect.message
        if before != set(now):
            self.changes.append((self.world.now, node.index, now))
        self.world.tell(node, effect.message)
        life = node.life
        for item in effect.message.assignments:
            if item.model not in before and node.index not in self.broken:
                self.world.at(LOAD_SECONDS, lambda item=item: self._ready(node, life, item.model))  # type: ignore[misc]

    def _ready(self, node: Node, life: int, model: ModelName) -> None:
        if not node.alive or node.life != life:
            return
        slot = SlotChanged(
            slot_id=SlotId(f"{node.name}-{model}"),
            model=model,
            type="llm",
            state="ready",
            reason="loaded",
            origin="allocation",
            parallel=1,
        )
        self.world.tell(node, slot)
        self.tell(node, slot)

    # -- looking ----------------------------------------------------------------------------------------------------

    def models_of(self, index: int) -> tuple[str, ...]:
        return tuple(item.model for item in self.assigned[index].assignments)

    def served(self) -> list[str]:
        return sorted(model for index in self.assigned for model in self.models_of(index))

    def idle(self) -> list[int]:
        return [index for index in self.assigned if not self.models_of(index)]

    def unserved_though_a_node_idles(self) -> set[str]:
        """Models that a free node has and could hold, and that nobody serves. The mesh's first promise is: none."""
        served = set(self.served())
        return {
            name
            for index in self.idle()
            for name, size in self.disks[index].items()
            if name not in served and size * 1.1 <= self.vram_gb[index]
        }

    def agreed(self) -> bool:
        """Whether all see the same services."""
        views = [serving_names(self._seen(self.world.nodes[index])) for index in self.elections]
        return all(view == set(self.served()) for view in views)

    def _seen(self, node: Node) -> Iterable[SeenNode]:
        return [node_of(item) for item in node.members.values() if item.state in ("alive", "suspect") or item.is_self]

    def free_as_seen_by(self, index: int) -> set[PeerId]:
        return {item.peer_id for item in self._seen(self.world.nodes[index]) if is_free(item)}

    def trace(self) -> str:
        return blake2b(repr(self.changes).encode(), digest_size=16).hexdigest()


def _model(name: str, size_gb: int) -> LocalModel:
    return LocalModel(name=ModelName(name), type="llm", path=f"/{name}.gguf", file_size_bytes=size_gb * GB)
