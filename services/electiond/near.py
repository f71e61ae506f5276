"""Which nodes are near each other: round trips under a limit, with hysteresis.

Source: docs/spec/election.md.
"""

from __future__ import annotations

from shared.ids import PeerId
from shared.messages.mesh import MemberChanged

NEAR_SECONDS = 0.080
"""A pair becomes near below this. A model's tokens wait for every hop."""
FAR_SECONDS = 0.088
"""A near pair becomes far only from here on, so that a round trip that swings about the limit changes nothing."""

Pair = tuple[PeerId, PeerId]


class NearSets:
    """Round trips as their ends report them; the smaller of both reports counts. Unknown ones pass."""

    def __init__(self) -> None:
        self._reported: dict[PeerId, dict[PeerId, float]] = {}
        self._far: set[Pair] = set()
        self._judged: set[Pair] = set()

    def observe(self, member: MemberChanged, own: PeerId) -> None:
        """Take what ``member`` and this node (``own``) say about their round trips; forget one that is gone."""
        peer = member.announcement.peer_id
        if member.state in ("dead", "left"):
            self.forget(peer)
            return
        if member.rtt_seconds is not None and not member.is_self:
            self.report(own, peer, member.rtt_seconds)
        if member.load is not None:
            for item in member.load.rtts:
                self.report(peer, item.peer_id, item.rtt_seconds)

    def report(self, observer: PeerId, subject: PeerId, rtt_seconds: float) -> None:
        self._reported.setdefault(observer, {})[subject] = rtt_seconds
        rtt = self.rtt_seconds(observer, subject)
        assert rtt is not None
        pair = _pair(observer, subject)
        if rtt < NEAR_SECONDS:
            self._far.discard(pair)
        elif rtt >= FAR_SECONDS or pair not in self._judged:
            self._far.add(pair)
        self._judged.add(pair)

    def forget(self, peer: PeerId) -> None:
        self._reported.pop(peer, None)
        for told in self._reported.values():
            told.pop(peer, None)
        self._far = {pair for pair in self._far if peer not in pair}
        self._judged = {pair for pair in self._judged if peer not in pair}

    def rtt_seconds(self, one: PeerId, other: PeerId) -> float | None:
        """``None``: unknown."""
        told = (self._reported.get(one, {}).get(other), self._reported.get(other, {}).get(one))
        return min((rtt for rtt in told if rtt is not None), default=None)

    def near(self, one: PeerId, other: PeerId) -> bool:
        return _pair(one, other) not in self._far


def _pair(one: PeerId, other: PeerId) -> Pair:
    return (one, other) if one <= other else (other, one)
