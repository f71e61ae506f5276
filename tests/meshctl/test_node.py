"""services.meshctl.node: what supervisord's row of a daemon that ended is made to say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.meshctl import node
from services.meshctl.node import FULL_LOG_DISK_BYTES, _with_own_words
from shared.node_status import ProcessRow


def row(log: Path, state: str = "backoff") -> ProcessRow:
    return ProcessRow(name="launcherd", state=state, reason="Exited too quickly", log_path=str(log))


def test_the_reason_is_the_daemons_own(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text('2026-01-01T00:00:00.000Z error event=cannot_start reason="no such key"\n')
    assert _with_own_words(row(tmp_path / "x.log")).reason == "no such key"


def test_on_a_full_disk_the_log_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.log").write_text('2026-01-01T00:00:00.000Z error event=cannot_start reason="[Errno')
    usage = shutil.disk_usage(tmp_path)._replace(free=FULL_LOG_DISK_BYTES - 1)
    monkeypatch.setattr(node.shutil, "disk_usage", lambda _path: usage)
    assert "is full; free some space" in _with_own_words(row(tmp_path / "x.log")).reason


def test_a_daemon_that_runs_needs_no_reason(tmp_path: Path) -> None:
    assert _with_own_words(row(tmp_path / "x.log", "running")).reason == "Exited too quickly"
