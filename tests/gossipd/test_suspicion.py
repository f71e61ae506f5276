from __future__ import annotations

import pytest

from services.gossipd.suspicion import probe_timeout, suspicion_seconds


@pytest.mark.parametrize(("rtt", "seconds"), [(None, 0.5), (0.01, 0.5), (0.4, 1.2), (9.0, 3.0)])
def test_05_a_probe_waits_for_three_round_trips_within_bounds(rtt: float | None, seconds: float) -> None:
    assert probe_timeout(rtt) == pytest.approx(seconds)


@pytest.mark.parametrize(("nodes", "seconds"), [(0, 2.0), (3, 2.0), (10, 3.46), (100, 6.66)])
def test_07_suspicion_grows_with_the_logarithm(nodes: int, seconds: float) -> None:
    assert suspicion_seconds(nodes) == pytest.approx(seconds, abs=0.01)
