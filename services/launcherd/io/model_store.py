"""Getting models and getting rid of them: the registry, the downloads and the requests about both, behind launcherd.

It decides nothing that a rule could decide: names are the registry's, turns and retries the state machine's, what may
be deleted `model_files.deletable`'s.

Source: docs/spec/downloads.md, docs/spec/registry.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from services.launcherd.download_events import (
    AskerGone,
    CancelAsked,
    DownloadEffect,
    DownloadProgressed,
    DownloadReply,
    DownloadsRestored,
    DownloadStimulus,
    DownloadToken,
    InstallModel,
    ModelInstalled,
    PublishDownload,
    PullAsked,
    RememberPending,
    StartDownload,
    StopDownload,
    Wanted,
)
from services.launcherd.downloads import Downloads
from services.launcherd.io.downloads import DownloadProcess, worker_environment
from services.launcherd.io.library import Library
from services.launcherd.io.model_files import (
    deletable,
    delete,
    delete_partial,
    read_pending,
    read_registry,
    write_pending,
    write_registry,
)
from services.launcherd.model_names import not_found_words
from services.launcherd.model_source import SourceRefused, check_name
from services.launcherd.registry import Registry, is_local
from services.launcherd.slot_events import InventoryScanned, KnownModel
from shared import codec
from shared.config import NodeConfig
from shared.errors import RequestRefused
from shared.ids import ModelName
from shared.io import log
from shared.io.drive import Drive, Tasks, Tick
from shared.messages.daemon import Done, StoryEntry
from shared.messages.downloads import CancelPull, DeleteModel, PullModel, RegistryChanged
from shared.paths import NodePaths
from shared.words import size_words

Publish = Callable[[codec.Message], None]
Unload = Callable[[ModelName], Awaitable[codec.Message]]
"""Running requests finish first; a model that is not loaded is unloaded at once."""


class ModelStore:
    """One per launcherd. `post` is told every inventory, as the slot table is."""

    def __init__(
        self,
        paths: NodePaths,
        config: NodeConfig,
        tasks: Tasks,
        *,
        post: Callable[[InventoryScanned], None],
        publish: Publish,
        unload: Unload,
    ) -> None:
        self._paths = paths
        self._config = config
        self._tasks = tasks
        self._post = post
        self._publish = publish
        self._unload = unload
        self._registry_file = paths.state / "registry.json"
        self._pending_file = paths.state / "downloads.json"
        entries, problems = read_registry(self._registry_file)
        for words in problems:
            log.warning("registry_broken", reason=words)
        self.registry = Registry(entries, config.recipes)
        self.library = Library(paths, config, self._scanned, self.registry)
        self._downloads = Downloads()
        self._drive: Drive[DownloadStimulus, DownloadEffect] = Drive(
            self._downloads, self._perform, quiet=(Tick, DownloadProgressed)
        )
        self._process = DownloadProcess(paths.downloads, self._drive.post, tasks)
        self._on_disk: dict[ModelName, KnownModel] = {}
        self._told: RegistryChanged | None = None
        self._tokens = itertools.count(1)
        self._replies: dict[DownloadToken, asyncio.Future[codec.Message]] = {}

    def start(self) -> None:
        """Go on with what an earlier launcherd had not finished."""
        pending = read_pending(self._pending_file)
        if pending:
            self._drive.post(DownloadsRestored(pending=pending))
        self._tasks.start(self._drive.run(), "downloads")

    def configure(self, config: NodeConfig) -> None:
        self._config = config
        self.registry.recipes = config.recipes
        self.library.configure(config)

    def snapshot(self) -> Iterable[codec.Message]:
        yield self._view()
        yield from self._downloads.snapshot()

    def story(self, limit: int, now: float) -> tuple[StoryEntry, ...]:
        return self._drive.story(limit, now)

    def explain(self, subject: str, now: float) -> tuple[str, ...]:
        """Why a model is not here yet, or that it could be; empty where there is nothing to say."""
        name = self._name_of(subject)
        under_way = self._downloads.explain(name, now)
        entry = self.registry.find(name)
        if under_way or entry is None or name in self._on_disk:
            return under_way
        where = f"{name} is in the registry ({entry.checkpoint}), but not on this disk"
        return (f"{where}: 'meshctl pull {name}' gets it.",)

    # -- requests --------------------------------------------------------------------------------------------

    async def handle(self, request: PullModel | CancelPull | DeleteModel) -> codec.Message:
        """Raises: RequestRefused, SourceRefused, NotOurs."""
        match request:
            case PullModel():
                return await self._pull(request)
            case CancelPull(model=model):
                name = self._name_of(model)
                return await self._ask(lambda token: CancelAsked(token=token, name=name))
            case DeleteModel(model=model):
                try:
                    return await self._delete(model)
                except OSError as error:
                    words = f"{error.filename or model} cannot be deleted: {error.strerror}; fix its permissions"
                    raise RequestRefused("not_deleted", words) from error

    async def _pull(self, request: PullModel) -> codec.Message:
        await self.library.scan()
        known = self._on_disk.get(ModelName(request.model))
        if known is not None and not request.checkpoint and self.registry.find(request.model) is None:
            return _there(known)
        wanted = self.registry.resolve(request, self._on_disk)
        there = self._on_disk.get(wanted.name)
        if there is not None:
            return _there(there)
        if is_local(wanted.checkpoint, wanted.recipe):
            return await self._register_local(wanted)
        return await self._ask(lambda token: PullAsked(token=token, wanted=wanted, wait=request.wait))

    async def _register_local(self, wanted: Wanted) -> Done:
        """What another engine runs and is here already."""
        self.registry.add(wanted)
        found = await self._scan_anew()
        if wanted.name not in {model.name for model in found.models}:
            self.registry.forget(wanted.name)
            words = f"{wanted.checkpoint} is not there; give the whole path of a file or folder"
            raise RequestRefused("file_not_found", words)
        await self._write_registry()
        return Done(detail=f"{wanted.name} is registered, at {wanted.checkpoint}", subject=wanted.name)

    async def _delete(self, asked: str) -> Done:
        """Raises: OSError, RequestRefused, NotOurs."""
        name = self._name_of(asked)
        if self._downloads.underway(name) is not None:
            raise RequestRefused(
                "downloading", f"{name} is being downloaded; stop that first: 'meshctl pull {name} --cancel'"
            )
        await self.library.scan()
        model = self._on_disk.get(name)
        entry = self.registry.find(name)
        mine = entry is not None and entry.user
        if model is None:
            freed = await asyncio.to_thread(delete_partial, name, self._paths.downloads) if _is_name(name) else 0
            if not mine and not freed:
                raise RequestRefused("model_not_found", not_found_words(asked, self._on_disk))
            words = f"Deleted what had come of {name}: {size_words(freed)}." if freed else f"Forgot {name}."
        elif mine and entry is not None and is_local(entry.checkpoint, entry.recipe):
            await self._unload(name)
            words = f"Forgot {name}; {entry.checkpoint} is left as it is."
        else:
            files = await asyncio.to_thread(deletable, model, self._paths.downloads)
            await self._unload(name)
            freed = await asyncio.to_thread(delete, files, self._paths.downloads)
            await asyncio.to_thread(delete_partial, name, self._paths.downloads)
            words = f"Deleted {name}: {size_words(freed)}."
        if mine:
            self.registry.forget(name)
            await self._write_registry()
        await self._scan_anew()
        log.info("model_deleted", model=name, words=words)
        return Done(detail=words, subject=name)

    def _name_of(self, asked: str) -> ModelName:
        """What a person calls a model, whether it is here, on its way or only known."""
        underway = self._downloads.underway(asked)
        if underway is not None:
            return underway.model
        if asked in self._on_disk:
            return ModelName(asked)
        entry = self.registry.find(asked)
        if entry is not None:
            return entry.name
        try:
            return self.registry.resolve(PullModel(model=asked)).name
        except SourceRefused:
            return ModelName(asked)

    async def _ask(self, stimulus: Callable[[DownloadToken], DownloadStimulus]) -> codec.Message:
        token = DownloadToken(next(self._tokens))
        future: asyncio.Future[codec.Message] = asyncio.get_running_loop().create_future()
        self._replies[token] = future
        self._drive.post(stimulus(token))
        try:
            return await future
        except asyncio.CancelledError:
            self._replies.pop(token, None)
            self._drive.post(AskerGone(token=token))
            raise

    # -- effects ---------------------------------------------------------------------------------------------

    def _perform(self, effect: DownloadEffect) -> None:
        match effect:
            case StartDownload(job=job, wanted=wanted):
                log.info("download_starts", model=wanted.name, checkpoint=wanted.checkpoint)
                stall = self._config.models.download_stall_seconds
                self._process.start(job, wanted, stall, worker_environment())
            case StopDownload(job=job):
                self._process.stop(job)
            case InstallModel(wanted=wanted):
                self._tasks.start(self._install(wanted), f"install {wanted.name}")
            case DownloadReply(token=token, message=message):
                future = self._replies.pop(token, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case PublishDownload(message=message):
                self._publish(message)
                if message.state in ("done", "failed", "cancelled"):
                    write = log.warning if message.state == "failed" else log.info
                    write(f"download_{message.state}", model=message.model, code=message.code, reason=message.reason)
            case RememberPending(pending=pending):
                try:
                    write_pending(self._pending_file, pending)
                except OSError as error:
                    log.error("pending_not_written", reason=str(error))

    async def _install(self, wanted: Wanted) -> None:
        if wanted.register:
            self.registry.add(wanted)
            await self._write_registry()
        found = await self._scan_anew()
        reason = ""
        if wanted.name not in {model.name for model in found.models}:
            reason = await self._useless(wanted, found)
        self._drive.post(ModelInstalled(name=wanted.name, reason=reason))

    async def _useless(self, wanted: Wanted, found: InventoryScanned) -> str:
        """Whole, verified, and nothing that an engine could load: it goes again, and why is said."""
        folder = self._paths.downloads / wanted.name
        said = [item.reason for item in found.skipped if Path(item.path).is_relative_to(folder)]
        try:
            await asyncio.to_thread(delete, [folder], self._paths.downloads)
        except OSError as error:
            log.warning("not_deleted", path=str(folder), reason=str(error))
        if wanted.register:
            self.registry.forget(wanted.name)
            await self._write_registry()
        return f"{wanted.checkpoint} was downloaded, but cannot be used: {'; '.join(said) or 'it holds no model'}"

    async def _write_registry(self) -> None:
        try:
            await asyncio.to_thread(write_registry, self._registry_file, self.registry.document())
        except OSError as error:
            log.error("registry_not_written", reason=str(error))

    async def _scan_anew(self) -> InventoryScanned:
        """A scan that began after now: one that is under way may have passed the place already."""
        await self.library.scan()
        found = await self.library.scan()
        self._tell_registry()
        return found

    # -- the inventory ---------------------------------------------------------------------------------------

    def _scanned(self, found: InventoryScanned) -> None:
        self._on_disk = {model.name: model for model in found.models}
        self._post(found)
        self._tell_registry()

    def _view(self) -> RegistryChanged:
        sizes = {name: model.file.file_size_bytes for name, model in self._on_disk.items()}
        return RegistryChanged(models=self.registry.view(sizes))

    def _tell_registry(self) -> None:
        view = self._view()
        if view != self._told:
            self._told = view
            self._publish(view)


def _there(model: KnownModel) -> Done:
    words = f"{model.name} is on this node's disk already, {size_words(model.file.file_size_bytes)}"
    return Done(detail=words, subject=model.name)


def _is_name(name: str) -> bool:
    """Whether it can be a folder's name: nobody reaches another folder by deleting a model."""
    try:
        check_name(name)
    except SourceRefused:
        return False
    return True
