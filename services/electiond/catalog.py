"""The catalog: every model the mesh has or was asked for, with a status and a reason in words.

Source: docs/spec/catalog.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from services.electiond.view import Node, model_need_bytes
from shared.ids import ModelName
from shared.messages.mesh import AvailableModel
from shared.messages.models import CatalogStatus, MeshModel, SlotChanged
from shared.words import size_words

WAITING_STATES = ("queued", "loading", "restarting")
NAME_CHARACTERS = 200
"""Of a name that somebody asked for, so much is compared and repeated; it may be megabytes."""


def build_catalog(
    nodes: Sequence[Node], own_slots: Iterable[SlotChanged], assigned: Iterable[ModelName]
) -> tuple[MeshModel, ...]:
    """All models by name. ``own_slots`` and ``assigned`` are this node's, for status and reason."""
    slots = {slot.model: slot for slot in own_slots}
    pending = set(assigned)
    ordered = sorted(nodes, key=lambda node: node.peer_id)
    names = {name for node in nodes for name in (*node.models, *node.requested)}
    names |= {item.model for node in nodes for item in node.hosted}
    return tuple(_entry(name, ordered, slots.get(name), name in pending) for name in sorted(names))


def _entry(name: ModelName, nodes: Sequence[Node], slot: SlotChanged | None, assigned: bool) -> MeshModel:
    holders = [node for node in nodes if node.has(name)]
    hosts = [node for node in nodes if node.hosts(name)]
    requested = any(name in node.requested for node in nodes)
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
            reason=f"{name} is asked for but no node has its file; put {name}.gguf into a models folder",
            requested=True,
        )
    model = holders[0].models[name]
    status, reason = _status(model, holders, hosts, slot, assigned)
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
        nodes_serving=tuple(
            node.peer_id
            for node in nodes
            if node.peer_id and (node.hosts(name) or any(item.model == name for item in node.serving))
        ),
        hosts=tuple(node.peer_id for node in hosts if node.peer_id),
        requested=requested,
        builtin=model.builtin,
    )


def _status(
    model: AvailableModel, holders: Sequence[Node], hosts: Sequence[Node], slot: SlotChanged | None, assigned: bool
) -> tuple[CatalogStatus, str]:
    if hosts:
        return "ready", f"served by {_names(hosts)}"
    if slot is not None and slot.state in WAITING_STATES:
        return "loading", slot.reason
    if slot is not None and slot.state == "failed":
        return "failed", slot.reason
    if not any(node.fits(model) for node in holders):
        return "needs_capacity", too_large_words(model, holders)
    if slot is not None and slot.state in ("draining", "stopping"):
        return "unloaded", slot.reason
    if assigned:
        return "loading", "about to be loaded"
    return "unloaded", "on disk; loads when it is asked for"


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(node.name for node in nodes)


def too_large_words(model: AvailableModel, nodes: Sequence[Node]) -> str:
    """Why no single node can serve the model, with the numbers."""
    best = max(nodes, key=lambda node: (node.vram_bytes, node.peer_id))
    return (
        f"needs {size_words(model_need_bytes(model))} and the largest node that has it, {best.name}, "
        f"offers {size_words(best.vram_bytes)} on {best.device}; "
        "use a smaller quantization or context, or a machine with more memory"
    )


def resolve(text: str, catalog: Iterable[MeshModel]) -> ModelName | None:
    """The catalog name that a person's ``text`` means: exact, or a file name or path of the model."""
    names = {model.name for model in catalog}
    stem = text.rsplit("/", 1)[-1].removesuffix(".gguf")
    for candidate in (text, stem):
        if candidate in names:
            return ModelName(candidate)
    return None


def nearest_names(text: str, catalog: Iterable[MeshModel], limit: int = 3) -> tuple[str, ...]:
    """Catalog names that ``text`` may have meant."""
    names = [model.name for model in catalog]
    return tuple(difflib.get_close_matches(text[:NAME_CHARACTERS], names, n=limit, cutoff=0.4))
