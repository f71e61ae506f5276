"""Which nodes served a model before it vanished from the routes, and how long ago: for whoever asks for it then.

A node that consumes only, or is cut off, knows of no other host; "no such model" would be a lie there.

Source: DESIGN §9: clients answer 503 naming when a host was last seen.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.ids import ModelName

MODELS_LIMIT = 1000
FORGET_SECONDS = 24 * 3600.0


class LastSeen:
    """``note`` it whenever the routes change."""

    def __init__(self) -> None:
        self._serving: dict[ModelName, tuple[str, ...]] = {}
        self._gone: dict[ModelName, tuple[tuple[str, ...], float]] = {}

    def note(self, serving: Mapping[ModelName, tuple[str, ...]], *, now: float) -> None:
        """``serving``: names of the nodes elsewhere that serve each model now. ``now`` in monotonic seconds."""
        for model, nodes in self._serving.items():
            if model not in serving:
                self._gone[model] = (nodes, now)
        for model in serving:
            self._gone.pop(model, None)
        while len(self._gone) > MODELS_LIMIT:
            del self._gone[next(iter(self._gone))]
        self._serving = dict(serving)

    def words(self, model: ModelName, *, now: float) -> str | None:
        """A clause on who last served it; None when nobody elsewhere did, or too long ago."""
        nodes, since = self._gone.get(model, ((), 0.0))
        if not nodes or now - since > FORGET_SECONDS:
            return None
        return f"{' and '.join(nodes[:3])} served it until {_ago(now - since)} ago"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
