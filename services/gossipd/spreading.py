"""Which records go where, and when: news of others is gathered for a moment and handed on in bundles.

A node hands its own records to everybody connected. What it hears of others it passes on only where it may be missing:
not to the origin, nor to who is connected to the origin and so has it first hand. In a small mesh nothing is passed on.
Source: docs/spec/membership.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.gossipd.chance import some
from shared.ids import PeerId

ANNOUNCEMENT_SECONDS = 0.05
LOAD_SECONDS = 1.0
FANOUT = 4
"""Each piece of news goes on to so many; digests repair what they miss."""


@dataclass(slots=True)
class Spreading:
    """News waiting to be passed on, of one node."""

    own: PeerId
    seed: int
    _news: dict[PeerId, PeerId] = field(default_factory=dict)
    """Whose announcement is news, and from whom it came."""
    _loads: dict[PeerId, PeerId] = field(default_factory=dict)
    _news_at: float | None = None
    _loads_at: float | None = None
    _turn: int = 0

    def announcement(self, origin: PeerId, sender: PeerId, now: float) -> None:
        self._news[origin] = sender
        if self._news_at is None:
            self._news_at = now + ANNOUNCEMENT_SECONDS

    def load(self, origin: PeerId, sender: PeerId, now: float) -> None:
        self._loads[origin] = sender
        if self._loads_at is None:
            self._loads_at = now + LOAD_SECONDS

    def next_deadline(self) -> float | None:
        return min((at for at in (self._news_at, self._loads_at) if at is not None), default=None)

    def due(
        self, connected: Collection[PeerId], links_of: Mapping[PeerId, Collection[PeerId]], now: float
    ) -> list[tuple[PeerId, list[PeerId], bool]]:
        """``(to, whose records, only the load)`` for everything that has waited long enough."""
        out: list[tuple[PeerId, list[PeerId], bool]] = []
        if self._news_at is not None and now >= self._news_at:
            out += self._targets(self._news, connected, links_of, only_load=False)
            self._news, self._news_at = {}, None
        if self._loads_at is not None and now >= self._loads_at:
            out += self._targets(self._loads, connected, links_of, only_load=True)
            self._loads, self._loads_at = {}, None
        return out

    def _targets(
        self,
        news: Mapping[PeerId, PeerId],
        connected: Collection[PeerId],
        links_of: Mapping[PeerId, Collection[PeerId]],
        *,
        only_load: bool,
    ) -> list[tuple[PeerId, list[PeerId], bool]]:
        self._turn += 1
        # The same few for all news of one turn, so that they make few messages.
        order = some(connected, len(connected), self.seed, self.own, "spread", self._turn)
        going: dict[PeerId, list[PeerId]] = {}
        for origin, sender in sorted(news.items()):
            first_hand = links_of.get(origin, ())
            lacking = [peer for peer in order if peer not in (origin, sender) and peer not in first_hand]
            for peer in lacking[:FANOUT]:
                going.setdefault(peer, []).append(origin)
        return [(peer, origins, only_load) for peer, origins in going.items()]
