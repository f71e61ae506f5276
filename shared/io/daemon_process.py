"""What every meshd process needs before anything heavy is imported: one lock per ``MESH_HOME``, death with its
supervisord, and why it is stopping. proxyd's stub and the keeper are little more than this.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shared.errors import AlreadyRunning, StateError
from shared.paths import NodePaths

if TYPE_CHECKING:
    from shared.io.supervisor import Supervisor

StopKind = Literal["alone", "node", "orphaned"]
"""Why SIGTERM came: this daemon is being restarted, the node goes down, or supervisord died."""

PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent dies. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)


def supervisor_from_environment() -> Supervisor | None:
    """The supervisord that started this process, if one did."""
    from shared.io.supervisor import Supervisor  # XML-RPC costs 5 MB: only once it is needed

    url = os.environ.get("SUPERVISOR_SERVER_URL", "")
    return Supervisor(url, timeout_seconds=1.0) if url.startswith("unix://") else None


def stop_kind() -> StopKind:
    """Ask supervisord (blocking, at most about a second)."""
    import xmlrpc.client

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

    Raises: AlreadyRunning when another process has it (a ZeroMQ bind would silently steal the socket instead),
    StateError when the file cannot be used.
    """

    def __init__(self, path: Path, name: str) -> None:
        try:
            self._file = open(path, "a+")  # noqa: SIM115 (held open until the process ends)
        except OSError as error:
            raise StateError(f"cannot open {path}: {error.strerror}; fix its permissions or remove it") from error
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


def start_process(name: str) -> tuple[NodePaths, DaemonLock]:
    """The start every daemon has in common: die with supervisord, directories, lock. Raises: MeshError."""
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
    return paths, DaemonLock(paths.lock_file(name), name)
