"""Round-trip time of a link: the minimum over a window. Queues only ever add to a sample; the minimum is the distance.

Source: the windowed minimum of TCP BBR (Linux, ``win_minmax``), kept exact here by a monotonic queue.
"""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0
"""A path that became longer shows after so long; one that became shorter at once."""


class WindowedMinimum:
    """Smallest sample of the last ``window_seconds``. Amortized O(1); no clock: ``now`` is monotonic seconds."""

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._samples: deque[tuple[float, float]] = deque()
        """(when, seconds), both ascending: what a newer, smaller sample makes useless is gone."""

    def add(self, seconds: float, *, now: float) -> None:
        """One sample. Raises: ValueError for a negative one."""
        if seconds < 0:
            raise ValueError("a round trip takes no negative time")
        while self._samples and self._samples[-1][1] >= seconds:
            self._samples.pop()
        self._samples.append((now, seconds))

    def value(self, *, now: float) -> float | None:
        """Seconds, or None without a sample in the window."""
        while self._samples and self._samples[0][0] < now - self._window_seconds:
            self._samples.popleft()
        return self._samples[0][1] if self._samples else None
