"""Which models belong on a node. Stateless rules, total orders: every node derives the same answer.

What a node's owner names, and in words why a node has nothing; the mesh's own placements are in ``placements``.
Source: docs/spec/allocation.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from services.electiond.near import NearSets
from services.electiond.placements import MAX_ACTIVE, active_count, plan_placements, serving_names
from services.electiond.view import Node, model_need_bytes
from shared.ids import ModelName
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


def assign_model(
    node: Node, nodes: Sequence[Node], declined: Collection[ModelName], *, near: NearSets | None = None
) -> Assignment | None:
    """The one model that the mesh places on an unassigned ``node``, or ``None``.

    What the node itself still runs is no reason against it.
    """
    mine = replace(node, hosted=(), serving=(), requested=())
    others = [other for other in nodes if other.peer_id != node.peer_id]
    refused = {(name, node.peer_id) for name in declined}
    found = plan_placements([mine, *others], near=near, refused=refused).get(node.peer_id)
    return found.assignment() if found else None


def why_unassigned(node: Node, declined: Collection[ModelName], nodes: Sequence[Node] = ()) -> str:
    """In words: why :func:`assign_model` found nothing, and what this node could do with a file it has not."""
    if node.standing == "client":
        return "this node is a client: it serves nothing and asks the others"
    if node.standing == "draining":
        return "this node is draining: it takes nothing new; 'meshctl drain --off' ends that"
    models = [model for model in node.models.values() if model.type == "llm"]
    if not models:
        return "no model file of type llm in the models folders; put a .gguf there" + _with_a_copy(node, nodes)
    refused = [model for model in models if model.name in declined]
    if len(refused) == len(models):
        return f"{', '.join(sorted(model.name for model in refused))}: unloaded or failed; ask for it to load it again"
    left = [model for model in models if model.name not in declined]
    if any(node.fits(model) for model in left):
        if active_count(nodes) >= MAX_ACTIVE:
            return (
                f"every model on its disk that fits is served, and {active_count(nodes)} nodes are active already "
                f"(at most {MAX_ACTIVE}): it stands by"
            )
        return "every model on its disk that fits is served by another node already"
    smallest = min(left, key=lambda model: (model_need_bytes(model), model.name))
    return (
        f"no model fits: the smallest, {smallest.name}, needs {size_words(model_need_bytes(smallest))}, "
        f"{node.device} offers {size_words(node.vram_bytes)}" + _with_a_copy(node, nodes)
    )


def _with_a_copy(node: Node, nodes: Sequence[Node]) -> str:
    """Rule 4 for a node that cannot download: what it would get, and from whom."""
    if node.may_download:
        return ""
    able = replace(node, may_download=True, hosted=(), serving=(), requested=())
    others = [other for other in nodes if other.peer_id != node.peer_id]
    found = plan_placements([able, *(replace(other, requested=(ModelName("-"),)) for other in others)])
    placement = found.get(node.peer_id)
    if placement is None or placement.rule != 4:
        return ""
    holder = min((other for other in others if other.has(placement.model)), key=lambda other: other.peer_id)
    served = "more capacity for it" if placement.model in serving_names(others) else "which nobody serves"
    return f"; with a copy of {placement.model} from {holder.name} it could serve that, {served}"
