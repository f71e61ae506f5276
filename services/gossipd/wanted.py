"""Whom tunneld shall keep connected: everybody in a small mesh, a bounded few in a large one, and some of the lost.

In a large mesh the nodes stand on a ring in the order of their hashed ids, and each wants those 1, 2, 4, 8 … places
on: from the same list all compute one connected graph of low diameter. Nodes that serve models are wanted too, up to a
limit, because requests go to them. Of the lost ones a few are tried in turn for ever, so that a partition heals.
Source: docs/spec/membership.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.gossipd.chance import number
from shared.ids import PeerId

FULL_MESH_NODES = 16
"""Up to so many others, each node wants all."""
HOSTS_LIMIT = 16
"""Of nodes that serve models, wanted beyond the ring in a larger mesh."""
LOST_LIMIT = 16
"""Lost peers tried at one time."""
LOST_TURN_SECONDS = 60.0
"""After it the next ones are tried."""


def near(own: PeerId, others: Iterable[PeerId], hosts: Iterable[PeerId] = ()) -> frozenset[PeerId]:
    """The live ones to keep connected."""
    everybody = set(others) - {own}
    if len(everybody) <= FULL_MESH_NODES:
        return frozenset(everybody)
    ring = sorted(everybody | {own}, key=lambda peer: (number("ring", peer), peer))
    start, wanted, step = ring.index(own), set[PeerId](), 1
    while step < len(ring):
        wanted.add(ring[(start + step) % len(ring)])
        step *= 2
    useful = sorted(set(hosts) & everybody - wanted, key=lambda peer: (number(own, peer), peer))
    return frozenset(wanted | set(useful[:HOSTS_LIMIT]))


def lost_turn(lost: Sequence[PeerId], turn: int) -> list[PeerId]:
    """Those of the lost that are tried in this turn; each gets its turn."""
    if len(lost) <= LOST_LIMIT:
        return list(lost)
    start = turn * LOST_LIMIT % len(lost)
    return [lost[(start + index) % len(lost)] for index in range(LOST_LIMIT)]
