"""How long silence lasts before it counts: the times of failure detection, as functions.

Source: docs/spec/membership.md; A. Das, I. Gupta, A. Motivala, "SWIM" (2002), §4.2 for suspicion.
"""

from __future__ import annotations

import math

PROBE_SECONDS = 1.0
"""Between two probes of one node."""
PROBE_TIMEOUT_SECONDS = 0.5
"""At least so long for a direct answer, and as long again for one through others."""
LONGEST_TIMEOUT_SECONDS = 3.0
RTT_FACTOR = 3.0
SHORTEST_SUSPICION_SECONDS = 2.0
HELPERS = 3
"""Peers asked to probe for us."""
LINK_GRACE_SECONDS = 6.0
"""A node heard of just now has so long to become connected before silence counts."""
FRESH_SECONDS = 2.0
"""A node that answered within it is not dead because somebody says so: it is probed."""
LATE_SECONDS = 1.0
"""A tick later than this: this node slept, and nobody's silence meanwhile counts."""


def probe_timeout(rtt_seconds: float | None) -> float:
    """Seconds to wait for a direct answer."""
    return min(LONGEST_TIMEOUT_SECONDS, max(PROBE_TIMEOUT_SECONDS, RTT_FACTOR * (rtt_seconds or 0.0)))


def suspicion_seconds(nodes: int) -> float:
    """How long a suspected node has to refute: ``log2(nodes + 1)``, at least 2, so that word reaches it and comes back.

    2.0 s for 3 nodes, 3.5 s for 10, 6.7 s for 100.
    """
    return max(SHORTEST_SUSPICION_SECONDS, math.log2(max(1, nodes) + 1))
