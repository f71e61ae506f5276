"""``python -P -m services.launcherd.io.download_worker``: fetches one model and ends.

A process of its own: `huggingface_hub` stays out of launcherd's memory, a blocked disk or server blocks nobody else,
and cancelling is killing. The request is one JSON line on stdin; it ends as soon as stdin is closed, so it never
outlives launcherd. What happens is one JSON object a line on stdout:

    {"event": "planned", "file_count": 2, "bytes_total": 9, "bytes_done": 4, "checkpoint": "org/repo:Q4_K_M"}
    {"event": "progress", "file": "m-00001-of-00002.gguf", "file_index": 1, "bytes_done": 5, "verifying": false}
    {"event": "done"}
    {"event": "failed", "code": "stalled", "detail": "…", "transient": true, "retry_after_seconds": 0}

It may be killed at any moment: the next one goes on where it was.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.launcherd.io.download_files import DownloadError, FileWriter, PartialFolder, RemoteFile, disk_error
from services.launcherd.model_source import HubSource, SourceRefused, UrlSource, parse_source

TELL_SECONDS = 0.2
EXIT_ORPHANED = 3
SETTINGS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_UPDATE_CHECK")
"""Of the client library: nobody watches its terminal, and nothing but the model is asked for."""


@dataclass(frozen=True, slots=True)
class Job:
    """The request. `folder` is the node's downloads folder."""

    name: str
    checkpoint: str
    recipe: str
    mmproj: str
    folder: str
    stall_seconds: float


_events = sys.stdout


_lock = threading.Lock()


def tell(event: str, **fields: object) -> None:
    with _lock:
        _events.write(json.dumps({"event": event, **fields}) + "\n")
        _events.flush()


class Progress:
    """Counts over all files. What is new is told a few times a second, also when nothing more comes after it."""

    def __init__(self, files: tuple[RemoteFile, ...], there: list[int]) -> None:
        self._files = files
        self._done = there
        self._at = 0
        self._verifying = False
        self._news = threading.Event()
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell_again_and_again, daemon=True)

    def total(self) -> int:
        return sum(max(0, file.size_bytes) for file in self._files)

    def done(self) -> int:
        return sum(self._done)

    def still_needed(self) -> int:
        return self.total() - self.done()

    def file(self, at: int, size_bytes: int, *, verifying: bool = False) -> None:
        self._done[at], self._at, self._verifying = size_bytes, at, verifying
        self._news.set()

    def start(self) -> None:
        self._teller.start()

    def finish(self) -> None:
        """Nothing more is told after this."""
        self._over.set()
        self._news.set()
        self._teller.join()

    def _tell_again_and_again(self) -> None:
        while not self._over.is_set():
            self._news.wait()
            self._news.clear()
            self._tell()
            if self._over.wait(TELL_SECONDS):
                self._tell()

    def _tell(self) -> None:
        name = self._files[self._at].local
        tell("progress", file=name, file_index=self._at + 1, bytes_done=self.done(), verifying=self._verifying)


def download(job: Job) -> None:
    """Raises: DownloadError, SourceRefused."""
    # Only here: a request that is wrong need not wait for it.
    from services.launcherd.io.download_remote import Remote

    source = parse_source(job.checkpoint)
    if not isinstance(source, HubSource | UrlSource):
        raise SourceRefused("bad_source", f"{job.checkpoint!r} is nothing that could be fetched")
    remote = Remote(job.stall_seconds, os.environ.get("HF_ENDPOINT", "").rstrip("/") or None)
    checkpoint, files = remote.plan(source, job.name, job.recipe, job.mmproj)
    folder = PartialFolder(Path(job.folder), job.name)
    folder.lock()
    there = folder.in_place(files)
    if not there:
        folder.keep_only(files)
    progress = Progress(files, [max(0, file.size_bytes) if there else folder.bytes_there(file) for file in files])
    tell(
        "planned",
        file_count=len(files),
        bytes_total=progress.total(),
        bytes_done=progress.done(),
        checkpoint=checkpoint,
    )
    if there:
        folder.clear()
        return
    folder.check_space(progress.still_needed(), now=True)
    progress.start()
    try:
        for at, file in enumerate(files):
            if not folder.whole(file).exists():
                _fetch(remote, folder, file, at, progress)
    finally:
        progress.finish()
    folder.put_in_place(files)


def _fetch(remote: Any, folder: PartialFolder, file: RemoteFile, at: int, progress: Progress) -> None:
    there = folder.bytes_there(file)
    writer = FileWriter(folder, file, lambda _: progress.file(at, there, verifying=True))
    try:
        progress.file(at, writer.size_bytes)
        remote.fetch(file, writer, folder, progress.still_needed, lambda: progress.file(at, writer.size_bytes))
        progress.file(at, writer.size_bytes, verifying=True)
        writer.finish()
    finally:
        writer.close()


def end_with_stdin() -> None:
    """launcherd is gone, or wants this to end."""
    while sys.stdin.readline():
        pass
    os._exit(EXIT_ORPHANED)


def main() -> None:
    # Whatever a library prints is no event.
    sys.stdout = sys.stderr
    os.environ.update(dict.fromkeys(SETTINGS, "1"))
    job = Job(**json.loads(sys.stdin.readline()))
    threading.Thread(target=end_with_stdin, daemon=True).start()
    run(job)


def run(job: Job) -> None:
    """Tells how it ends, whatever happens."""
    try:
        download(job)
    except DownloadError as error:
        tell(
            "failed",
            code=error.code,
            detail=error.detail,
            transient=error.transient,
            retry_after_seconds=error.retry_after_seconds,
        )
    except SourceRefused as error:
        tell("failed", code=error.code, detail=error.detail, transient=False, retry_after_seconds=0.0)
    except OSError as error:
        refused = disk_error(error, Path(error.filename or job.folder))
        tell("failed", code=refused.code, detail=refused.detail, transient=False, retry_after_seconds=0.0)
    else:
        tell("done")


if __name__ == "__main__":
    main()
