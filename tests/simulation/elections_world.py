"""The real electiond machines and slot tables on the world's nodes, with an engine that loads in a second.

gossipd's publications reach each node's elections as they would over the bus; what electiond assigns goes to the node's
slot table, whose engine becomes ready after a while, and so gossipd and the other nodes hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from services.electiond.elections import Elections
from services.electiond.placements import is_free, serving_names
from services.electiond.stimuli import ConfigApplied, Effect, LauncherReplaced, MembersReplaced, Publish, Stimulus
from services.electiond.view import Node as SeenNode
from services.electiond.view import node_of
from services.launcherd.model_info import ModelFile
from services.launcherd.slot_events import (
    AssignmentsGiven,
    DeviceMeasured,
    EngineEndpoint,
    EngineHealthy,
    EngineReady,
    EngineStopped,
    InventoryScanned,
    KnownModel,
    ProbeEngine,
    StartEngine,
    StopEngine,
)
from services.launcherd.slot_events import Effect as SlotEffect
from services.launcherd.slot_events import Publish as SlotPublish
from services.launcherd.slot_events import Stimulus as SlotStimulus
from services.launcherd.slots import SlotTable
from shared import codec
from shared.config import ModelsSection, NodeConfig
from shared.ids import PeerId, SlotId
from shared.io.drive import Tick
from shared.messages.mesh import MemberChanged
from shared.messages.models import (
    MODEL_TYPES,
    AssignmentsChanged,
    DeviceChanged,
    InventoryChanged,
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
        self.slots: dict[int, SlotTable] = {}
        self.reported: dict[int, list[InventoryChanged | DeviceChanged | SlotChanged]] = {}
        """What each node's slot table said, newest first."""
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
            self.assigned[index] = AssignmentsChanged(assignments=())
            self.world.start(index)
            self.reported[index] = []
            config = NodeConfig(models=ModelsSection(max_loaded_models=(1,)), configured=True)
            self.slots[index] = SlotTable(config, cores=4, prefix=f"{node.name}.{node.life}.")
            total = self.vram_gb[index] * GB
            self._slot(node, DeviceMeasured(device="cpu", total_bytes=total, reserve_bytes=0, engine="e"))
            known = tuple(_model(name, size) for name, size in self.disks[index].items())
            self._slot(node, InventoryScanned(models=known))
            # electiond hears of both daemons by snapshots, gossipd's with the peers it keeps in touch with.
            self.elections[index] = Elections()
            self.tell(node, ConfigApplied(configured=True, named=(), slot_limits=dict.fromkeys(MODEL_TYPES, 1)))
            assert node.gossip is not None
            said = node.gossip.snapshot(now=self.world.local(node))
            for message in said:
                if isinstance(message, PeersWanted):
                    self.tell(node, message)
            inventory = next((item for item in self.reported[index] if isinstance(item, InventoryChanged)), None)
            device = next((item for item in self.reported[index] if isinstance(item, DeviceChanged)), None)
            self.tell(node, LauncherReplaced(inventory=inventory, device=device, slots=()))
            self.tell(node, MembersReplaced(tuple(item for item in said if isinstance(item, MemberChanged))))

    def kill(self, index: int) -> None:
        self.world.kill(index)
        del self.elections[index]
        del self.slots[index]
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
            due = self.slots[index].next_deadline()
            if due is not None and due <= self.world.local(node):
                self._slot(node, Tick())
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
        self._slot(node, AssignmentsGiven(assignments=effect.message.assignments))

    # -- the slot tables ------------------------------------------------------------------------------------------

    def _slot(self, node: Node, stimulus: SlotStimulus | Tick) -> None:
        table = self.slots.get(node.index)
        if table is None:
            return
        effects = table.handle(stimulus, now=self.world.local(node))
        table.check_invariants()
        for effect in effects:
            self._do(node, effect)

    def _do(self, node: Node, effect: SlotEffect) -> None:
        life = node.life
        match effect:
            case SlotPublish(message=InventoryChanged() | DeviceChanged() | SlotChanged() as message):
                self.reported[node.index].insert(0, message)
                del self.reported[node.index][20:]
                self.world.tell(node, message)
                self.tell(node, message)
            case StartEngine(slot_id=slot_id) if node.index not in self.broken:
                self.world.at(LOAD_SECONDS, lambda: self._later(node, life, _ready(slot_id)))
            case StopEngine(slot_id=slot_id):
                self.world.at(0.0, lambda: self._later(node, life, EngineStopped(slot_id=slot_id)))
            case ProbeEngine(slot_id=slot_id):
                self.world.at(0.0, lambda: self._later(node, life, EngineHealthy(slot_id=slot_id)))

    def _later(self, node: Node, life: int, stimulus: SlotStimulus) -> None:
        if node.alive and node.life == life:
            self._slot(node, stimulus)

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


def _ready(slot_id: SlotId) -> EngineReady:
    endpoint = EngineEndpoint(pid=1, port=1, base_url="http://127.0.0.1:1", api_key="", log_path="")
    return EngineReady(slot_id=slot_id, endpoint=endpoint, load_seconds=LOAD_SECONDS)


def _model(name: str, size_gb: int) -> KnownModel:
    return KnownModel(
        file=ModelFile(
            name=name,
            type="llm",
            path=f"/{name}.gguf",
            parts=(f"/{name}.gguf",),
            architecture="llama",
            trained_context_tokens=512,
            parameters=1,
            file_size_bytes=size_gb * GB,
            kv_bytes_per_token=0,
            compute_bytes=0,
            quantization="F16",
            chat_template=True,
        )
    )
