"""What click cannot check by itself is wrong usage all the same."""

from __future__ import annotations

import click
import pytest

from services.meshctl.option_values import checked_args, checked_limits

CONTEXT = click.Context(click.Command("up"))
OPTION = click.Option(["--x"])


def test_what_can_be_is_handed_on_as_it_is() -> None:
    assert checked_limits(CONTEXT, OPTION, "2 1") == "2 1"
    assert checked_args(CONTEXT, OPTION, "--mlock") == "--mlock"
    assert checked_limits(CONTEXT, OPTION, None) is None
    assert checked_args(CONTEXT, OPTION, None) is None


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    with pytest.raises(click.BadParameter, match="at least 1"):
        checked_limits(CONTEXT, OPTION, "0")
    with pytest.raises(click.BadParameter, match="is not closed"):
        checked_args(CONTEXT, OPTION, "'")
    with pytest.raises(click.BadParameter, match="meshd chooses"):
        checked_args(CONTEXT, OPTION, "--port 1")
