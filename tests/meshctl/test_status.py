"""services.meshctl.status: a join that waits or failed is shown with its steps, one that is through is not."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from services.meshctl.status import render
from shared.node_status import JoinStepStatus, NodeStatus
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


def test_what_a_peer_says_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in shown(("connect", "failed", "refused: \x1b[31mred"))
