"""The models folders of the node, looked at again and again without ever blocking the event loop.

A full scan is one `stat` per file; between scans only the folders' own modification times are compared. Hashes are
computed one model at a time while nothing is being loaded, because both want the disk.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from services.launcherd.io.model_folders import ModelFolders
from services.launcherd.io.other_models import other_models
from services.launcherd.model_info import ModelFile
from services.launcherd.registry import Registry
from services.launcherd.slot_events import InventoryScanned, KnownModel
from shared.config import ModelsSection, NodeConfig
from shared.errors import LoadFailed
from shared.io import log
from shared.messages.models import SkippedFile
from shared.paths import NodePaths
from shared.recipes import LLAMACPP

LOOK_SECONDS = 10.0
HASH_DELAY_SECONDS = 5.0
"""Before the first hash: the first loads go first."""
HASH_PAUSE_SECONDS = 0.5
FOLDERS_WATCHED = 5_000
"""More folders than these are not watched; a rescan finds what is in them."""


class Library:
    """Tells `post` about every change of what is on disk."""

    def __init__(
        self,
        paths: NodePaths,
        config: NodeConfig,
        post: Callable[[InventoryScanned], None],
        registry: Registry | None = None,
    ) -> None:
        """`registry` says more of what meshd downloaded, and knows the models of other engines."""
        self._paths = paths
        self._registry = registry or Registry()
        self._post = post
        self._folders: tuple[Path, ...] = ()
        self._files = ModelFolders([])
        self._scanning: asyncio.Task[InventoryScanned] | None = None
        self._last: InventoryScanned | None = None
        self._stamp: object = None
        self._scanned = asyncio.Event()
        self.configure(config)

    def configure(self, config: NodeConfig) -> None:
        """Which folders to look at, from the next scan on. The guide's comes last: a model of the owner wins."""
        own = (self._paths.downloads, self._paths.guide_folder)
        named = config.model_folders()
        nobody_named = () if config.models.folders != ModelsSection().folders else named
        folders = (*named, *own)
        if folders != self._folders:
            self._folders = folders
            cache = self._paths.state / "models.json"
            self._files = ModelFolders(folders, cache, may_be_missing=(*nobody_named, *own))
            self._scanning = None  # One under way looks at the old folders.

    async def scan(self) -> InventoryScanned:
        """Look at every file. Callers at the same time share one scan."""
        if self._scanning is None or self._scanning.done():
            self._scanning = asyncio.get_running_loop().create_task(self._scan())
        return await asyncio.shield(self._scanning)

    async def _scan(self) -> InventoryScanned:
        files = self._files
        stamp = await asyncio.to_thread(folder_stamp, self._folders)
        result = await asyncio.to_thread(files.scan)
        others = await asyncio.to_thread(other_models, self._registry.entries(), self._paths.downloads)
        # What another engine runs is no model of llama.cpp's, nor a broken one, even if a file of it ends in .gguf.
        theirs = tuple(f"{self._paths.downloads / entry.name}{os.sep}" for entry, _ in others)
        beside = {item.path for item in result.skipped if os.path.basename(item.path).startswith("mmproj-")}
        models = [
            self._known(file, files.known_hash(file), beside) for file in result.models if not _below(file.path, theirs)
        ]
        names = {model.name for model in models}
        models += [
            KnownModel(file=file, recipe=entry.recipe, labels=entry.labels, checkpoint=entry.checkpoint)
            for entry, file in others
            if entry.name not in names
        ]
        used = {model.projector for model in models}
        skipped = tuple(
            SkippedFile(path=item.path, reason=item.reason)
            for item in result.skipped
            if not _below(item.path, theirs) and item.path not in used
        )
        found = InventoryScanned(models=tuple(sorted(models, key=lambda model: model.name)), skipped=skipped)
        self._stamp = stamp
        if found != self._last:
            self._report(found)
            self._last = found
            self._post(found)
        self._scanned.set()
        return found

    def _known(self, file: ModelFile, file_hash: str, beside: Collection[str]) -> KnownModel:
        """With what the registry knows of it, if meshd downloaded it; `beside` are the projectors that were found."""
        projector = os.path.join(os.path.dirname(file.path), f"mmproj-{file.name}.gguf")
        projector = projector if projector in beside else ""
        projector_bytes = _size(projector)
        builtin = file.path.startswith(f"{self._paths.guide_folder}{os.sep}")
        entry = self._registry.find(file.name) if file.path.startswith(f"{self._paths.downloads}{os.sep}") else None
        if entry is None or entry.name != file.name:
            return KnownModel(
                file=file,
                file_hash=file_hash,
                builtin=builtin,
                projector=projector,
                projector_bytes=projector_bytes,
            )
        if entry.type != "llm":
            # Conversions of embedding and reranking models do not always say in their header that they are one.
            file = replace(file, type=entry.type)
        return KnownModel(
            file=file,
            file_hash=file_hash,
            builtin=builtin,
            recipe=entry.recipe,
            labels=entry.labels,
            checkpoint=entry.checkpoint,
            projector=projector,
            projector_bytes=projector_bytes,
        )

    async def watch(self) -> None:
        """For ever: scan again when a folder changed."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await asyncio.to_thread(folder_stamp, self._folders) != self._stamp:
                await self.scan()

    async def hash_all(self, busy: Callable[[], bool]) -> None:
        """For ever: compute what hash is missing, smallest model first, not while `busy`."""
        await asyncio.sleep(HASH_DELAY_SECONDS)
        failed: set[str] = set()
        while True:
            await self._scanned.wait()
            missing = [
                model.file
                for model in (self._last.models if self._last else ())
                if not model.file_hash and model.file.path not in failed and model.recipe == LLAMACPP
            ]
            if not missing or busy():
                await asyncio.sleep(HASH_PAUSE_SECONDS if missing else LOOK_SECONDS)
                continue
            file = min(missing, key=lambda file: file.file_size_bytes)
            try:
                await self._files.hash_model(file)
            except LoadFailed as error:
                failed.add(file.path)
                log.warning("hash_failed", model=file.name, reason=error.detail)
                continue
            await self.scan()

    def _report(self, found: InventoryScanned) -> None:
        known = set() if self._last is None else {item.path for item in self._last.skipped}
        for item in found.skipped:
            if item.path not in known:
                log.warning("file_skipped", path=item.path, reason=item.reason)
        names = {model.name for model in self._last.models} if self._last else set()
        for model in found.models:
            if model.name not in names:
                log.info("model_found", model=model.name, type=model.file.type, bytes=model.file.file_size_bytes)


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return path.startswith(folders) if folders else False


def _size(path: str) -> int:
    """0 for none, and for one that has just gone."""
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0


def folder_stamp(folders: tuple[Path, ...]) -> object:
    """Differs when a file appeared in or vanished from a folder or a folder below it. Blocking."""
    stamps: list[tuple[str, int]] = []
    seen: set[tuple[int, int]] = set()
    pending = [str(folder) for folder in folders]
    while pending and len(stamps) < FOLDERS_WATCHED:
        path = pending.pop()
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            stamps.append((path, status.st_mtime_ns))
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir():
                        pending.append(entry.path)
                    elif entry.name.endswith(".gguf"):
                        stamps.append((entry.path, entry.stat().st_size))
        except OSError:
            continue
    return tuple(sorted(stamps))
