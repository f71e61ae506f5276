"""Where a download's bytes lie until they are a model: nothing half or wrong is ever found by a scan.

    models/.partial/NAME/lock               held by the one process that writes here
    models/.partial/NAME/KEY.part           what has come of a file; KEY is its checksum, so another version never
    models/.partial/NAME/KEY.whole          mixes in; verified, complete
    models/.partial/NAME/ready-PLAN/FILE…   every file under its own name
    models/NAME/FILE…                       the model: `ready-PLAN`, renamed in one step
    models/NAME/.download.json              which version of each file that is

Blocking; only the download process works here. Source: docs/spec/downloads.md 40-49; TRAPS 43.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shared.errors import MeshError
from shared.words import size_words

PARTIAL = ".partial"
READY = "ready-"
MARK = ".download.json"
SPACE_MARGIN_BYTES = 64 * 1024 * 1024
"""Left free on the disk, for everything else that has to be written."""
SPACE_CHECK_SECONDS = 2.0
CHUNK_BYTES = 1 << 20
GGUF_MAGIC = b"GGUF"
LOCK_SECONDS = 10.0
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DownloadError(MeshError):
    """Why a download does not go on. `transient`: the same may succeed later."""

    def __init__(self, code: str, detail: str, *, transient: bool = False, retry_after_seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.code = code
        self.transient = transient
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file to fetch. `size_bytes` is -1 where the server does not say it."""

    url: str
    remote: str
    local: str
    size_bytes: int
    key: str
    """Names its version: the checksum, or what else the server tells it apart by."""
    sha256: str = ""
    git_sha1: str = ""
    """Of a small file that the hub keeps in git: SHA-1 over `blob SIZE\\0` and its content."""
    etag: str = ""
    """For `If-Range`, where there is no checksum."""


class PartialFolder:
    """One model's place below `.partial`. Raises: DownloadError wherever the disk says no."""

    def __init__(self, downloads: Path, name: str) -> None:
        self.final = downloads / name
        self.folder = downloads / PARTIAL / name
        self._lock: BinaryIO | None = None
        self._next_check = 0.0
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.folder) from error

    def lock(self) -> None:
        """Held until the process ends. The one of an earlier launcherd ends within a moment."""
        self._lock = open(self.folder / "lock", "wb")  # noqa: SIM115
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    words = f"another process downloads into {self.folder}"
                    raise DownloadError("busy", words, transient=True) from error
            time.sleep(0.05)

    def keep_only(self, files: Sequence[RemoteFile]) -> None:
        """Drop what is of another version or of another model."""
        known = {f"{file.key}.{suffix}" for file in files for suffix in ("part", "whole")} | {"lock"}
        ready = self._ready(files)
        for file in files:
            # Somebody was killed while he put it in place.
            if (ready / file.local).is_file():
                (ready / file.local).rename(self.whole(file))
        for path in self.folder.iterdir():
            if path.name not in known:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def bytes_there(self, file: RemoteFile) -> int:
        for path in (self.whole(file), self.part(file)):
            if path.exists():
                return path.stat().st_size
        return 0

    def _ready(self, files: Sequence[RemoteFile]) -> Path:
        plan = hashlib.sha256("\n".join(f"{file.key} {file.local}" for file in files).encode()).hexdigest()
        return self.folder / f"{READY}{plan[:16]}"

    def part(self, file: RemoteFile) -> Path:
        return self.folder / f"{file.key}.part"

    def whole(self, file: RemoteFile) -> Path:
        return self.folder / f"{file.key}.whole"

    def check_space(self, needed_bytes: int, *, now: bool = False) -> None:
        """Raises: DownloadError (`disk_full`) with the numbers when what is still to come does not fit."""
        if not now and time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + SPACE_CHECK_SECONDS
        free = shutil.disk_usage(self.folder).free
        if needed_bytes > 0 and needed_bytes + SPACE_MARGIN_BYTES > free:
            raise DownloadError(
                "disk_full",
                f"{size_words(needed_bytes)} are still to come and {size_words(free)} are free at {self.final.parent}; "
                "delete something ('meshctl models rm NAME') and pull it again: what is there is kept",
            )

    def in_place(self, files: Sequence[RemoteFile]) -> bool:
        """Whether an earlier process has done it all, and launcherd was killed before it heard of that."""
        try:
            mark = json.loads((self.final / MARK).read_bytes())
            sizes = {file.local: (self.final / file.local).stat().st_size for file in files}
        except (OSError, ValueError):
            return False
        return mark == _mark(files) and all(file.size_bytes in (-1, sizes[file.local]) for file in files)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def put_in_place(self, files: Sequence[RemoteFile]) -> None:
        """All files are whole: show them, all at once."""
        ready = self._ready(files)
        try:
            ready.mkdir(exist_ok=True)
            for file in files:
                target = ready / file.local
                target.parent.mkdir(parents=True, exist_ok=True)
                self.whole(file).rename(target)
            (ready / MARK).write_text(json.dumps(_mark(files)))
            _sync(ready)
            if self.final.exists():
                # Of an earlier download that is no model any more, or was called the same.
                self.final.rename(self.folder / "replaced")
            ready.rename(self.final)
            _sync(self.final.parent)
            self.clear()
        except OSError as error:
            raise disk_error(error, self.final) from error


