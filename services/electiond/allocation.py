"""Which models belong on a node. Stateless rules, total orders: every node derives the same answer.

Rules for a node that names no model, first match wins: (1) a model that cannot run without this node's memory and now
can, (2) on disk, fits, served by nobody, (3) on disk, served, would gain from more capacity, (4) the same with a
download, (5) join the largest model's group. On its own a node can only ever match rule 2: 1, 3 and 5 speak of groups
and 4 of peers to copy from. Source: docs/spec/allocation.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from services.electiond.view import Node, model_need_bytes
from shared.ids import ModelName
from shared.messages.mesh import AvailableModel
from shared.messages.models import Assignment, ModelType
from shared.words import size_words


def assign_named(
    node: Node, named: Sequence[ModelName], limits: Mapping[ModelType, int], assigned: Collection[ModelName] = ()
) -> tuple[Assignment, ...]:
    """The models that the owner named, as many as may be loaded at once, the largest that fit first.

    What is left over is a wish of the node (``requested_models``). ``limits``: how many of each type, -1 as many as
    fit together, 1 for a type that is not in it. What is ``assigned`` already stays: a larger file that appears later
    does not push it out. Ties: larger, then name.
    """
    present = sorted(
        (node.models[name] for name in set(named) if node.has(name)),
        key=lambda model: (model.name not in assigned, -model.file_size_bytes, model.name),
    )
    chosen: list[Assignment] = []
    room = node.vram_bytes
    per_type: dict[str, int] = {}
    for model in present:
        need = model_need_bytes(model)
        limit = limits.get(model.type, 1)
        if need > room or (limit != -1 and per_type.get(model.type, 0) >= limit):
            continue
        room -= need
        per_type[model.type] = per_type.get(model.type, 0) + 1
        chosen.append(Assignment(model=model.name, origin="flag", reason="named by this node's owner"))
    return tuple(chosen)


def assign_model(node: Node, nodes: Sequence[Node], declined: Collection[ModelName]) -> Assignment | None:
    """The one model that the mesh places on an unassigned ``node``, or ``None``.

    Never the llm-sized guide when the owner has a model of their own: a builtin model comes last.
    """
    candidates = [
        model
        for model in node.models.values()
        if model.type == "llm"
        and model.name not in declined
        and node.fits(model)
        and not any(other.hosts(model.name) for other in nodes if other.peer_id != node.peer_id)
    ]
    if not candidates:
        return None
    best = min(candidates, key=_preference)
    return Assignment(
        model=best.name,
        origin="allocation",
        reason=f"the largest model on {node.name}'s disk that fits ({size_words(model_need_bytes(best))} of "
        f"{size_words(node.vram_bytes)}) and that no other node serves",
    )


def why_unassigned(node: Node, declined: Collection[ModelName]) -> str:
    """In words: why :func:`assign_model` found nothing."""
    models = [model for model in node.models.values() if model.type == "llm"]
    if not models:
        return "no model file of type llm in the models folders; put a .gguf there"
    refused = [model for model in models if model.name in declined]
    if len(refused) == len(models):
        return f"{', '.join(sorted(model.name for model in refused))}: unloaded or failed; ask for it to load it again"
    left = [model for model in models if model.name not in declined]
    if any(node.fits(model) for model in left):
        return "every model on its disk that fits is served by another node already"
    smallest = min(left, key=lambda model: (model_need_bytes(model), model.name))
    return (
        f"no model fits: the smallest, {smallest.name}, needs {size_words(model_need_bytes(smallest))}, "
        f"{node.device} offers {size_words(node.vram_bytes)}"
    )


def _preference(model: AvailableModel) -> tuple[bool, int, str]:
    return (model.builtin, -model.file_size_bytes, model.name)
