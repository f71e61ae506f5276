"""How a daemon starts and stops: one lock per ``MESH_HOME``, death with its supervisord, and why it is stopping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

from shared.config import NodeConfig, load_config
from shared.errors import MeshError
from shared.io import log
from shared.io.daemon_process import DaemonLock as DaemonLock
from shared.io.daemon_process import StopKind as StopKind
from shared.io.daemon_process import die_with_parent as die_with_parent
from shared.io.daemon_process import start_process as start_process
from shared.io.daemon_process import stop_kind as stop_kind
from shared.io.daemon_process import supervisor_from_environment as supervisor_from_environment
from shared.io.drive import Tasks
from shared.paths import NodePaths


def environment() -> Mapping[str, str]:
    """The process's environment, for configuration read again later."""
    return os.environ


def start_daemon(name: str) -> tuple[NodePaths, NodeConfig, DaemonLock]:
    """The common start: die with supervisord, directories, lock, configuration. Raises: MeshError."""
    paths, lock = start_process(name)
    return paths, load_config(paths.config_file, os.environ), lock


def run_daemon(name: str, main: Callable[[NodePaths, NodeConfig], Coroutine[Any, Any, None]]) -> None:
    """Run ``main`` to its end under uvloop, with every failure a readable line in the log.

    Exit status: 0 after an orderly stop, 1 after a failure (supervisord starts the daemon again).
    """
    try:
        paths, config, _lock = start_daemon(name)
    except MeshError as error:
        log.error("cannot_start", daemon=name, code=error.code, reason=error.detail)
        raise SystemExit(1) from None
    run_to_end(name, main(paths, config))


def run_to_end(name: str, work: Coroutine[Any, Any, None]) -> NoReturn:
    """The second half of :func:`run_daemon`, for a process that was started another way."""
    try:
        run_loop(work)
    except MeshError as error:
        log.error("stopped", daemon=name, code=error.code, reason=error.detail)
        raise SystemExit(1) from None
    except Exception:  # noqa: BLE001 (the one place where a broken invariant ends: log it and exit 1)
        import traceback

        for line in traceback.format_exc().rstrip().splitlines():
            log.error("crash", daemon=name, line=line)
        raise SystemExit(1) from None
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()  # a pipe to a supervisord that is gone
    # Threads of libraries must not keep a stopped daemon alive.
    os._exit(0)


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run`` with uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


class StopSignal:
    """Turns SIGTERM and SIGINT into an awaitable. Create it inside the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._event.set)
        with contextlib.suppress(ValueError):
            loop.add_signal_handler(signal.SIGHUP, lambda: None)

    async def wait(self) -> StopKind:
        """Wait for the signal, then learn what it means."""
        await self._event.wait()
        return await asyncio.to_thread(stop_kind)

    async def wait_or(self, tasks: Tasks) -> StopKind:
        """:meth:`wait`, unless one of ``tasks`` fails first: then its exception is raised."""
        waiting = asyncio.ensure_future(self.wait())
        watching = asyncio.ensure_future(tasks.watch())
        try:
            await asyncio.wait((waiting, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            return await waiting
        finally:
            waiting.cancel()
            watching.cancel()