class FileWriter:
    """One file under way: appended to, and hashed as it grows."""

    def __init__(self, folder: PartialFolder, file: RemoteFile, on_read: Callable[[int], None]) -> None:
        """Reads what is there already, for its checksum; `on_read` is told how many bytes of it were read."""
        self._file = file
        self._folder = folder
        try:
            self._stream = open(folder.part(file), "a+b", buffering=0)  # noqa: SIM115
            self.size_bytes = os.fstat(self._stream.fileno()).st_size
            self._new_digests()
            if 0 <= file.size_bytes < self.size_bytes:
                self.start_again()
            self._stream.seek(0)
            done = 0
            while chunk := self._stream.read(CHUNK_BYTES):
                self._digest(chunk)
                done += len(chunk)
                on_read(done)
        except OSError as error:
            raise disk_error(error, folder.part(file)) from error

    def _new_digests(self) -> None:
        self._sha256 = hashlib.sha256()
        self._sha1 = hashlib.sha1(f"blob {max(0, self._file.size_bytes)}\0".encode(), usedforsecurity=False)
        self._head = b""

    def _digest(self, chunk: bytes) -> None:
        self._sha256.update(chunk)
        if self._file.git_sha1:
            self._sha1.update(chunk)
        self._head = (self._head + chunk[:4])[:4]

    def start_again(self) -> None:
        """What is there can't be gone on with."""
        self._stream.truncate(0)
        self.size_bytes = 0
        self._new_digests()

    def write(self, chunk: bytes) -> None:
        try:
            # Unbuffered, so that a full disk is noticed here and a killed process loses nothing that it counted.
            view = memoryview(chunk)
            while view:
                written = self._stream.write(view)
                view = view[written or 0 :]
        except OSError as error:
            raise disk_error(error, self._folder.part(self._file)) from error
        finally:
            # What reached the disk of a chunk that did not fit counts, too: it is hashed when it is read again.
            self.size_bytes = os.fstat(self._stream.fileno()).st_size
        self._digest(chunk)

    def finish(self) -> None:
        """Raises: DownloadError (`checksum`) when it is not the file that was promised; what came is dropped."""
        wrong = self._wrong()
        if wrong:
            self._stream.close()
            self._folder.part(self._file).unlink(missing_ok=True)
            raise DownloadError(
                "checksum",
                f"{self._file.remote} {wrong}; it was damaged on its way and has been deleted. Pull it again; if that "
                "goes on, something between this node and the server changes what it transports",
            )
        try:
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._folder.part(self._file).rename(self._folder.whole(self._file))
        except OSError as error:
            raise disk_error(error, self._folder.part(self._file)) from error

    def close(self) -> None:
        self._stream.close()

    def _wrong(self) -> str:
        file = self._file
        if 0 <= file.size_bytes != self.size_bytes:
            return f"has {self.size_bytes} bytes instead of {file.size_bytes}"
        if file.sha256 and self._sha256.hexdigest() != file.sha256:
            return f"has the SHA-256 {self._sha256.hexdigest()[:16]}… instead of {file.sha256[:16]}…"
        if file.git_sha1 and self._sha1.hexdigest() != file.git_sha1:
            return f"has the Git hash {self._sha1.hexdigest()[:16]}… instead of {file.git_sha1[:16]}…"
        if file.local.endswith(".gguf") and self._head != GGUF_MAGIC:
            return "is no GGUF file"
        return ""


def _mark(files: Sequence[RemoteFile]) -> dict[str, str]:
    return {file.local: file.key for file in files}


def disk_error(error: OSError, path: Path) -> DownloadError:
    """By the system's error number."""
    words = error.strerror or str(error)
    if error.errno in FULL_DISK:
        return DownloadError(
            "disk_full",
            f"{path} cannot be written: {words}; free some space ('meshctl models rm NAME') and pull it again: what is "
            "there is kept",
        )
    return DownloadError("not_writable", f"{path} cannot be written: {words}; fix its permissions and pull it again")


def _sync(folder: Path) -> None:
    """So that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
