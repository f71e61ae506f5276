"""A verified connection with one peer, over either transport; streams may be opened from both ends."""

from __future__ import annotations

import abc
import asyncio
from dataclasses import dataclass

from services.tunneld.io.stream import TunnelStream, bounded_reason
from services.tunneld.rtt import WindowedMinimum
from shared.certificates import VerifiedPeer
from shared.messages.tunnel import StreamCounters
from shared.multiaddrs import Transport

PING_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A connection without a sign of life for so long is lost. Longer than any pause of a busy small machine."""
SUSPICION_SECONDS = 0.7
LATE_SECONDS = 0.3
"""When this very process was held up for so long, what the peer said may still wait to be read: once more."""
SUSPICION_ROUNDS = 4
STREAM_LIMIT = 512
"""Streams that a peer may have open here at once, over TCP; QUIC allows 128."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """What a probe learns: both ends verified each other and greeted, and no connection came of it."""

    peer: VerifiedPeer
    version: str
    """Of the peer's meshd; "" if it does not say."""
    observed_address: str


class Connection(abc.ABC):
    """What both transports share. Exists only once both ends have verified and welcomed each other.

    ``closed`` resolves with the reason in words. ``remote`` and ``observed_address`` are multiaddrs without ``/p2p``:
    where the peer is, and where the peer saw us.
    """

    transport: Transport

    def __init__(self, peer: VerifiedPeer, remote: str, observed_address: str, *, dialled_here: bool) -> None:
        self.peer = peer
        self.remote = remote
        self.observed_address = observed_address
        self.dialled_here = dialled_here
        self.open_streams = 0
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._rtt = WindowedMinimum()
        self._sent = 0
        self._received = 0
        self._opened = 0
        self._accepted = 0
        self._refused = 0

    @abc.abstractmethod
    async def open_stream(self) -> TunnelStream:
        """Raises: PeerUnreachable."""

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """End it and all its streams; tells the peer why where the transport can. Idempotent."""

    @abc.abstractmethod
    def silent_seconds(self) -> float:
        """Since the peer was last heard. A healthy one answers a ping every second."""

    @abc.abstractmethod
    def suspect(self) -> None:
        """Another connection with this peer has just ended: ask for a sign of life at once, and end without one."""

    def suspicion_seconds(self) -> float:
        """How long a suspected peer has for it."""
        return max(SUSPICION_SECONDS, 4 * (self.rtt_seconds() or 0.0))

    def rtt_seconds(self) -> float | None:
        """Smallest round trip of the last minute."""
        return self._rtt.value(now=asyncio.get_running_loop().time())

    @property
    def counters(self) -> StreamCounters:
        return StreamCounters(
            bytes_sent=self._sent,
            bytes_received=self._received,
            streams_opened=self._opened,
            streams_accepted=self._accepted,
            refused=self._refused,
        )

    def count_refused(self) -> None:
        """The peer asked for something it may not have."""
        self._refused += 1

    # -- for the transports -----------------------------------------------------------------------------------------

    def measured(self, rtt_seconds: float) -> None:
        self._rtt.add(max(0.0, rtt_seconds), now=asyncio.get_running_loop().time())

    def stream_began(self, *, opened_here: bool) -> None:
        self.open_streams += 1
        if opened_here:
            self._opened += 1
        else:
            self._accepted += 1

    def stream_ended(self, stream: TunnelStream) -> None:
        """Once per stream."""
        self.open_streams -= 1
        self._sent += stream.bytes_sent
        self._received += stream.bytes_received

    def resolve(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(bounded_reason(reason) or "the connection ended")
