"""services.meshctl.output: ages, sizes, and names from elsewhere that try to be something else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.meshctl.output import age, clean, short_id, size, table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0, "0s"), (119.9, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172_800, "2d")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (-1, ""), (1000, "1.0 kB"), (16 * 10**9, "16.0 GB")],
)
def test_sizes(count: int, text: str) -> None:
    """As everywhere (shared.words), but 0 is unknown."""
    assert size(count) == text


def test_control_characters_are_made_visible() -> None:
    assert clean("a\x1b[2Jb\nc\r") == "a�[2Jb\nc�"


def test_markup_in_a_name_is_shown_as_it_is_and_long_reasons_fold() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=40, markup=False, highlight=False)
    console.print(table(["MODEL", "STATUS", "REASON"], [("[red]evil[/red]", "ready", "because " * 9)], state_column=1))
    text = stream.getvalue()
    assert "[red]evil" in text
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 40
    assert text.count("because") == 9


def test_node_ids_are_short_enough_to_compare() -> None:
    assert short_id("12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv") == "12D3KooW…4Ksv"
