"""Finds the models in the models folders and keeps what was learned about their files.

Blocking file work: call `scan` and `save` from a worker thread. A scan of unchanged folders costs one `stat` per
file, because headers and hashes are cached by (path, size, modification time, inode).

Source: DESIGN §6 (model identity); TRAPS 17, 23, 44.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from services.launcherd.gguf import parse_header
from services.launcherd.io.download_files import MARK
from services.launcherd.model_info import (
    FileFacts,
    ModelFile,
    PartName,
    build_model,
    combined_hash,
    file_facts,
    split_part_name,
)
from shared.errors import LoadFailed, ModelFileBroken, ModelFileMissing

CACHE_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or folder that gives no model, and why, in words."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Models sorted by name, skipped files by path."""

    models: tuple[ModelFile, ...]
    skipped: tuple[Skipped, ...]


@dataclass(slots=True)
class _Entry:
    """What the cache knows of one file: its facts, or why it is broken; its hash once computed."""

    size: int
    mtime_ns: int
    inode: int
    facts: FileFacts | None = None
    broken: str = ""
    sha256: str = ""

    def same_file(self, status: os.stat_result) -> bool:
        return (self.size, self.mtime_ns, self.inode) == (status.st_size, status.st_mtime_ns, status.st_ino)


class ModelFolders:
    """The models folders of one node. Thread-safe; the cache file may vanish or rot at any time."""

    def __init__(
        self, folders: Sequence[Path], cache_file: Path | None = None, *, may_be_missing: Collection[Path] = ()
    ) -> None:
        """`folders` may also name single files. Earlier folders win when two hold the same name.

        Folders that nobody named, `may_be_missing`, are not worth a word when they do not exist.
        """
        self._folders = tuple(Path(os.path.abspath(folder)) for folder in folders)
        self._may_be_missing = frozenset(Path(os.path.abspath(folder)) for folder in may_be_missing)
        self._cache_file = cache_file
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {} if cache_file is None else _read_cache(cache_file)
        self._changed = False

    def scan(self) -> ScanResult:
        """Looks at every `.gguf` file below the folders. Never raises for what it finds there."""
        skipped: list[Skipped] = []
        groups: dict[str, dict[tuple[str, str, int], dict[int, Path]]] = {}
        seen: dict[str, os.stat_result] = {}
        for path in _gguf_files(self._folders, self._may_be_missing, skipped):
            part = split_part_name(path.name)
            reason = _unusable(path, part)
            status = _status(path)
            if isinstance(status, str):
                reason = reason or status
            if reason:
                skipped.append(Skipped(_shown(path), reason))
                continue
            assert not isinstance(status, str)
            seen[str(path)] = status
            same_place = groups.setdefault(part.stem, {})
            same_place.setdefault((str(path.parent), part.stem, part.count), {})[part.number] = path
        models = []
        for stem, places in groups.items():
            model = self._first_whole(stem, places, seen, skipped)
            if model is not None:
                models.append(model)
        with self._lock:
            for gone in [path for path in self._entries if path not in seen]:
                if not os.path.exists(gone):
                    del self._entries[gone]
                    self._changed = True
        self.save()
        return ScanResult(
            tuple(sorted(models, key=lambda model: model.name)), tuple(sorted(skipped, key=lambda item: item.path))
        )

    async def hash_model(self, model: ModelFile, on_progress: Callable[[int], None] | None = None) -> str:
        """SHA-256 of the model's file; of its parts' digests when there are several. Cached.

        Cancelling it stops the worker thread within one chunk. `on_progress` gets the bytes hashed so far, in
        the worker thread. Raises: ModelFileMissing, LoadFailed when a file cannot be read.
        """
        return combined_hash(await self.hash_parts(model, on_progress))

    async def hash_parts(self, model: ModelFile, on_progress: Callable[[int], None] | None = None) -> tuple[str, ...]:
        """SHA-256 in hex of each part, by which peers exchange files. As `hash_model`."""
        stop = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(None, self._hash_all, model.parts, stop, on_progress)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            raise

    def known_hash(self, model: ModelFile) -> str:
        """The model's hash if it is in the cache, else empty."""
        hashes = []
        for path in model.parts:
            with self._lock:
                entry = self._entries.get(path)
            if entry is None or not entry.sha256:
                return ""
            hashes.append(entry.sha256)
        return combined_hash(hashes)

    def save(self) -> None:
        """Writes the cache file if anything changed. A cache that cannot be written is only slower."""
        with self._lock:
            if self._cache_file is None or not self._changed:
                return
            document = {"version": CACHE_VERSION, "files": {path: asdict(e) for path, e in self._entries.items()}}
            text = json.dumps(document)
            self._changed = False
        temporary = self._cache_file.with_name(f".{self._cache_file.name}.{threading.get_ident()}")
        try:
            temporary.write_text(text)
            temporary.replace(self._cache_file)
        except OSError:
            temporary.unlink(missing_ok=True)

    def _first_whole(
        self,
        stem: str,
        places: dict[tuple[str, str, int], dict[int, Path]],
        seen: dict[str, os.stat_result],
        skipped: list[Skipped],
    ) -> ModelFile | None:
        """The first complete model of this name; every other candidate is skipped with its reason."""
        winner: ModelFile | None = None
        for (_, _, count), parts in places.items():
            shown = _shown(parts[min(parts)])
            missing = [number for number in range(1, count + 1) if number not in parts] if count <= 1000 else [0]
            if winner is not None:
                skipped.append(Skipped(shown, f"another file gives {stem} already: {winner.path}"))
            elif missing:
                words = ", ".join(str(number) for number in missing[:8])
                skipped.append(Skipped(shown, f"parts missing: {words} of {count}"))
            else:
                try:
                    winner = self._build(stem, [parts[number] for number in range(1, count + 1)], seen)
                except ModelFileBroken as error:
                    skipped.append(Skipped(shown, error.detail))
        return winner

    def _build(self, stem: str, paths: list[Path], seen: dict[str, os.stat_result]) -> ModelFile:
        parts = []
        for path in paths:
            try:
                facts = self._facts(path, seen[str(path)])
            except ModelFileBroken as error:
                if len(paths) > 1:
                    raise ModelFileBroken(f"{path.name}: {error.detail}") from None
                raise
            parts.append((str(path), seen[str(path)].st_size, facts))
        return build_model(stem, parts)

    def _facts(self, path: Path, status: os.stat_result) -> FileFacts:
        """Raises: ModelFileBroken."""
        with self._lock:
            entry = self._entries.get(str(path))
        if entry is None or not entry.same_file(status):
            entry = _Entry(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)
            entry.sha256 = _downloaded_hash(path, status)
        if entry.facts is None and not entry.broken:
            try:
                entry.facts = _read_facts(path)
            except ModelFileBroken as error:
                entry.broken = error.detail
            except OSError as error:
                # Not remembered: permissions change without touching what the cache is keyed by.
                raise ModelFileBroken(f"cannot be read: {error.strerror or error}") from error
            with self._lock:
                self._entries[str(path)] = entry
                self._changed = True
        if entry.facts is None:
            raise ModelFileBroken(entry.broken)
        return entry.facts

    def _hash_all(
        self, paths: Sequence[str], stop: threading.Event, on_progress: Callable[[int], None] | None
    ) -> tuple[str, ...]:
        done = 0
        hashes = []
        for path in paths:
            try:
                status = os.stat(path)
                with self._lock:
                    entry = self._entries.get(path)
                if entry is None or not entry.same_file(status):
                    entry = _Entry(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)
                if not entry.sha256:
                    before = done
                    tell = None if on_progress is None else (lambda n, b=before: on_progress(b + n))
                    entry.sha256 = sha256_file(path, stop, tell)
                    if not entry.same_file(os.stat(path)):
                        raise LoadFailed(f"{path} changed while it was hashed; try again when it is complete")
            except FileNotFoundError:
                raise ModelFileMissing(f"{path} is gone") from None
            except OSError as error:
                raise LoadFailed(f"{path} cannot be read: {error.strerror or error}") from error
            with self._lock:
                self._entries[path] = entry
                self._changed = True
            hashes.append(entry.sha256)
            done += status.st_size
        self.save()
        return tuple(hashes)


