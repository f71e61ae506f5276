"""When the mesh has been quiet for long enough to place something on this node.

A change among the other nodes is acted upon 2 s after the last one; one that takes a service away (a host died, stopped
serving, or left) 3 s after, so that a node which comes back meanwhile causes nothing; never later than 10 s after the
first. A node that is alone waits for nothing; one that has just started in a mesh waits up to 5 s for the others.
Source: docs/spec/election.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.electiond.view import Node
from shared.ids import ModelName, PeerId

SETTLE_SECONDS = 2.0
DEBOUNCE_SECONDS = 3.0
LATEST_SECONDS = 10.0
"""After the first change: a mesh that never rests must not keep a model unserved."""
PEER_WAIT_SECONDS = 5.0
"""A node that starts in a mesh hears of the others within a second or two, unless they are all gone."""

Service = tuple[PeerId, ModelName]


class Pace:
    """Fed with the other nodes on every change; :meth:`ready_at` says from when on a placement may be made."""

    def __init__(self) -> None:
        self._seen: frozenset[tuple[object, ...]] = frozenset()
        self._services: frozenset[Service] = frozenset()
        self._first: float | None = None
        self._until = float("-inf")
        self._waits_for_peers: float | None = None
        self._expected = False

    def expect_peers(self, expected: bool, *, now: float) -> None:
        """Whether gossipd looks for other nodes. The first time it does, they are waited for."""
        if expected and not self._expected and not self._seen:
            self._waits_for_peers = now + PEER_WAIT_SECONDS
        self._expected = expected

    def observe(self, others: Sequence[Node], *, now: float) -> None:
        """Take the other nodes as they are now."""
        seen = frozenset(map(_signature, others))
        services = frozenset(_services(others))
        if seen == self._seen:
            return
        wait = DEBOUNCE_SECONDS if self._services - services else SETTLE_SECONDS
        if self._first is None or now >= self._until:
            self._first = now
        self._until = min(max(self._until, now + wait), self._first + LATEST_SECONDS)
        self._seen, self._services = seen, services
        self._waits_for_peers = None

    @property
    def moved(self) -> bool:
        """Whether there ever was another node."""
        return self._first is not None

    def ready_at(self) -> float:
        """Placements may be made from then on; minus infinity: at any time."""
        return max(self._until, self._waits_for_peers if self._waits_for_peers is not None else float("-inf"))

    def reason(self) -> str:
        """In words, what is waited for."""
        if self._waits_for_peers is not None:
            return "waits a moment to hear what the other nodes of the mesh serve"
        return "waits until the mesh has settled after a change among its nodes"


def _services(nodes: Iterable[Node]) -> Iterable[Service]:
    for node in nodes:
        if node.standing != "draining":
            for item in node.hosted:
                yield (node.peer_id, item.model)


def _signature(node: Node) -> tuple[object, ...]:
    """What placements depend on; how busy a node is, is not part of it."""
    return (
        node.peer_id,
        node.standing,
        node.vram_bytes,
        node.trusted,
        tuple(sorted((model.name, model.file_hash) for model in node.models.values())),
        tuple(sorted(item.model for item in node.hosted)),
        tuple(sorted(item.model for item in node.serving)),
        tuple(sorted(node.requested)),
    )
