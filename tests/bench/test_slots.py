"""The scenario behind `bin/bench slots`, shorter: what is asked while a load waits is answered while it waits."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from click.testing import CliRunner

from tests.bench import mesh, slots
from tests.bench.__main__ import main, parts_of
from tests.bench.slots import KINDS, LLMS, Waited, figures

GENERATION_SECONDS = 4.0


def test_everything_else_is_answered_while_a_load_waits_behind_a_generation() -> None:
    """Busy models finish first and loads queue for as long as that takes; nothing else ever blocks."""
    folder: Path = mesh.short_folder()
    try:
        with slots.waiting_node(folder, GENERATION_SECONDS) as node:
            waited = asyncio.run(slots.measure(folder, node.api_port(), GENERATION_SECONDS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    tokens = round(GENERATION_SECONDS / slots.TOKEN_SECONDS)
    assert waited.generated == "".join(f"w{number} " for number in range(tokens)), "it was not cut for the load"
    assert waited.answered == "w0 w1 "
    assert waited.generated_at < waited.answered_at
    # Every kind was asked, and answered, while both were still on their way.
    assert all(len(waited.seconds[kind]) >= 2 for kind in KINDS), waited.seconds
    assert waited.reason == f"waits for {LLMS[0]} to finish 1 request"


def test_the_figures_are_the_slowest_answers_of_each_kind() -> None:
    waited = Waited()
    waited.seconds["live"] = [0.001, 0.002, 0.051]
    found = {figure.name: figure for figure in figures(waited)}
    assert (found["slots.live.max"].value, found["slots.live.max"].verdict) == (51.0, "missed")
    assert found["slots.live.p99"].verdict == "info"
    assert found["slots.cancellation.max"].verdict == "skipped"


def test_the_command_knows_them() -> None:
    assert parts_of(["slots"])["slots"] == ["wait"]
    assert "slots" in CliRunner().invoke(main, ["list"]).output
