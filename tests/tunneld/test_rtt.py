"""services.tunneld.rtt: the windowed minimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tunneld.rtt import WindowedMinimum


def test_a_shorter_path_shows_at_once_a_longer_one_after_the_window() -> None:
    rtt = WindowedMinimum(60.0)
    rtt.add(2.6, now=0.0)
    rtt.add(0.010, now=5.0)
    assert rtt.value(now=5.0) == 0.010
    rtt.add(0.2, now=6.0)
    assert rtt.value(now=65.0) == 0.010
    assert rtt.value(now=65.1) == 0.2


def test_nothing_known() -> None:
    rtt = WindowedMinimum(60.0)
    assert rtt.value(now=0.0) is None
    rtt.add(0.1, now=0.0)
    assert rtt.value(now=61.0) is None
    with pytest.raises(ValueError, match="negative"):
        rtt.add(-0.1, now=0.0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1000)), max_size=50))
def test_the_same_as_looking_through_all_samples(steps: list[tuple[int, int]]) -> None:
    rtt, now, samples = WindowedMinimum(60.0), 0.0, []
    for pause, sample in steps:
        now += pause
        samples.append((now, float(sample)))
        rtt.add(float(sample), now=now)
        assert rtt.value(now=now) == min(seconds for at, seconds in samples if at >= now - 60.0)
