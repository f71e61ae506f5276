"""A node that has just entered a mesh: what it had placed on itself while it was alone may be placed anew, once.

``meshctl join`` starts a node before it is in the mesh, so it serves what a mesh of one would. When the mesh that it
enters serves that model already and lacks another one that this node has, the newcomer takes that one instead. Nodes
that are in a mesh are never moved. Source: docs/spec/allocation.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.electiond.placements import rendezvous
from services.electiond.view import Node
from shared.ids import ModelName

NEW_SECONDS = 20.0
"""Entering and hearing of all takes a few seconds; later it is a node like any other."""
TURN_SECONDS = 3.0
"""Nodes that serve the same model and enter together take turns, so that not all of them drop it."""


class Newcomer:
    def __init__(self) -> None:
        self._entered: float | None = None

    def entered(self, *, now: float) -> None:
        """This node is in another mesh from now on."""
        self._entered = now

    def ended(self) -> None:
        """It has been decided."""
        self._entered = None

    def moves_at(
        self, own: Node, others: Sequence[Node], model: ModelName, *, settled_at: float, now: float
    ) -> float | None:
        """From when on another model may take the place of ``model`` here; ``None``: it stays for now."""
        if self._entered is None:
            return None
        if now >= self._entered + NEW_SECONDS:
            self.ended()
            return None
        servers = [node for node in others if node.serves(model) and node.standing == "active"]
        if not servers:
            return None
        ranked = sorted(rendezvous(model, node.peer_id) for node in (own, *servers))
        return max(settled_at, self._entered) + ranked.index(rendezvous(model, own.peer_id)) * TURN_SECONDS
