"""How often each model is asked for: grow-only counters per (node, model), merged by the larger value.

Because a counter only grows and each node raises only its own, merging is idempotent, commutative and loses nothing:
1,000 requests through three nodes read as 1,000 on every node. Rates are computed locally from when counts arrived.
Source: docs/spec/demand.md.
"""

from __future__ import annotations

from collections import deque

from shared.ids import ModelName, PeerId
from shared.messages.mesh import ModelDemand

BUCKET_SECONDS = 10.0
WINDOW_SECONDS = 600.0
MODELS_LIMIT = 2_000
"""Names come from requests; beyond this many the least asked for is forgotten."""
NAME_LIMIT_CHARACTERS = 256
"""Requests for longer names are not counted: all counters together must fit into one message."""
COUNT_LIMIT = 2**60
"""Far above any honest count, and sums stay within the 64 bits that messages carry."""


class DemandCounters:
    """Counts and rates of one node's view of the mesh. No clock: ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._totals: dict[ModelName, dict[PeerId, int]] = {}
        self._recent: dict[ModelName, deque[tuple[float, int]]] = {}

    def add(self, node: PeerId, model: ModelName, count: int, *, now: float) -> None:
        """``count`` more requests were counted by ``node``. Raises: ValueError for a negative count."""
        if count < 0:
            raise ValueError("counters only grow")
        if count:
            self.merge(node, model, self.total_of(node, model) + count, now=now)

    def merge(self, node: PeerId, model: ModelName, total: int, *, now: float) -> None:
        """``node`` says that it has counted ``total`` requests; smaller than known: old news, ignored."""
        known = self.total_of(node, model)
        total = min(total, COUNT_LIMIT)
        if total <= known or len(model) > NAME_LIMIT_CHARACTERS:
            return
        self._totals.setdefault(model, {})[node] = total
        buckets = self._recent.setdefault(model, deque())
        start = now - now % BUCKET_SECONDS
        if buckets and buckets[-1][0] == start:
            buckets[-1] = (start, buckets[-1][1] + total - known)
        else:
            buckets.append((start, total - known))
        if len(self._totals) > MODELS_LIMIT:
            least = min(self._totals, key=lambda name: (sum(self._totals[name].values()), name))
            del self._totals[least]
            self._recent.pop(least, None)

    def restore(self, node: PeerId, totals: dict[ModelName, int]) -> None:
        """Counters from before a restart: they count for totals, not for rates."""
        for model, total in totals.items():
            if total > 0 and len(model) <= NAME_LIMIT_CHARACTERS:
                known = self.total_of(node, model)
                self._totals.setdefault(model, {})[node] = max(min(total, COUNT_LIMIT), known)

    def rename(self, old: PeerId, new: PeerId) -> None:
        """What was counted as ``old`` was counted by ``new``: once, not twice."""
        for counts in self._totals.values():
            if old in counts:
                counts[new] = counts.get(new, 0) + counts.pop(old)

    def total_of(self, node: PeerId, model: ModelName) -> int:
        return self._totals.get(model, {}).get(node, 0)

    def totals_of(self, node: PeerId) -> dict[ModelName, int]:
        """What ``node`` has counted, for its own persistence and for gossip."""
        return {model: counts[node] for model, counts in self._totals.items() if node in counts}

    def summary(self, *, now: float) -> tuple[ModelDemand, ...]:
        """Totals and rates per minute over 1 and 10 minutes, by name."""
        return tuple(
            ModelDemand(
                model=model,
                requests_total=sum(counts.values()),
                per_minute_1m=self._rate(model, 60.0, now),
                per_minute_10m=self._rate(model, WINDOW_SECONDS, now),
            )
            for model, counts in sorted(self._totals.items())
        )

    def active(self, *, now: float) -> bool:
        """Whether any rate is above 0, so that it will change by itself."""
        return any(self._rate(model, WINDOW_SECONDS, now) for model in list(self._recent))

    def _rate(self, model: ModelName, window_seconds: float, now: float) -> float:
        buckets = self._recent.get(model)
        if not buckets:
            return 0.0
        while buckets and buckets[0][0] + BUCKET_SECONDS <= now - WINDOW_SECONDS:
            buckets.popleft()
        count = sum(count for start, count in buckets if start + BUCKET_SECONDS > now - window_seconds)
        return round(count * 60.0 / window_seconds, 2)
