"""Who hosts a model, and who loads one that a request needs.

Every node that holds a model whole is a host of it; there is nothing to elect among them. A split over several nodes
has one host per plan (``group.elect_host``). Source: docs/spec/election.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.electiond.promises import Promises
from services.electiond.view import Node
from shared.ids import ModelName, PeerId


def elect_hosts(model: ModelName, nodes: Sequence[Node]) -> tuple[PeerId, ...]:
    """Peer ids of the hosts of ``model``, strongest first: a total order, so that all nodes agree."""
    holders = [node for node in nodes if node.hosts(model) and node.peer_id]
    return tuple(node.peer_id for node in sorted(holders, key=lambda node: (-node.vram_bytes, node.peer_id)))


def place(
    model: ModelName,
    nodes: Sequence[Node],
    *,
    promises: Promises | None = None,
    now: float = 0.0,
    avoid: Collection[PeerId] = (),
) -> Node | None:
    """The node that should load ``model`` for a request: it has the file and the room. ``None``: no node can.

    First one that is starting it already; then one that has nothing else of this type loaded; then one whose model is
    not freshly ready; then any. Of equals this node, then the one with most memory, then by peer id.
    """
    told = promises or Promises()
    able = [node for node in nodes if _can(node, model) and (node.is_self or node.peer_id not in avoid)]

    def rank(node: Node) -> int:
        others = {
            item.model
            for item in (*node.hosted, *node.serving)
            if item.type == node.models[model].type and item.model != model
        }
        starting = told.starting(node.peer_id, now=now)
        if node.serves(model) or starting == model:
            return 0
        if not others and starting is None:
            return 1
        young = starting is not None or any(told.is_young(other, node.peer_id, now=now) for other in others)
        return 3 if young else 2

    return min(
        able,
        key=lambda node: (node.peer_id in avoid, rank(node), not node.is_self, -node.vram_bytes, node.peer_id),
        default=None,
    )


def _can(node: Node, model: ModelName) -> bool:
    """A node that drains still serves its own users."""
    ready = node.standing == "active" or (node.is_self and node.standing == "draining")
    return ready and node.has(model) and node.fits(node.models[model])