def _downloaded_hash(path: Path, status: os.stat_result) -> str:
    """What a download was verified against; empty for a file that changed after it, and for any other file."""
    mark = path.with_name(MARK)
    try:
        if os.stat(mark).st_mtime_ns < status.st_mtime_ns:
            return ""
        key = json.loads(mark.read_bytes()).get(path.name, "")
    except (OSError, ValueError, AttributeError):
        return ""
    return key if isinstance(key, str) and _SHA256.fullmatch(key) else ""


def sha256_file(path: str, stop: threading.Event, on_progress: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file in hex. Blocking. Raises: OSError; LoadFailed when `stop` was set."""
    digest = hashlib.sha256()
    buffer = bytearray(HASH_CHUNK_BYTES)
    view = memoryview(buffer)
    done = 0
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(buffer):
            if stop.is_set():
                raise LoadFailed(f"hashing {path} was cancelled")
            digest.update(view[:length])
            done += length
            if on_progress is not None:
                on_progress(done)
    return digest.hexdigest()


def _gguf_files(folders: Sequence[Path], may_be_missing: Collection[Path], skipped: list[Skipped]) -> Iterator[Path]:
    """Every `.gguf` below the folders, in a fixed order, each real folder once. Hidden folders are left out."""
    visited: set[tuple[int, int]] = set()
    for folder in folders:
        if folder.is_file():
            yield folder
            continue
        if not folder.exists():
            if folder not in may_be_missing:
                skipped.append(Skipped(_shown(folder), "the models folder does not exist"))
            continue

        def unreadable(error: OSError) -> None:
            name = Path(error.filename) if error.filename else Path("?")
            skipped.append(Skipped(_shown(name), f"cannot be read: {error.strerror}"))

        for root, names, files in os.walk(folder, followlinks=True, onerror=unreadable):
            try:
                status = os.stat(root)
            except OSError:
                names.clear()
                continue
            if (status.st_dev, status.st_ino) in visited:
                # A link to a folder that was walked already, or a loop.
                names.clear()
                continue
            visited.add((status.st_dev, status.st_ino))
            names[:] = sorted(name for name in names if not name.startswith("."))
            yield from (Path(root, name) for name in sorted(files) if name.lower().endswith(".gguf"))


def _status(path: Path) -> os.stat_result | str:
    """The file's status, or why there is nothing to read."""
    try:
        status = os.stat(path)
    except OSError as error:
        return "a symbolic link that leads nowhere" if path.is_symlink() else f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    return "the file is empty" if status.st_size == 0 else status


def _unusable(path: Path, part: PartName) -> str:
    """Why a file of this name cannot be a model, or empty. Names end up in logs, paths and arguments."""
    if not str(path).isprintable():
        return "its name has unprintable characters"
    if not part.stem.strip() or part.stem.startswith("-"):
        return "its name cannot be a model's name"
    if not 1 <= part.number <= part.count:
        return f"its name says part {part.number} of {part.count}"
    if "mmproj" in part.stem.lower():
        return "a multimodal projector, which is part of another model"
    return ""


def _shown(path: Path) -> str:
    """A path that can be printed and encoded whatever its bytes are."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _read_facts(path: Path) -> FileFacts:
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        return file_facts(
            parse_header(lambda at, length: os.pread(descriptor, length, at), os.fstat(descriptor).st_size)
        )


def _read_cache(path: Path) -> dict[str, _Entry]:
    """The cache, or an empty one when the file is missing, foreign or broken."""
    try:
        document = json.loads(path.read_bytes())
        if document["version"] != CACHE_VERSION:
            return {}
        return {str(name): _read_entry(raw) for name, raw in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _read_entry(raw: dict[str, Any]) -> _Entry:
    """Raises: KeyError, TypeError, ValueError for anything but what `save` wrote."""
    facts = raw["facts"]
    entry = _Entry(
        size=int(raw["size"]),
        mtime_ns=int(raw["mtime_ns"]),
        inode=int(raw["inode"]),
        facts=None if facts is None else FileFacts(**facts),
        broken=str(raw["broken"]),
        sha256=str(raw["sha256"]),
    )
    if entry.facts is not None:
        for field in fields(FileFacts):
            kinds = {"int": int, "bool": bool}
            if not isinstance(getattr(entry.facts, field.name), kinds.get(str(field.type), str)):
                raise TypeError(field.name)
    return entry
