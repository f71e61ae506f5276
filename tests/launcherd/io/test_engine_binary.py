"""Which engine is used, and what to do when there is none."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.command_line import Engine, EngineOptions
from services.launcherd.io import engine_binary
from services.launcherd.io.engine_binary import find_installed, look_for_programs
from services.launcherd.io.engine_records import EngineRecords
from services.launcherd.io.launch import launch_engine
from services.launcherd.model_info import ModelFile
from shared.config import EngineSection, NodeConfig
from shared.errors import EngineMissing
from shared.recipes import BUILTIN_RECIPES
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


def test_named_builds_are_found_and_asked_only_when_needed(tmp_path: Path, shim: Path) -> None:
    """docs/spec/options.md 5. The builds of llama.cpp are `embedded`, `path` and the names of `engine.backends`."""
    asked = tmp_path / "asked"
    other = write_program(tmp_path / "other", f'echo x >> {shlex.quote(str(asked))}; echo "version: 7 (other)"')
    section = EngineSection(backends={"other": str(other), "gone": "/no/such", "named": "llama-server"})
    installed = find_installed(NodeConfig(engine=section), environ(shim.parent))
    assert installed.backend == "path"
    assert not asked.exists()
    assert set(installed.missing_backends) == {"gone"}
    assert "the build gone of llama.cpp /no/such does not exist" in installed.missing_backends["gone"]
    for _ in range(2):
        assert installed.engine(EngineOptions(backend="other")).version == "other 7 (other)"
    assert asked.read_text() == "x\n" * 2, "--version and --help, once"
    assert installed.engine(EngineOptions(backend="named")).program == (str(shim),)
    assert installed.engine(EngineOptions(backend="embedded")).kind == "embedded"
    assert installed.engine(EngineOptions()).program == (str(shim),)
    with pytest.raises(EngineMissing, match="the build gone of"):
        installed.engine(EngineOptions(backend="gone"))


def test_the_configured_build_is_the_one_of_what_names_none(tmp_path: Path, shim: Path) -> None:
    """docs/spec/options.md 5. Where nobody names one it is `path` where there is one, else `embedded`."""
    search = environ(shim.parent)
    for section, backend in (
        (EngineSection(backend="embedded"), "embedded"),
        (EngineSection(path="embedded"), "embedded"),
        (EngineSection(path="embedded", backend="path"), "path"),
        (EngineSection(backend="mine", backends={"mine": str(shim)}), "mine"),
    ):
        assert find_installed(NodeConfig(engine=section), search).backend == backend, section
    gone = find_installed(NodeConfig(engine=EngineSection(backend="mine", backends={"mine": "/no/such"})), search)
    assert (gone.backend, gone.default()) == ("", None)
    assert "the build mine of llama.cpp /no/such does not exist" in gone.reason


def test_programs_of_recipes(tmp_path: Path) -> None:
    """docs/spec/recipes.md 9. A program is looked for on the PATH; while it is missing it is said how to get it."""
    program = write_program(tmp_path / "bin" / "whisper-server", "exit 1")
    own = replace(BUILTIN_RECIPES["sd-cpp"], name="mine", program=str(program))
    config = NodeConfig(recipes={**BUILTIN_RECIPES, "mine": own})
    found = look_for_programs(config, environ(tmp_path / "bin"))
    assert found.programs == {"whispercpp": str(program), "mine": str(program)}
    assert found.engine(EngineOptions(recipe="whispercpp")).program == (str(program),)
    assert found.missing_recipes["flm"] == (
        "the program of the recipe flm, flm, is not on the PATH; install it: FastFlowLM, from "
        "github.com/FastFlowLM/FastFlowLM, with AMD's NPU driver; or name it in mesh.toml: [recipes.flm] "
        'program = "/path/to/it"'
    )
    with pytest.raises(EngineMissing, match="the program of the recipe flm"):
        found.engine(EngineOptions(recipe="flm"))
    assert look_for_programs(config, environ(tmp_path / "bin")).seen == found.seen
    program.chmod(0o644)
    assert look_for_programs(config, environ(tmp_path / "bin")).seen != found.seen


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
