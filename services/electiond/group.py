"""Models that no node can hold alone: which nodes together could, and who would be the host.

The rules of a split. Running one is not part of this version: what these rules find is told, and nothing is launched.
Source: docs/spec/election.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.electiond.near import NearSets
from services.electiond.view import Node, model_need_bytes
from shared.ids import ModelName, PeerId


def candidates(host: Node, model: ModelName, nodes: Sequence[Node], near: NearSets) -> list[Node]:
    """``host``, then the near nodes that may join it: by round trip, unknown ones last, then by peer id.

    A guest takes no part, nor does a node that has no file of the model and no way to get one.
    """
    others = [
        node
        for node in nodes
        if node.peer_id != host.peer_id
        and _may_take_part(node, model)
        and node.vram_bytes > 0
        and near.near(host.peer_id, node.peer_id)
    ]

    def order(node: Node) -> tuple[bool, float, PeerId]:
        rtt = near.rtt_seconds(host.peer_id, node.peer_id)
        return (rtt is None, rtt or 0.0, node.peer_id)

    return [host, *sorted(others, key=order)]


def cover(ordered: Sequence[Node], need_bytes: int, incumbents: Collection[PeerId] = ()) -> tuple[Node, ...] | None:
    """The first nodes of ``ordered`` whose memory covers the need, no more than it takes; ``None``: not enough.

    ``incumbents``, when the host and they are all there and cover it, stay as they are: a node that the plan does not
    need changes nothing.
    """
    kept = tuple(node for node in ordered if node.peer_id in incumbents)
    if kept and len(kept) == len(set(incumbents)) and kept[0] == ordered[0] and _sum(kept) >= need_bytes:
        return kept
    for count in range(1, len(ordered) + 1):
        if _sum(ordered[:count]) >= need_bytes:
            return tuple(ordered[:count])
    return None


def elect_host(
    model: ModelName,
    nodes: Sequence[Node],
    near: NearSets,
    *,
    incumbent: PeerId | None = None,
    failed: Collection[PeerId] = (),
) -> PeerId | None:
    """The host of a split: the highest ``(vram_bytes, peer_id)`` of those whose near nodes cover the need.

    An ``incumbent`` that still can stays. A node that ``failed`` to load it is passed over: memory is a claim.
    """
    able = [
        node
        for node in nodes
        if node.has(model)
        and _may_take_part(node, model)
        and node.peer_id not in failed
        and cover(candidates(node, model, nodes, near), model_need_bytes(node.models[model])) is not None
    ]
    if any(node.peer_id == incumbent for node in able):
        return incumbent
    best = max(able, key=lambda node: (node.vram_bytes, node.peer_id), default=None)
    return best.peer_id if best else None


def best_group(model: ModelName, nodes: Sequence[Node], near: NearSets) -> list[Node]:
    """The group with most memory, host first, whether or not it is enough; empty when no node may host it."""
    groups = [candidates(node, model, nodes, near) for node in nodes if node.has(model) and _may_take_part(node, model)]
    return max(groups, key=lambda group: (_sum(group), group[0].vram_bytes, group[0].peer_id), default=[])


def completes(node: Node, model: ModelName, nodes: Sequence[Node], near: NearSets) -> bool:
    """Whether a group can hold the model with ``node`` and none can without it."""
    without = [other for other in nodes if other.peer_id != node.peer_id]
    return elect_host(model, without, near) is None and elect_host(model, [*without, node], near) is not None


def newer_plan(one: tuple[int, PeerId], other: tuple[int, PeerId]) -> bool:
    """Whether plan ``one`` (term, host) supersedes ``other``."""
    return one > other


def _may_take_part(node: Node, model: ModelName) -> bool:
    return node.trusted and node.standing == "active" and (node.has(model) or node.may_download)


def _sum(nodes: Sequence[Node]) -> int:
    return sum(node.vram_bytes for node in nodes)
