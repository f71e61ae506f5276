"""services.meshctl.mesh: where a token comes from, and how the steps of a join are shown."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
import pytest

from services.meshctl.mesh import Steps, read_token
from shared.errors import ConfigError
from shared.messages.trust import JoinStep, JoinStepState


def test_a_token_comes_as_argument_file_input_or_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from-stdin\n"))
    assert read_token("given", "from-variable") == "given"
    assert read_token(f"@{file}", None) == "from-file"
    assert read_token("-", None) == "from-stdin"
    assert read_token(None, " from-variable ") == "from-variable"


def test_no_token_anywhere_is_wrong_usage() -> None:
    with pytest.raises(click.UsageError, match="MESH_TOKEN"):
        read_token(None, None)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        read_token(f"@{tmp_path / 'missing'}", None)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary"):
        read_token(f"@{tmp_path / 'binary'}", None)


def step(name: str, state: JoinStepState, detail: str = "words") -> JoinStep:
    return JoinStep(name=name, state=state, detail=detail)  # type: ignore[arg-type]


def test_each_finished_step_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps(quiet=False)
    one, two = step("token", "done", "an invitation"), step("connect", "done", "answered")
    steps.show((one, step("connect", "waiting", "trying")))
    steps.show((one, two, step("verify", "failed", "another root")))
    steps.show((one, two, step("verify", "failed", "another root")))
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "trying" not in line] == [
        "token: an invitation",
        "connect: answered",
        "verify: failed: another root",
    ]
    assert not steps.finished


def test_finished_when_the_last_step_is_decided(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps(quiet=True)
    steps.show((step("assigned", "waiting"),))
    assert not steps.finished
    steps.show((step("assigned", "done"),))
    assert steps.finished
    assert capsys.readouterr().err == ""
