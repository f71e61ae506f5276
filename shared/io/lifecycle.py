"""How a daemon starts and stops: one lock per ``MESH_HOME``, death with its supervisord, and why it is stopping."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import xmlrpc.client
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal

from shared.config import NodeConfig, load_config
from shared.errors import AlreadyRunning, MeshError, StateError
from shared.io import log
from shared.io.drive import Tasks
from shared.io.supervisor import Supervisor
from shared.paths import NodePaths

StopKind = Literal["alone", "node", "orphaned"]
"""Why SIGTERM came: this daemon is being restarted, the node goes down, or supervisord died."""

PR_SET_PDEATHSIG = 1


def environment() -> Mapping[str, str]:
    """The process's environment, for configuration read again later."""
    return os.environ


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent dies. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)


def supervisor_from_environment() -> Supervisor | None:
    """The supervisord that started this process, if one did."""
    url = os.environ.get("SUPERVISOR_SERVER_URL", "")
    return Supervisor(url, timeout_seconds=1.0) if url.startswith("unix://") else None


def stop_kind() -> StopKind:
    """Ask supervisord (blocking, at most about a second)."""
    supervisor = supervisor_from_environment()
    if supervisor is None:
        return "node"
    try:
        return "node" if supervisor.is_stopping() else "alone"
    except OSError:
        return "orphaned"
    except xmlrpc.client.Error:
        return "alone"


class DaemonLock:
    """``flock`` on ``run/NAME.lock``, held for the life of the process.

    Raises: AlreadyRunning when another process has it. A ZeroMQ bind would silently steal the socket instead.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._file = open(path, "a+")  # noqa: SIM115 (held open until the process ends)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            raise AlreadyRunning(
                f"{name} already runs for {path.parent.parent} (pid {owner}): another node uses this MESH_HOME. "
                "Stop it with 'meshctl down', or set MESH_HOME to another folder"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()


def start_daemon(name: str) -> tuple[NodePaths, NodeConfig, DaemonLock]:
    """The common start: die with supervisord, directories, lock, configuration. Raises: MeshError."""
    die_with_parent()
    supervisor = supervisor_from_environment()
    if supervisor is not None and os.getppid() == 1:
        # supervisord may have died before die_with_parent() took effect; as pid 1 of a container it still answers.
        try:
            supervisor.is_stopping()
        except OSError as error:
            raise StateError("the supervisord that started this process is gone") from error
    paths = NodePaths.from_environment(os.environ)
    paths.prepare()
    lock = DaemonLock(paths.lock_file(name), name)
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
    try:
        run_loop(main(paths, config))
    except MeshError as error:
        log.error("stopped", daemon=name, code=error.code, reason=error.detail)
        raise SystemExit(1) from None
    except Exception:  # noqa: BLE001 (the one place where a broken invariant ends: log it and exit 1)
        import traceback

        for line in traceback.format_exc().rstrip().splitlines():
            log.error("crash", daemon=name, line=line)
        raise SystemExit(1) from None
    sys.stdout.flush()
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
