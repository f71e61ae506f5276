"""What other nodes were given or say they will do, and whether they do it in time.

All nodes compute the same placements, but some cannot act on theirs: its owner unloaded the model there, its engine is
broken, its view differs, or it lies. After a while each of them is passed over, and the next one takes the model.
Source: docs/spec/allocation.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.electiond.placements import Placement
from services.electiond.view import Node
from shared.ids import ModelName, PeerId

TAKE_SECONDS = 6.0
"""A free node announces what it was given within its settle time (2-3 s) and one round of gossip (1-2 s)."""
LOAD_SECONDS = 600.0
LOAD_SECONDS_PER_GB = 120.0
"""As launcherd's own limit for a load; a node that serves nothing by then does not mean it."""
YOUNG_SECONDS = 60.0
"""A model that became ready is safe so long from being displaced by a placement."""
SENT_SECONDS = 10.0
"""A request was sent to a node: so long it counts as starting that model, until it says so itself."""
SENT_LIMIT = 256

Key = tuple[ModelName, PeerId]


class Promises:
    """Remembers since when; everything else is computed from the nodes."""

    def __init__(self) -> None:
        self._expected: dict[Key, float] = {}
        self.passed: set[Key] = set()
        """Placements that their node did not act upon."""
        self._meant: dict[Key, float] = {}
        self._ready: dict[Key, float | None] = {}
        """Since when a node hosts a model; ``None``: since before it was known."""
        self._sent: dict[PeerId, tuple[ModelName, float]] = {}

    def observe(self, nodes: Sequence[Node], *, now: float, first: bool = False) -> None:
        """Take the nodes as they are now. ``first``: what they host may be ready since long."""
        present = {node.peer_id for node in nodes}
        meant = {(item.model, node.peer_id) for node in nodes for item in node.serving if not node.hosts(item.model)}
        ready = {(item.model, node.peer_id) for node in nodes for item in node.hosted}
        self._meant = {key: self._meant.get(key, now) for key in meant}
        since = None if first else now
        self._ready = {key: self._ready.get(key, since) for key in ready}
        active = {node.peer_id for node in nodes if node.is_active}
        self.passed = {key for key in self.passed if key[1] in present - active}
        self._sent = {
            peer: (model, at)
            for peer, (model, at) in self._sent.items()
            if peer in present - active and now - at < SENT_SECONDS
        }

    # -- placements ---------------------------------------------------------------------------------------------

    def expect(self, placements: Iterable[Placement], *, now: float) -> bool:
        """Others should act on these. Whether a node was passed over now: then compute the placements anew."""
        keys = {(item.model, item.peer_id) for item in placements}
        self._expected = {key: self._expected.get(key, now) for key in keys}
        late = {key for key, since in self._expected.items() if now >= since + TAKE_SECONDS}
        self.passed |= late
        for key in late:
            del self._expected[key]
        return bool(late)

    def next_deadline(self) -> float | None:
        """When the next expected placement is late."""
        return min((since + TAKE_SECONDS for since in self._expected.values()), default=None)

    def without_empty_words(self, nodes: Iterable[Node], *, now: float) -> list[Node]:
        """The nodes, less what they mean to serve for longer than any load takes."""
        return [
            replace(node, serving=tuple(item for item in node.serving if not self._is_empty(item.model, node, now)))
            for node in nodes
        ]

    def _is_empty(self, model: ModelName, node: Node, now: float) -> bool:
        since = self._meant.get((model, node.peer_id))
        if since is None or node.is_self:
            return False
        known = node.models.get(model)
        size_gb = known.file_size_bytes / 1e9 if known else 0.0
        return now - since >= max(LOAD_SECONDS, LOAD_SECONDS_PER_GB * size_gb)

    # -- requests -------------------------------------------------------------------------------------------------

    def sent(self, model: ModelName, peer_id: PeerId, *, now: float) -> None:
        """A request for ``model`` was told to go there."""
        self._sent.pop(peer_id, None)
        self._sent[peer_id] = (model, now)
        while len(self._sent) > SENT_LIMIT:
            del self._sent[next(iter(self._sent))]

    def starting(self, peer_id: PeerId, *, now: float) -> ModelName | None:
        """What the node is about to load for a request that was sent there a moment ago."""
        sent = self._sent.get(peer_id)
        return sent[0] if sent is not None and now - sent[1] < SENT_SECONDS else None

    def is_young(self, model: ModelName, peer_id: PeerId, *, now: float) -> bool:
        """Whether the model became ready there less than 60 s ago."""
        since = self._ready.get((model, peer_id))
        return since is not None and now - since < YOUNG_SECONDS
