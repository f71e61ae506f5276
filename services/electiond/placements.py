"""What the mesh places on nodes whose owners name nothing: five rules, one answer for all nodes that are free.

Every node computes the whole answer and takes its own part, so that equal nodes that arrive together do not all pick
the same model. Rules for a node, first match wins:

1. a model that cannot run without this node's memory, and now can
2. on disk, fits, served by nobody
3. on disk, fits, served, and would gain from another host
4. the same two with a download
5. join the group of the largest model

Rules 1, 2, and 4 for an unserved model, hold at once; 3, 5, and 4 for a served one, only while fewer than
``max_active`` nodes serve something: then the node stands by. Source: docs/spec/allocation.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

from services.electiond.group import best_group, candidates, cover, elect_host
from services.electiond.near import NearSets
from services.electiond.view import Node, model_need_bytes
from shared.ids import ModelName, PeerId
from shared.messages.mesh import AvailableModel
from shared.messages.models import Assignment
from shared.words import size_words

MAX_ACTIVE = 10
"""Nodes that serve something before further ones only stand by."""

Rule = Literal[1, 2, 3, 4, 5]
Refused = Collection[tuple[ModelName, PeerId]]


@dataclass(frozen=True, slots=True)
class Placement:
    """``model`` goes to ``peer_id`` by ``rule``."""

    model: ModelName
    peer_id: PeerId
    rule: Rule
    reason: str

    def assignment(self) -> Assignment:
        return Assignment(model=self.model, origin="allocation", reason=self.reason)


@lru_cache(maxsize=65_536)
def rendezvous(model: ModelName, peer_id: PeerId) -> bytes:
    """Higher is first: one order of the nodes for each model, another one for the next."""
    return blake2b(f"{model}\0{peer_id}".encode(), digest_size=8).digest()


def is_free(node: Node) -> bool:
    """Whether the mesh may place something on the node: nothing is there yet and its owner names nothing."""
    return node.standing == "active" and not node.is_active and not node.requested


def active_count(nodes: Iterable[Node]) -> int:
    return sum(1 for node in nodes if node.is_active and node.standing != "draining")


def serving_names(nodes: Iterable[Node]) -> set[ModelName]:
    """Models that some node serves or is about to, and that keeps them."""
    return {item.model for node in nodes if node.standing != "draining" for item in (*node.hosted, *node.serving)}


def plan_placements(
    nodes: Sequence[Node],
    *,
    near: NearSets | None = None,
    refused: Refused = frozenset(),
    max_active: int = MAX_ACTIVE,
) -> dict[PeerId, Placement]:
    """What every free node of ``nodes`` is given, by peer id. ``refused``: (model, node) pairs that are out."""
    return _Plan(nodes, near or NearSets(), refused, max_active).run()


class _Plan:
    def __init__(self, nodes: Sequence[Node], near: NearSets, refused: Refused, max_active: int) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.peer_id)
        self.near = near
        self.refused = refused
        self.free = {node.peer_id: node for node in self.nodes if is_free(node)}
        self.hosts: dict[ModelName, int] = {}
        for node in self.nodes:
            for name in serving_names([node]):
                self.hosts[name] = self.hosts.get(name, 0) + 1
        self.room = max_active - active_count(self.nodes)
        self.models = sorted(_llms(self.nodes).values(), key=_preference)
        self.given: dict[PeerId, Placement] = {}

    def run(self) -> dict[PeerId, Placement]:
        if not self.free:
            return {}
        unserved = [model.name for model in self.models if model.name not in self.hosts]
        for name in unserved:
            self._complete(name)
        for name in unserved:
            if name not in self.hosts:
                self._give(name, self._holders(name), 2)
        self._replicate(3)
        for name in unserved:
            if name not in self.hosts:
                self._give(name, self._downloaders(name), 4)
        self._replicate(4)
        self._join_largest()
        return self.given

    # -- the rules ----------------------------------------------------------------------------------------------

    def _complete(self, name: ModelName) -> None:
        """Rule 1: those free nodes that the group takes which cannot exist without them."""
        splitters = {node.peer_id: node for node in self._free_nodes(name) if node.may_split}
        if not splitters:
            return
        without = [node for node in self.nodes if node.peer_id not in splitters]
        host = elect_host(name, self.nodes, self.near)
        if host is None or elect_host(name, without, self.near) is not None:
            return
        first = next(node for node in self.nodes if node.peer_id == host)
        group = cover(candidates(first, name, self.nodes, self.near), model_need_bytes(first.models[name])) or ()
        for node in group:
            if node.peer_id in splitters and len(group) > 1:
                self._place(node, name, 1, f"{name} runs only on several nodes; {first.name} is its host")

    def _replicate(self, rule: Literal[3, 4]) -> None:
        """Rules 3 and 4 for served models: the model with fewest hosts first, until the active group is full."""
        while self.room > 0:
            for model in sorted(
                (model for model in self.models if model.name in self.hosts and not model.builtin),
                key=lambda model: (self.hosts[model.name], *_preference(model)),
            ):
                able = self._holders(model.name) if rule == 3 else self._downloaders(model.name)
                if self._give(model.name, able, rule):
                    break
            else:
                return

    def _join_largest(self) -> None:
        """Rule 5: one more node for the group of the largest model that runs on several."""
        splitters = [node for node in self.free.values() if node.may_split]
        for model in self.models:
            for node in sorted(splitters, key=lambda node: rendezvous(model.name, node.peer_id), reverse=True):
                if self.room <= 0:
                    return
                group = best_group(model.name, self.nodes, self.near)
                if len(group) > 1 and node in group and model.name in self.hosts and node.peer_id in self.free:
                    self._place(
                        node, model.name, 5, f"joins the group of {model.name}, the largest that runs on several"
                    )

    # -- who may ----------------------------------------------------------------------------------------------

    def _free_nodes(self, name: ModelName) -> list[Node]:
        """Best first: the order is another one for each model."""
        able = [node for node in self.free.values() if (name, node.peer_id) not in self.refused]
        return sorted(able, key=lambda node: (rendezvous(name, node.peer_id), node.peer_id), reverse=True)

    def _holders(self, name: ModelName) -> list[Node]:
        return [
            node
            for node in self._free_nodes(name)
            if node.has(name) and node.models[name].type == "llm" and node.fits(node.models[name])
        ]

    def _downloaders(self, name: ModelName) -> list[Node]:
        """Nodes that lack the file, can get it, and can then use it."""
        model = next(model for model in self.models if model.name == name)
        return [
            node
            for node in self._free_nodes(name)
            if node.may_download and not node.has(name) and node.fits(model) and not model.builtin
        ]

    # -- giving -----------------------------------------------------------------------------------------------

    def _give(self, name: ModelName, able: Sequence[Node], rule: Rule) -> bool:
        if not able:
            return False
        node = able[0]
        self._place(node, name, rule, self._reason(node, name, rule))
        return True

    def _place(self, node: Node, name: ModelName, rule: Rule, reason: str) -> None:
        self.given[node.peer_id] = Placement(name, node.peer_id, rule, reason)
        del self.free[node.peer_id]
        self.hosts[name] = self.hosts.get(name, 0) + 1
        self.room -= 1

    def _reason(self, node: Node, name: ModelName, rule: Rule) -> str:
        if rule == 4:
            return f"{node.name} can download it, it fits, and " + (
                f"{self.hosts[name]} serve it so far" if name in self.hosts else "nobody serves it"
            )
        room = f"({size_words(model_need_bytes(node.models[name]))} of {size_words(node.vram_bytes)})"
        if rule == 3:
            count = self.hosts[name]
            return (
                f"on {node.name}'s disk and fits {room}; {count} {'node serves' if count == 1 else 'nodes serve'} it, "
                "one more adds capacity"
            )
        largest = min(
            (
                model
                for model in node.models.values()
                if model.type == "llm" and node.fits(model) and (model.name == name or model.name not in self.hosts)
            ),
            key=_preference,
        )
        if largest.name == name:
            return f"the largest model on {node.name}'s disk that fits {room} and that no other node serves"
        return f"on {node.name}'s disk, fits {room}, and no other node serves it"


def _llms(nodes: Sequence[Node]) -> dict[ModelName, AvailableModel]:
    """Models of type llm by name; where nodes differ about one, the word that names the larger need."""
    found: dict[ModelName, AvailableModel] = {}
    for node in nodes:
        for model in node.models.values():
            known = found.get(model.name)
            if model.type == "llm" and (known is None or _weight(model) > _weight(known)):
                found[model.name] = model
    return found


def _weight(model: AvailableModel) -> tuple[int, int, bool]:
    return (model_need_bytes(model), model.file_size_bytes, not model.builtin)


def _preference(model: AvailableModel) -> tuple[bool, int, str]:
    """Never the guide when an owner has a model of their own; then larger, then name."""
    return (model.builtin, -model.file_size_bytes, model.name)
