"""Who hosts a model. Every node that holds a model whole is a host of it; there is nothing to elect among them.

A split over several nodes has one host per plan, the highest ``(vram_bytes, peer_id)`` of its ready nodes.
Source: docs/spec/election.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.electiond.view import Node
from shared.ids import ModelName, PeerId


def elect_hosts(model: ModelName, nodes: Sequence[Node]) -> tuple[PeerId, ...]:
    """Peer ids of the hosts of ``model``, strongest first: a total order, so that all nodes agree."""
    holders = [node for node in nodes if node.hosts(model) and node.peer_id]
    return tuple(node.peer_id for node in sorted(holders, key=lambda node: (-node.vram_bytes, node.peer_id)))


def place(model: ModelName, nodes: Sequence[Node]) -> Node | None:
    """The node that should load ``model`` for a request: it has the file and the room.

    This node when it can, else the one with most memory; ``None`` when no node can.
    """
    able = [node for node in nodes if node.has(model) and node.fits(node.models[model])]
    return min(able, key=lambda node: (not node.is_self, -node.vram_bytes, node.peer_id), default=None)
