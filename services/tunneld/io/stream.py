"""One stream of bytes between two nodes, whatever carries it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from shared.errors import StreamLost

HIGH_WATER_BYTES = 256 * 1024
"""What may wait in each direction at each end before the writer waits too."""
REASON_LIMIT_BYTES = 300


class TunnelStream(Protocol):
    """Bytes both ways, each direction ended by itself, each with backpressure.

    A clean end and a loss are never confused: only :meth:`read` returning ``b""`` means that all has come.
    """

    bytes_sent: int
    bytes_received: int

    async def read(self) -> bytes:
        """What came next, as soon as anything did; ``b""`` after the peer's clean end. Raises: StreamLost."""
        ...

    async def write(self, data: bytes) -> None:
        """Hand over ``data``; waits while the peer does not read. Raises: StreamLost."""
        ...

    async def finish(self) -> None:
        """End this direction cleanly; the other stays usable. Raises: StreamLost."""
        ...

    def abort(self, reason: str = "") -> None:
        """End both directions now; the peer sees a loss. Nothing happens to a stream whose directions both ended."""
        ...


class Inbox:
    """What came on a stream and waits to be read, by one reader."""

    __slots__ = ("_parts", "_reader", "ended", "lost", "waiting_bytes")

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.ended = False
        """The peer ended its direction cleanly."""
        self.lost: str | None = None
        """Why the stream ended otherwise."""
        self._parts: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None

    async def read(self) -> bytes:
        """All that waits, as soon as there is anything; ``b""`` after a clean end. Raises: StreamLost."""
        while not self._parts:
            if self.lost is not None:
                raise StreamLost(self.lost)
            if self.ended:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self.drop()
        return data

    def put(self, data: bytes) -> None:
        self._parts.append(data)
        self.waiting_bytes += len(data)
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def lose(self, reason: str) -> None:
        """What waits unread is no use as a whole and is dropped."""
        self.lost = reason
        self.drop()
        self._wake()

    def drop(self) -> None:
        """Forget what waits."""
        self._parts.clear()
        self.waiting_bytes = 0

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def bounded_reason(reason: str) -> str:
    """A reason that came from or goes to a peer: printable, one line, at most ``REASON_LIMIT_BYTES``."""
    text = "".join(char if char.isprintable() else " " for char in reason)
    return text.encode("utf-8", "replace")[:REASON_LIMIT_BYTES].decode("utf-8", "ignore").strip()
