"""Processes by identity: a pid is only a number that somebody else may carry a moment later.

An identity is (pid, start time, boot). Signals go through a pidfd that was checked against it, so they reach that
process or nobody. An engine leads a session of its own, by which its children are found as well.

Source: PLUMBING §3.5; TRAPS 21, 31.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

POLL_SECONDS = 0.2
"""How often a process is looked at where the system has no pidfd (macOS, old kernels)."""

_HAS_PROC = Path("/proc/self/stat").exists()


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot. `start_time` is in clock ticks since boot on Linux, else microseconds since 1970."""

    pid: int
    start_time: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended; negative for a signal, None for a process that was not our child."""

    status: int | None

    def __str__(self) -> str:
        if self.status is None:
            return "ended"
        if self.status >= 0:
            return f"ended with exit status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = f"signal {-self.status}"
        # Seen with a llama-server that was compiled on another machine: the signal's name alone tells few people.
        hint = " (it was built for another processor)" if name == "SIGILL" else ""
        return f"was ended by {name}{hint}"


@cache
def this_boot() -> str:
    """Identifies the boot; empty where start times are absolute anyway."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identify(pid: int, *, zombie: bool = False) -> ProcessIdentity | None:
    """The process that has this pid now; None if there is none, or only a zombie unless `zombie` is true."""
    if _HAS_PROC:
        fields = _stat_fields(pid)
        if fields is None or (fields[0] in (b"Z", b"X") and not zombie):
            return None
        return ProcessIdentity(pid, int(fields[19]), this_boot())
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE and not zombie:
            return None
        return ProcessIdentity(pid, round(process.create_time() * 1e6), this_boot())
    except (psutil.Error, ValueError):
        return None


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process runs."""
    return identify(identity.pid) == identity


def family(leader: ProcessIdentity) -> list[ProcessIdentity]:
    """The living processes of the session that `leader` led, without itself. Empty if its pid is reused."""
    current = identify(leader.pid)
    if current is not None and current != leader:
        return []
    members = []
    for pid in psutil.pids():
        if pid == leader.pid or _session(pid) != leader.pid:
            continue
        member = identify(pid)
        if member is not None:
            members.append(member)
    return members


def marked_processes(variable: str, prefix: str) -> list[tuple[ProcessIdentity, str]]:
    """Our living processes started with this environment variable set to something that begins with `prefix`.

    With the variable's value.
    """
    found = []
    for process in psutil.process_iter():
        identity = identify(process.pid)
        try:
            value = process.environ().get(variable, "")
        except (psutil.Error, OSError, ValueError):
            continue  # Not ours to look into, or gone.
        if identity is not None and value.startswith(prefix) and is_alive(identity):
            found.append((identity, value))
    return found


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signals exactly this process. False if it does not run any more."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except (AttributeError, OSError) as error:
        if isinstance(error, ProcessLookupError) or not is_alive(identity):
            return False
        return _kill(identity.pid, number)
    try:
        # The pidfd pins one process; only now the check says something about the one that will get the signal.
        if not is_alive(identity):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def signal_family(leader: ProcessIdentity, number: signal.Signals) -> bool:
    """Signals the process and its session's members. False if none runs any more."""
    members = family(leader)
    reached = send_signal(leader, number)
    for member in members:
        reached = send_signal(member, number) or reached
    return reached


class ExitWatch:
    """Knows when a process has ended, our child or not, and how if it was our child."""

    def __init__(self, identity: ProcessIdentity, on_exit: Callable[[ExitStatus], None]) -> None:
        """Starts to watch from inside the running loop; `on_exit` is called once, never from here."""
        self._identity = identity
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(identity.pid)
            self._loop.add_reader(self._descriptor, self._check)
            if not is_alive(identity):
                # The pidfd may belong to the pid's next owner, and stay silent for ever.
                self._timer = self._loop.call_later(0, self._check)
        except (AttributeError, OSError):
            self._timer = self._loop.call_later(0, self._check)

    def _check(self) -> None:
        status = _reap(self._identity.pid) if self._ours() else None
        if status is None and is_alive(self._identity):
            if self._descriptor < 0:
                self._timer = self._loop.call_later(POLL_SECONDS, self._check)
            return
        self.close()
        self._on_exit(ExitStatus(status))

    def _ours(self) -> bool:
        """Whether the pid still names this process, alive or zombie: never reap its next owner."""
        fields = _stat_fields(self._identity.pid) if _HAS_PROC else None
        return fields is None or int(fields[19]) == self._identity.start_time

    def close(self) -> None:
        """Stops watching. May be repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def _stat_fields(pid: int) -> list[bytes] | None:
    """`/proc/PID/stat` from the third field on: a process may have parentheses and spaces in its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _kill(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def _reap(pid: int) -> int | None:
    """Exit status of our child if it has ended, negative for a signal; None if it runs or is not our child."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None
