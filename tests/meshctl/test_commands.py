"""services.meshctl.commands and __main__: the vocabulary, wrong usage, exit statuses, a fast start."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from services.meshctl.commands import VERBS, meshctl
from shared.paths import REPOSITORY
from shared.version import VERSION
from tests.meshctl.conftest import Meshctl

USAGE_ERRORS = [
    ["stauts"],
    ["status", "--jsn"],
    ["restart", "apache"],
    ["logs", "nginx"],
    ["logs", "engine"],
    ["logs", "-n", "-1"],
    ["load"],
    ["load", "m", "--ctx", "many"],
    ["load", "m", "n"],
    ["why"],
    ["story", "keeper"],
    ["story", "gossipd", "-n", "0"],
    ["keys", "revoke"],
    ["keys", "make"],
    ["config", "set", "api.port"],
    ["config", "frobnicate"],
    ["models", "rm"],
    ["up", "--models-dir", "/nonexistent/folder"],
    ["completion", "tcsh"],
    ["run"],
    ["peers", "ban"],
    ["peers", "kick", "desk"],
    ["up", "--client", "--model", "m"],
    ["join", "TOKEN", "--client", "--model", "m"],
    ["join"],
    ["invite", "--grant", "king"],
    ["invite", "--uses", "0"],
    ["invite", "revoke"],
    [],
]


@pytest.mark.parametrize("words", USAGE_ERRORS, ids=" ".join)
def test_wrong_usage_is_status_2_and_says_what_is_right(words: list[str]) -> None:
    result = CliRunner().invoke(meshctl, words)
    assert result.exit_code == 2, result.output
    assert "Usage: " in result.output


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str) -> None:
    result = CliRunner().invoke(meshctl, [verb, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: meshctl {verb}" in result.output


def test_the_help_lists_every_verb_and_none_that_does_not_work_yet() -> None:
    text = CliRunner().invoke(meshctl, ["--help"]).output
    shown = {line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line.strip()}
    expected = "up down status ps restart logs models load unload chat run doctor why story keys config version"
    mesh = "init invite join leave drain whoami peers"
    many = "pull pin unpin"
    assert shown == {*expected.split(), *mesh.split(), *many.split(), "completion"}


def test_a_misspelt_verb_is_answered_with_the_nearest(meshctl: Meshctl) -> None:
    ran = meshctl("stauts")
    assert (ran.status, "did you mean status?" in ran.err) == (2, True)


def test_wrong_usage_with_json_is_an_error_object(meshctl: Meshctl) -> None:
    ran = meshctl("status", "--json", "--wacth")
    assert (ran.status, ran.json()["error"]["code"]) == (2, "usage")


def test_version_of_meshctl(meshctl: Meshctl) -> None:
    assert meshctl("--version").out == f"meshctl {VERSION}\n"


def test_help_imports_no_command_and_nothing_heavy() -> None:
    """A fast start is what is imported: no command, no zmq, pydantic or rich before one is named."""
    code = (
        "import sys; from services.meshctl.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'zmq', 'pydantic', 'rich', 'asyncio', 'psutil', 'services.meshctl.up', 'services.meshctl.status'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert ran.stdout.rstrip().endswith("HEAVY []"), ran.stdout + ran.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, meshctl: Meshctl) -> None:
    ran = meshctl("completion", shell)
    assert ran.status == 0
    assert "_MESHCTL_COMPLETE" in ran.out


def test_completion_knows_verbs_and_daemons(monkeypatch: pytest.MonkeyPatch, meshctl: Meshctl) -> None:
    monkeypatch.setenv("_MESHCTL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("COMP_WORDS", "meshctl sta")
    assert "status" in meshctl().out
    monkeypatch.setenv("COMP_CWORD", "2")
    monkeypatch.setenv("COMP_WORDS", "meshctl restart g")
    assert "gossipd" in meshctl().out


def test_completion_knows_the_options_about_other_nodes(monkeypatch: pytest.MonkeyPatch, meshctl: Meshctl) -> None:
    monkeypatch.setenv("_MESHCTL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_CWORD", "2")
    for verb in ("logs", "load", "unload", "drain"):
        monkeypatch.setenv("COMP_WORDS", f"meshctl {verb} --no")
        assert "--node" in meshctl().out
    monkeypatch.setenv("COMP_WORDS", "meshctl up --")
    assert {"--client", "--no-client"} <= {line.partition(",")[2] for line in meshctl().out.splitlines()}
