"""One stream of bytes between two nodes, whatever carries it."""

from __future__ import annotations

from typing import Protocol

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


def bounded_reason(reason: str) -> str:
    """A reason that came from or goes to a peer: printable, one line, at most ``REASON_LIMIT_BYTES``."""
    text = "".join(char if char.isprintable() else " " for char in reason)
    return text.encode("utf-8", "replace")[:REASON_LIMIT_BYTES].decode("utf-8", "ignore").strip()
