"""Which engine is used, and what to do when there is none."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.command_line import Engine, EngineOptions
from services.launcherd.io import engine_binary
from services.launcherd.io.engine_binary import find_installed
from services.launcherd.io.engine_records import EngineRecords
from services.launcherd.io.launch import launch_engine
from services.launcherd.model_info import ModelFile
from shared.config import EngineSection, NodeConfig
from shared.errors import EngineMissing
from tests.engines.scripted_engine import Script

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """A `llama-server` on its own in a folder, which is really the embedded engine."""
    return write_program(
        tmp_path / "bin" / "llama-server",
        f'exec {shlex.quote(sys.executable)} -m services.launcherd.engine_server "$@"',
    )


def find_engine(configured: str, environ: Mapping[str, str]) -> Engine:
    """The engine that runs what names none."""
    installed = find_installed(NodeConfig(engine=EngineSection(path=configured)), environ)
    engine = installed.default()
    if engine is None:
        raise EngineMissing(installed.reason)
    return engine


def environ(*folders: Path) -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"])}


def test_the_configured_engine_wins(tmp_path: Path, shim: Path, scripted: Callable[[Script], Engine]) -> None:
    configured = scripted(Script()).program[0]
    engine = find_engine(configured, environ(shim.parent))
    assert engine.program == (configured,)
    assert (engine.kind, engine.version) == ("llama-server", "llama-server 1 (scripted)")
    assert engine.flags is not None
    assert {"--port", "--cache-ram"} <= engine.flags


def test_one_on_the_path_is_used_instead_of_the_embedded_one(shim: Path) -> None:
    engine = find_engine("", environ(shim.parent))
    assert engine.program == (str(shim),)
    assert "xllamacpp" in engine.version
    assert engine.flags is not None
    assert {"--model", "-m", "--ctx-size", "--no-webui", "--flash-attn"} <= engine.flags


def test_the_embedded_engine_is_the_default_and_can_be_asked_for(shim: Path) -> None:
    for engine in (find_engine("", environ()), find_engine("embedded", environ(shim.parent))):
        assert engine.kind == "embedded"
        assert engine.program[0] == sys.executable
        assert engine.version.startswith("xllamacpp 20")


@pytest.mark.parametrize("script", ["exit 1", "kill -9 $$"])
def test_a_broken_one_on_the_path_does_not_stop_the_embedded_one(tmp_path: Path, script: str) -> None:
    write_program(tmp_path / "bin" / "llama-server", script)
    assert find_engine("", environ(tmp_path / "bin")).kind == "embedded"


def test_a_broken_configured_engine_is_an_error(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("not a program")
    broken = write_program(tmp_path / "broken", "exit 1")
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\x7fELF of another machine")
    foreign.chmod(0o755)
    for path, reason in (
        (tmp_path / "none", "does not exist"),
        (plain, "not executable"),
        (broken, "does not run"),
        (foreign, "does not run"),
    ):
        with pytest.raises(EngineMissing, match=reason):
            find_engine(str(path), environ())


def test_without_any_engine_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing) as caught:
        find_engine("", environ())
    for way in ("pip install xllamacpp", "PATH", "mesh.toml"):
        assert way in caught.value.detail
    write_program(tmp_path / "bin" / "llama-server", "exit 1")
    with pytest.raises(EngineMissing, match="does not run"):
        find_engine("", environ(tmp_path / "bin"))


def test_one_that_never_answers_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_binary, "ASK_SECONDS", 0.1)
    write_program(tmp_path / "bin" / "llama-server", "exec sleep 60")
    assert find_engine("", environ(tmp_path / "bin")).kind == "embedded"


def test_without_a_help_text_every_flag_is_believed(tmp_path: Path) -> None:
    path = write_program(tmp_path / "odd", '[ "$1" = --version ] && echo "version: 9 (abc)"')
    engine = find_engine(str(path), environ())
    assert engine.flags is None
    assert engine.version == "odd 9 (abc)"


@pytest.mark.usefixtures("no_engine_left")
@pytest.mark.parametrize("model", ["tiny-llm", "tiny-parts", "tiny-embedding", "tiny-reranking"])
@pytest.mark.parametrize("installed", [False, True])
def test_models_are_served_by_a_llama_server_from_the_path(
    run: Run,
    shim: Path,
    tiny: dict[str, ModelFile],
    small_options: EngineOptions,
    tmp_path: Path,
    installed: bool,
    model: str,
) -> None:
    """By our stand-in for one, and by the real one where it is installed."""
    if installed and shutil.which("llama-server") is None:
        pytest.skip("no llama-server on the PATH")
    path = dict(os.environ) if installed else environ(shim.parent)

    async def go() -> None:
        engine = await asyncio.to_thread(find_engine, "", path)
        assert engine.kind == "llama-server"
        process, record = await launch_engine(
            engine,
            tiny[model],
            small_options,
            engine_id="one",
            records=EngineRecords(tmp_path / "engines"),
            log_path=tmp_path / "one.log",
            environ={**path, "LLAMA_ARG_PORT": "1"},
            ready_timeout_seconds=20,
        )
        assert record.argv[0] == shutil.which("llama-server", path=path["PATH"])
        assert await process.probe(2)
        assert await process.accepts_key(2)
        await process.stop()

    run(go())
