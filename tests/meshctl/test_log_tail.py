"""services.meshctl.log_tail: the reason a daemon gave before it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.meshctl.log_tail import last_error

STAMP = "2026-01-01T00:00:00.000Z"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'{STAMP} error event=cannot_start daemon=x code=config reason="no such key"\n', "no such key"),
        (f"{STAMP} error event=stopped daemon=x reason=short\n", "short"),
        (
            f'{STAMP} error event=crash daemon=x line="Traceback"\n{STAMP} error event=crash line="KeyError: 1"\n',
            "KeyError: 1",
        ),
        (f'{STAMP} error event=cannot_start reason="why"\n{STAMP} info event=stopping\n', "why"),
        (f'{STAMP} error event=old reason="healed"\nx ready\n{STAMP} info event=fine\n', f"{STAMP} info event=fine"),
        ("No module named zmq\n\n", "No module named zmq"),
        ("", ""),
    ],
)
def test_the_newest_reason_of_the_newest_start(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.log").write_text(text)
    assert last_error(tmp_path / "x.log") == reason


def test_no_log_no_reason(tmp_path: Path) -> None:
    assert last_error(tmp_path / "none.log") == ""
