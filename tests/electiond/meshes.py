"""Several real cores of electiond with what lies between them: loading takes time, news travel late."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from services.electiond.elections import Elections, LauncherReplaced, MembersReplaced, PlaceRequested, Publish, Reply
from services.electiond.view import model_need_bytes
from shared.announced import available_model, hosted_models
from shared.ids import MeshId, PeerId
from shared.io.drive import Tick
from shared.messages.mesh import Announcement, MemberChanged, ServedModel
from shared.messages.models import AssignmentsChanged, LocalModel, ModelPlaced, SlotChanged
from shared.messages.trust import PeerAddresses, PeersWanted
from tests.electiond.machine import config
from tests.electiond.nodes import device, inventory, slot


@dataclass(slots=True)
class MeshNode:
    """One node: a core, its engines, and what it knows of the others."""

    peer_id: PeerId
    vram_bytes: int
    models: tuple[LocalModel, ...]
    named: tuple[str, ...] = ()
    client: bool = False
    broken: tuple[str, ...] = ()
    draining: bool = False
    held: bool = False
    """Its owner unloaded what it had: the mesh places nothing there by itself."""
    core: Elections = field(default_factory=Elections)
    slots: dict[str, SlotChanged] = field(default_factory=dict)
    seq: int = 0
    heard: dict[PeerId, int] = field(default_factory=dict)
    loads: list[tuple[float, str]] = field(default_factory=list)
    """Every load it began: when, and of what."""

    @property
    def serves(self) -> list[str]:
        return sorted(name for name, item in self.slots.items() if item.state == "ready")


class Mesh:
    """A virtual clock; ``lag`` seconds for news to reach another node, ``load`` seconds for an engine to be ready."""

    def __init__(self, lag: float = 0.5, load: float = 1.0) -> None:
        self.now = 0.0
        self.lag, self.load = lag, load
        self.nodes: dict[PeerId, MeshNode] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # -- what happens to it

    def join(self, *nodes: MeshNode) -> None:
        """Nodes start at once; they and the others hear of each other after the lag."""
        for node in nodes:
            assert node.peer_id not in self.nodes
            self.nodes[node.peer_id] = node
        for node in nodes:
            others = tuple(PeerAddresses(peer_id=peer, addresses=()) for peer in self.nodes if peer != node.peer_id)
            self._tell(node, PeersWanted(peers=others))
            self._tell(node, config(*node.named))
            self._tell(node, LauncherReplaced(inventory(*node.models), device(node.vram_bytes), ()))
            self._tell(node, MembersReplaced((self._member(node, is_self=True),)))
        for node in nodes:
            self._announce(node)
            for other in list(self.nodes.values()):
                if other not in nodes:
                    self._at(self.lag, lambda other=other, node=node: self._hear(node, other))

    def kill(self, peer_id: str, after: float = 3.0) -> None:
        """No word from it any more; the others hold it dead after a while."""
        gone = self.nodes.pop(PeerId(peer_id))
        word = replace(self._member(gone), state="dead")
        for node in self.nodes.values():
            self._at(after, lambda node=node: self._tell(node, word))

    def ask(self, peer_id: str, model: str, avoid: Sequence[str] = ()) -> Any:
        """``PlaceModel`` on that node; a placement elsewhere is loaded there, as a lease would."""
        node = self.nodes[PeerId(peer_id)]
        effects = self._tell(node, PlaceRequested(next(self._numbers), model))  # type: ignore[arg-type]
        reply = next(item.message for item in effects if isinstance(item, Reply))
        if isinstance(reply, ModelPlaced) and reply.peer_id in self.nodes and reply.peer_id != peer_id:
            self._load(self.nodes[reply.peer_id], str(reply.name_there or reply.model), "request")
        return reply

    def unload(self, peer_id: str) -> None:
        node = self.nodes[PeerId(peer_id)]
        node.held = node.held or bool(node.slots)
        for name in list(node.slots):
            gone = node.slots.pop(name)
            self._tell(node, replace(gone, state="unloaded", ended_by="owner", reason="unloaded by its owner"))
        self._announce(node)

    def drain(self, peer_id: str) -> None:
        node = self.nodes[PeerId(peer_id)]
        node.draining = True
        node.seq += 1
        self._tell(node, self._member(node, is_self=True))
        self._announce(node)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            deadlines = [(at, node) for node in self.nodes.values() if (at := node.core.next_deadline()) is not None]
            at, node = min(deadlines, key=lambda item: item[0], default=(end + 1, None))
            event = self._queue[0][0] if self._queue else end + 1
            if min(at, event) > end:
                self.now = end
                return
            if event <= at:
                self.now, _, what = heapq.heappop(self._queue)
                what()
            else:
                assert node is not None
                self.now = max(self.now, at)
                self._tell(node, Tick())
                left = node.core.next_deadline()
                assert left is None or left > self.now, f"{node.peer_id} asks to be woken at once, for ever"

    # -- what it does

    def _at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), what))

    def _tell(self, node: MeshNode, stimulus: Any) -> list[Any]:
        effects = node.core.handle(stimulus, now=self.now)
        node.core.check_invariants()
        for effect in effects:
            if isinstance(effect, Publish) and isinstance(effect.message, AssignmentsChanged):
                for item in effect.message.assignments:
                    if item not in node.core.assigned.assignments:
                        continue  # the load before it made room
                    self._load(node, str(item.model), item.origin)
                self._announce(node)
        return effects

    def _load(self, node: MeshNode, model: str, origin: str) -> None:
        if model in node.slots:
            return
        evicted = list(node.slots.values())
        node.slots = {model: slot(model, "loading", origin=origin)}
        node.loads.append((self.now, model))
        self._slot(node, node.slots[model])
        for gone in evicted:
            self._tell(node, replace(gone, state="unloaded", ended_by="eviction", reason="made room"))
        self._at(self.load, lambda: self._ready(node, model, origin))

    def _ready(self, node: MeshNode, model: str, origin: str) -> None:
        if self.nodes.get(node.peer_id) is not node or model not in node.slots:
            return
        if model in node.broken:
            self._slot(node, slot(model, "failed", origin=origin))
        else:
            self._slot(node, slot(model, "ready", origin=origin))

    def _slot(self, node: MeshNode, item: SlotChanged) -> None:
        node.slots[str(item.model)] = item
        self._tell(node, item)
        self._announce(node)

    def _announce(self, node: MeshNode) -> None:
        if self.nodes.get(node.peer_id) is not node:
            return
        node.seq += 1
        word = self._member(node)
        for other in list(self.nodes.values()):
            if other is not node:
                self._at(self._delay(node, other), lambda other=other: self._deliver(other, word))

    def _delay(self, node: MeshNode, other: MeshNode) -> float:
        """News travel at uneven speeds: 0.3 to 1.3 times the lag, the same in each run."""
        chance = blake2b(f"{node.peer_id} {other.peer_id} {node.seq}".encode(), digest_size=1).digest()[0]
        return self.lag * (0.3 + chance / 256)

    def _hear(self, node: MeshNode, other: MeshNode) -> None:
        if self.nodes.get(node.peer_id) is node and self.nodes.get(other.peer_id) is other:
            self._tell(node, self._member(other))

    def _deliver(self, to: MeshNode, word: MemberChanged) -> None:
        peer = word.announcement.peer_id
        if self.nodes.get(to.peer_id) is to and peer in self.nodes and word.announcement.seq > to.heard.get(peer, -1):
            to.heard[peer] = word.announcement.seq
            self._tell(to, word)

    def _member(self, node: MeshNode, is_self: bool = False) -> MemberChanged:
        available = {model.name: available_model(model) for model in node.models}
        said = Announcement(
            peer_id=node.peer_id,
            incarnation=1,
            seq=node.seq,
            mesh_id=MeshId("m"),
            version="0",
            name=f"node-{node.peer_id}",
            role="client" if node.client else "standby",
            state="draining" if node.draining else "active",
            vram_bytes=node.vram_bytes,
            available_models=tuple(available.values()),
            serving=tuple(
                ServedModel(model=item.model, type=available[item.model].type)
                for item in node.core.assigned.assignments
                if item.model in available
            ),
            hosted=hosted_models(node.slots.values()),
            requested_models=tuple(node.named),  # type: ignore[arg-type]
        )
        return MemberChanged(
            announcement=said,
            state="alive",
            reason="test",
            is_self=is_self,
            grant="client" if node.client else "member",
        )

    # -- what is true of it

    def served(self) -> dict[str, list[str]]:
        """Hosts by model."""
        found: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for name in node.serves:
                found.setdefault(name, []).append(str(node.peer_id))
        return {name: sorted(peers) for name, peers in sorted(found.items())}

    def unserved(self) -> list[tuple[str, str]]:
        """(model, idle node): nobody serves the model, and the node has it and the room, and nothing to do."""
        served = self.served()
        return [
            (str(model.name), str(node.peer_id))
            for node in self.nodes.values()
            if not node.core.assigned.assignments and not (node.client or node.named or node.draining or node.held)
            for model in node.models
            if model.type == "llm"
            and model.name not in node.broken
            and model.name not in served
            and model_need_bytes(available_model(model)) <= node.vram_bytes
        ]
