"""The models folders as the slot table gets to know them."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.io import library
from services.launcherd.io.library import Library, folder_stamp
from services.launcherd.slot_events import InventoryScanned
from shared.config import ModelsSection, NodeConfig
from shared.io.drive import Tasks
from shared.paths import NodePaths
from tests.engines import tiny_models
from tests.waiting import until

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    made.mkdir()
    tiny_models.write_llm(made / "one.gguf")
    return made


def node(folder: Path) -> NodeConfig:
    return NodeConfig(models=ModelsSection(folders=(str(folder),)))


def names(found: InventoryScanned) -> set[str]:
    return {model.name for model in found.models}


def test_the_guide_is_builtin_and_the_owners_models_are_not(run: Run, node_paths: NodePaths, folder: Path) -> None:
    async def work() -> None:
        told: list[InventoryScanned] = []
        found = await Library(node_paths, node(folder), told.append).scan()
        assert told == [found]
        builtin = {model.name for model in found.models if model.builtin}
        assert "one" not in builtin
        assert names(found) == builtin | {"one"}

    run(work())


def test_a_projector_belongs_to_the_model_it_is_named_after(run: Run, node_paths: NodePaths, folder: Path) -> None:
    """docs/spec/recipes.md 16: `mmproj-NAME.gguf` beside a model is its projector."""
    for name in ("mmproj-one.gguf", "mmproj-other.gguf"):
        (folder / name).write_bytes(b"GGUF")

    async def work() -> None:
        found = await Library(node_paths, node(folder), lambda found: None).scan()
        one = next(model for model in found.models if model.name == "one")
        assert one.projector == str(folder / "mmproj-one.gguf")
        assert one.projector_bytes == (folder / "mmproj-one.gguf").stat().st_size > 0
        assert one.size_bytes == one.file.file_size_bytes + one.projector_bytes
        assert [os.path.basename(item.path) for item in found.skipped] == ["mmproj-other.gguf"]

    run(work())


def test_only_news_is_told(run: Run, node_paths: NodePaths, folder: Path) -> None:
    async def work() -> None:
        told: list[InventoryScanned] = []
        shelf = Library(node_paths, node(folder), told.append)
        await shelf.scan()
        await shelf.scan()
        assert len(told) == 1
        (folder / "bad.gguf").write_bytes(b"nothing")
        await shelf.scan()
        assert any(item.path.endswith("bad.gguf") for item in told[-1].skipped)

    run(work())


def test_new_files_are_found_by_themselves(
    run: Run, node_paths: NodePaths, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rescan automatically, cheaply, by what the folders say."""
    monkeypatch.setattr(library, "LOOK_SECONDS", 0.02)

    async def work() -> None:
        told: list[InventoryScanned] = []
        shelf = Library(node_paths, node(folder), told.append)
        await shelf.scan()
        tasks = Tasks()
        tasks.start(shelf.watch(), "watch")
        (folder / "deep" / "er").mkdir(parents=True)
        tiny_models.write_llm(folder / "deep" / "er" / "two.gguf")
        await until(lambda: "two" in names(told[-1]), 5, "the second model is found")
        (folder / "one.gguf").unlink()
        await until(lambda: "one" not in names(told[-1]), 5, "the first model is missed")
        await tasks.cancel()

    run(work())


def test_hashes_come_later_and_not_while_something_loads(
    run: Run, node_paths: NodePaths, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "HASH_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(library, "HASH_PAUSE_SECONDS", 0.01)

    async def work() -> None:
        told: list[InventoryScanned] = []
        busy = True
        shelf = Library(node_paths, node(folder), told.append)
        asked = 0

        def is_busy() -> bool:
            nonlocal asked
            asked += 1
            return busy

        tasks = Tasks()
        tasks.start(shelf.hash_all(is_busy), "hashes")
        await shelf.scan()
        await until(lambda: asked > 3, 5, "it asks whether it may")
        assert not any(model.file_hash for model in told[-1].models if model.name == "one")
        busy = False
        await until(lambda: all(model.file_hash for model in told[-1].models), 5, "all hashes are known")
        await tasks.cancel()

    run(work())


def test_stamps_survive_loops_and_missing_folders(tmp_path: Path) -> None:
    """TRAPS 44: a link loop in the models folder."""
    os.symlink(tmp_path, tmp_path / "loop")
    before = folder_stamp((tmp_path, tmp_path / "missing"))
    assert folder_stamp((tmp_path, tmp_path / "missing")) == before
    (tmp_path / "new.gguf").write_bytes(b"x")
    assert folder_stamp((tmp_path, tmp_path / "missing")) != before
