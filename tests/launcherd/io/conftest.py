"""Engines to start: the real one, and stand-ins with a script."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.launcherd.command_line import Engine, EngineCommand, EngineOptions, build_command
from services.launcherd.io.engine import free_port, new_api_key
from services.launcherd.model_info import ModelFile
from tests.engines.scripted_engine import Script, write_engine

MakeCommand = Callable[..., EngineCommand]


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[[Script], Engine]:
    """An engine that does what the script says."""

    def make(script: Script) -> Engine:
        path = write_engine(tmp_path / "llama-server", script)
        return Engine(kind="llama-server", program=(str(path),), version="scripted")

    return make


@pytest.fixture
def make_command(
    tmp_path: Path,
    tiny: dict[str, ModelFile],
    small_options: EngineOptions,
    scripted: Callable[[Script], Engine],
    embedded: Engine,
) -> MakeCommand:
    """A command for the embedded engine, or for a stand-in if a script is given."""

    def make(model: str = "tiny-llm", script: Script | None = None, port: int = 0) -> EngineCommand:
        return build_command(
            embedded if script is None else scripted(script),
            tiny[model],
            small_options,
            port=port or free_port(),
            api_key=new_api_key(),
            environ=os.environ,
            mark=str(tmp_path / "engines" / "test.json"),
        )

    return make
