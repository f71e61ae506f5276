"""Starts and ends the download process, and turns what it says into stimuli.

Nothing it says is believed further than that: the lines are read with a limit, and one that can't be understood is
logged and passed over. Its stdin stays open as long as launcherd lives; that is what it lives by.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.launcherd.download_events import (
    DownloadEnded,
    DownloadFailed,
    DownloadPlanned,
    DownloadProgressed,
    DownloadStimulus,
    DownloadSucceeded,
    JobId,
    Wanted,
)
from services.launcherd.io.process import ExitStatus
from shared.io import log
from shared.io.drive import Tasks

LINE_LIMIT_BYTES = 64 * 1024


class DownloadProcess:
    """At most one process at a time, as the state machine wants it."""

    def __init__(self, folder: Path, post: Callable[[DownloadStimulus], None], tasks: Tasks) -> None:
        """`folder` is the node's downloads folder."""
        self._folder = folder
        self._post = post
        self._tasks = tasks
        self._process: asyncio.subprocess.Process | None = None
        self._job: JobId | None = None

    @property
    def pid(self) -> int:
        """0: none runs."""
        return self._process.pid if self._process is not None else 0

    def start(self, job: JobId, wanted: Wanted, stall_seconds: float, environ: Mapping[str, str]) -> None:
        """Ends in `DownloadEnded`, whatever happens."""
        request = {
            "name": wanted.name,
            "checkpoint": wanted.checkpoint,
            "recipe": wanted.recipe,
            "mmproj": wanted.mmproj,
            "folder": str(self._folder),
            "stall_seconds": stall_seconds,
        }
        self._job = job
        self._tasks.start(self._run(job, json.dumps(request), environ), f"download of {wanted.name}")

    def stop(self, job: JobId) -> None:
        """What it has written stays, so it may be killed at any moment."""
        if job == self._job:
            self._job = None
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _run(self, job: JobId, request: str, environ: Mapping[str, str]) -> None:
        command = (sys.executable, "-P", "-m", "services.launcherd.io.download_worker")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(environ),
                cwd=self._folder,
                limit=LINE_LIMIT_BYTES,
            )
        except OSError as error:
            detail = f"the download process cannot be started: {error.strerror or error}"
            log.warning("download_trouble", code="download_died", reason=detail)
            self._post(DownloadFailed(job=job, code="download_died", detail=detail, transient=True))
            self._post(DownloadEnded(job=job))
            return
        self._process = process
        try:
            if self._job != job:
                process.kill()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(request.encode() + b"\n")
            await self._read(job, process.stdout)
        except BaseException:
            # launcherd is being stopped: nothing of the download may outlive it.
            if process.returncode is None:
                process.kill()
            raise
        status = await process.wait()
        self._process = None
        self._post(DownloadEnded(job=job, how=str(ExitStatus(status))))

    async def _read(self, job: JobId, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # Longer than any event.
            if not line:
                return
            try:
                news = _stimulus(job, json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                log.warning("download_said", line=line[:200].decode(errors="replace"), reason=str(error))
                continue
            if isinstance(news, DownloadFailed):
                log.warning("download_trouble", code=news.code, reason=news.detail)
            self._post(news)


def _stimulus(job: JobId, said: Mapping[str, Any]) -> DownloadStimulus:
    """Raises: KeyError, TypeError, ValueError."""
    match said["event"]:
        case "planned":
            return DownloadPlanned(
                job=job,
                file_count=int(said["file_count"]),
                bytes_total=int(said["bytes_total"]),
                bytes_done=int(said["bytes_done"]),
                checkpoint=str(said["checkpoint"]),
            )
        case "progress":
            return DownloadProgressed(
                job=job,
                file=str(said["file"]),
                file_index=int(said["file_index"]),
                bytes_done=int(said["bytes_done"]),
                verifying=bool(said["verifying"]),
            )
        case "done":
            return DownloadSucceeded(job=job)
        case "failed":
            return DownloadFailed(
                job=job,
                code=str(said["code"]),
                detail=str(said["detail"]),
                transient=bool(said["transient"]),
                retry_after_seconds=float(said["retry_after_seconds"]),
            )
    raise ValueError(f"no event {said['event']!r}")


def worker_environment() -> dict[str, str]:
    """The node's own: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and proxies are told to it this way."""
    return dict(os.environ)
