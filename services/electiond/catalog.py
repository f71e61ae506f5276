"""The catalog: every model the mesh has or was asked for, with a status and a reason in words.

Source: docs/spec/catalog.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.electiond.group import best_group, cover
from services.electiond.near import NearSets
from services.electiond.view import Node, model_need_bytes, stem
from shared.ids import ModelName
from shared.messages.mesh import AvailableModel
from shared.messages.models import CatalogStatus, MeshModel, SlotChanged
from shared.words import size_words

WAITING_STATES = ("queued", "loading", "restarting")
GROUP_SHOWN = 5
"""Nodes whose memory is told one by one."""
NAME_CHARACTERS = 200
"""Of a name that somebody asked for, so much is compared and repeated; it may be megabytes."""


def build_catalog(
    nodes: Sequence[Node],
    own_slots: Iterable[SlotChanged],
    assigned: Iterable[ModelName],
    near: NearSets | None = None,
) -> tuple[MeshModel, ...]:
    """All models by name. ``own_slots`` and ``assigned`` are this node's, under its own names: status and reason."""
    ordered = sorted(nodes, key=lambda node: node.peer_id)
    own = next((node for node in ordered if node.is_self), None)

    def mesh_name(local: ModelName) -> ModelName:
        return own.mesh_name(local) if own else local

    slots = {mesh_name(slot.model): slot for slot in own_slots}
    pending = set(map(mesh_name, assigned))
    names = {name for node in nodes for name in (*node.models, *node.requested)}
    names |= {item.model for node in nodes for item in node.hosted}
    by_name = {name: _Entry(name, ordered, slots.get(name), name in pending, near or NearSets()) for name in names}
    return tuple(by_name[name].build() for name in sorted(names))


@dataclass(frozen=True, slots=True)
class _Entry:
    """Everything that decides about one model's line. ``slot`` and ``assigned`` are this node's."""

    name: ModelName
    nodes: Sequence[Node]
    slot: SlotChanged | None
    assigned: bool
    near: NearSets

    def build(self) -> MeshModel:
        name = self.name
        holders = [node for node in self.nodes if node.has(name)]
        hosts = [node for node in self.nodes if node.hosts(name)]
        requested = any(name in node.requested for node in self.nodes)
        if not holders and hosts:
            served = next(item for node in hosts for item in node.hosted if item.model == name)
            return MeshModel(
                name=name,
                type=served.type,
                status="ready",
                reason=f"served by {_names(hosts)}; its file is gone from the models folders",
                nodes_serving=tuple(node.peer_id for node in hosts if node.peer_id),
                hosts=tuple(node.peer_id for node in hosts if node.peer_id),
                requested=requested,
            )
        if not holders:
            return MeshModel(
                name=name,
                type="llm",
                status="needs_capacity",
                reason=f"{name} is asked for but no node has its file; put {name}.gguf into a models folder, or get it "
                "with 'meshctl pull'",
                requested=True,
            )
        model = holders[0].models[name]
        status, reason = self._status(model, holders, hosts)
        own = next((node for node in holders if node.is_self), None)
        here = own.local_name(name) if own else name
        return MeshModel(
            name=name,
            type=model.type,
            status=status,
            reason=reason,
            file_size_bytes=model.file_size_bytes,
            need_bytes=model_need_bytes(model),
            context_tokens=model.context_tokens,
            architecture=model.architecture,
            quantization=model.quantization,
            parameters=model.parameters,
            nodes_on_disk=tuple(node.peer_id for node in holders if node.peer_id),
            nodes_serving=tuple(node.peer_id for node in self.nodes if node.peer_id and node.serves(name)),
            hosts=tuple(node.peer_id for node in hosts if node.peer_id),
            requested=requested,
            builtin=model.builtin,
            name_here=here if here != name else ModelName(""),
        )

    def _status(
        self, model: AvailableModel, holders: Sequence[Node], hosts: Sequence[Node]
    ) -> tuple[CatalogStatus, str]:
        slot = self.slot
        routable = [node for node in hosts if node.standing != "draining" or node.is_self]
        if routable:
            return "ready", f"served by {_names(routable)}"
        if slot is not None and slot.state in WAITING_STATES:
            return "loading", slot.reason
        if slot is not None and slot.state == "failed":
            return "failed", slot.reason
        able = [node for node in holders if node.fits(node.models[self.name])]
        if not able:
            return "needs_capacity", too_large_words(model, holders, self.nodes, self.near)
        if slot is not None and slot.state in ("draining", "stopping"):
            return "unloaded", slot.reason
        if self.assigned:
            return "loading", "about to be loaded"
        coming = [node for node in able if node.serves(self.name) and not node.is_self and node.standing != "draining"]
        if coming:
            return "loading", f"being loaded by {_names(coming)}"
        if all(node.standing == "draining" and not node.is_self for node in able):
            return (
                "needs_capacity",
                f"{_names(able)} could serve it but takes nothing new; copy the file to another node",
            )
        if not any(node.is_self for node in able):
            return "unloaded", f"on the disk of {_names(able)}; loads there when it is asked for"
        return "unloaded", "on disk; loads when it is asked for"


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(node.name for node in nodes)


def too_large_words(
    model: AvailableModel, holders: Sequence[Node], nodes: Sequence[Node] = (), near: NearSets | None = None
) -> str:
    """Why no single node can serve the model, with the numbers, and what the near nodes offer together."""
    need = model_need_bytes(model)
    best = max(holders, key=lambda node: (node.vram_bytes, node.peer_id))
    words = (
        f"needs {size_words(need)} and the largest node that has it, {best.name}, "
        f"offers {size_words(best.vram_bytes)} on {best.device}; "
    )
    group = best_group(model.name, nodes, near or NearSets()) if model.type == "llm" else []
    if len(group) > 1:
        shares = " + ".join(size_words(node.vram_bytes) for node in group[:GROUP_SHOWN])
        more = f" + {len(group) - GROUP_SHOWN} more" if len(group) > GROUP_SHOWN else ""
        if cover(group, need) is None:
            return f"{words}the near nodes that have it offer {shares}{more}; add a node or use a smaller quantization"
        words += f"the near nodes that have it offer {shares}{more}, but one model runs on one node in this version; "
    return words + "use a smaller quantization or context, or a machine with more memory"


def resolve(text: str, catalog: Iterable[MeshModel]) -> ModelName | None:
    """The catalog name that a person's ``text`` means: exact, or a file name or path of the model."""
    names = {model.name for model in catalog}
    for candidate in (text, stem(text)):
        if candidate in names:
            return ModelName(candidate)
    return None


def nearest_names(text: str, catalog: Iterable[MeshModel], limit: int = 3) -> tuple[str, ...]:
    """Catalog names that ``text`` may have meant."""
    names = [model.name for model in catalog]
    return tuple(difflib.get_close_matches(text[:NAME_CHARACTERS], names, n=limit, cutoff=0.4))
