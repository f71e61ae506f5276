"""Real tiny models, the embedded engine, and a guard that no test leaves an engine behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services.launcherd.command_line import ENGINE_MARK, Engine, EngineOptions
from services.launcherd.io.engine_binary import embedded_engine
from services.launcherd.io.model_folders import ModelFolders
from services.launcherd.io.process import marked_processes, send_signal
from services.launcherd.model_info import ModelFile
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script
from tests.launcherd.launcher_node import LauncherNode, launcher_node

T = TypeVar("T")
TEST_SECONDS = 30.0


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one tiny model of each type, a second llm and one in three parts."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.write_llm(folder / "tiny-llm.gguf")
    tiny_models.write_llm(folder / "tiny-other.gguf", seed=2, name="tiny-other")
    tiny_models.write_embedding(folder / "tiny-embedding.gguf")
    tiny_models.write_reranking(folder / "tiny-reranking.gguf")
    tiny_models.write_parts(folder, "tiny-parts", folder / "tiny-llm.gguf")
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> dict[str, ModelFile]:
    """The same models as scanned, by name."""
    return {model.name: model for model in ModelFolders([tiny_folder]).scan().models}


@pytest.fixture(scope="session")
def embedded() -> Engine:
    return embedded_engine()


@pytest.fixture
def small_options() -> EngineOptions:
    """Resolved options that suit two cores."""
    return EngineOptions(context_tokens=1024, parallel=2, threads=1)


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Runs a coroutine in a loop of its own, within a deadline."""

    def run_within(work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(TEST_SECONDS):
                return await work

        return asyncio.run(bounded())

    return run_within


@pytest.fixture
def no_engine_left(tmp_path: Path) -> Iterator[None]:
    """Fails the test if a process marked with a record below `tmp_path` outlives it, and kills it."""
    yield
    left = marked_processes(ENGINE_MARK, str(tmp_path))
    for identity, _ in left:
        send_signal(identity, signal.SIGKILL)
    assert left == []


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 10.0) -> None:
    """Waits until a condition holds. Raises: TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            if result is True or (not isinstance(result, bool) and await result):
                return
            await asyncio.sleep(0.01)


@pytest.fixture
def node(mesh_home: Path, tiny_folder: Path) -> Iterator[LauncherNode]:
    with launcher_node(mesh_home, tiny_folder) as running:
        yield running


@pytest.fixture
def scripted(node: LauncherNode) -> LauncherNode:
    node.use_script(Script(tokens=60, token_seconds=0.02))
    return node
