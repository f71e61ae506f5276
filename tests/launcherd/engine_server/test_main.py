"""The embedded engine as a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.launcherd.io.engine import free_port

Run = Callable[..., "subprocess.CompletedProcess[str]"]
PROGRAM = (sys.executable, "-m", "services.launcherd.engine_server")


@pytest.fixture
def call() -> Run:
    def call_with(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*PROGRAM, *argv], capture_output=True, text=True, timeout=20, check=False)

    return call_with


def test_version_and_help(call: Run) -> None:
    version, usage = call("--version"), call("--help")
    assert (version.returncode, usage.returncode) == (0, 0)
    assert version.stdout.startswith("version: xllamacpp 20")
    assert "-c, --ctx-size" in usage.stdout
    assert "LLAMA_API_KEY" in usage.stdout


def test_an_unknown_flag_is_exit_status_2_with_a_message(call: Run) -> None:
    done = call("-m", "x.gguf", "--no-such-flag")
    assert done.returncode == 2
    assert done.stderr == "error: unknown argument: --no-such-flag\n"


def test_a_model_that_cannot_be_loaded_is_exit_status_1(call: Run, tmp_path: Path) -> None:
    done = call("-m", str(tmp_path / "none.gguf"), "--port", str(free_port()))
    assert done.returncode == 1
    assert "none.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_template_file_that_is_missing_is_exit_status_2(call: Run, tmp_path: Path) -> None:
    done = call("-m", "x", "--chat-template-file", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "No such file" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tiny_folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "keys").write_text("# comment\none\n")
    argv = [*PROGRAM, "-m", str(tiny_folder / "tiny-llm.gguf"), "--port", str(free_port()), "-t", "1", "-c", "256"]
    argv += ["--api-key-file", str(tmp_path / "keys")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("engine ready: http://127.0.0.1:")
        child.send_signal(number)
        try:
            assert child.wait(timeout=2) == 0
        finally:
            child.kill()
