"""services.meshctl.invite: durations."""

from __future__ import annotations

import click
import pytest

from services.meshctl.invite import Duration


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("30m", 1800), ("24h", 86_400), ("1.5d", 129_600)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0h", "soon", "-1h", "5w", "1e9999h"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="24h"):
        Duration().convert(text, None, None)
