"""services.meshctl.status: a join that waits or failed is shown with its steps, one that is through is not."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from services.meshctl.status import render
from shared.node_status import DownloadView, JoinStepStatus, NodeStatus
from shared.status_view import build_status


def shown(*steps: tuple[str, str, str]) -> str:
    empty: NodeStatus = build_status({}, {}, ())
    join = tuple(JoinStepStatus(name=name, state=state, detail=detail) for name, state, detail in steps)
    text = io.StringIO()
    render(dataclasses.replace(empty, join=join), Console(file=text, width=100, markup=False))
    return text.getvalue()


def test_a_join_that_waits_or_failed_is_shown_step_by_step() -> None:
    for state in ("waiting", "failed"):
        text = shown(("token", "done", "invites to home"), ("connect", state, "UDP 9340 does not answer"))
        assert "joining" in text
        assert "invites to home" in text
        assert f"connect  {state}" in text
        assert "UDP 9340 does not answer" in text


def test_a_join_that_is_through_is_no_news() -> None:
    assert "joining" not in shown(("token", "done", "invites to home"), ("assigned", "done", "no model"))
    assert "joining" not in shown()


def test_downloads_are_shown_with_how_far_they_are_and_why_they_failed() -> None:
    empty: NodeStatus = build_status({}, {}, ())
    assert "DOWNLOAD" not in shown()
    item = DownloadView(
        model="tiny", checkpoint="org/tiny:Q4_K_M", state="downloading", reason="file 1 of 2", bytes_done=5_000_000,
        bytes_total=10_000_000, bytes_per_second=1_500_000.0,
    )  # fmt: skip
    failed = dataclasses.replace(item, model="phi", state="failed", reason="the disk is full", bytes_per_second=0.0)
    text = io.StringIO()
    render(dataclasses.replace(empty, downloads=(item, failed)), Console(file=text, width=100, markup=False))
    lines = text.getvalue().splitlines()
    (row,) = [line for line in lines if line.strip().startswith("tiny")]
    assert "5.0 MB of 10.0 MB" in row
    assert "1.5 MB/s" in row
    assert any("phi" in line and "the disk is full" in line for line in lines)


def test_what_a_peer_says_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in shown(("connect", "failed", "refused: \x1b[31mred"))
