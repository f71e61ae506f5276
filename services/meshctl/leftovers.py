"""Processes of a node that nobody supervises any more: daemons by the lock they hold, engines by their records.

A pid alone proves nothing. A daemon's lock is held exactly as long as it lives; other processes of a daemon (proxyd's
workers) carry the configuration's path in their environment; an engine is known by pid, start time and boot, or by the
mark in its environment.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.paths import NodePaths

ENGINE_MARK = "MESHD_ENGINE"
"""Environment variable of every engine: the path of its record. launcherd sets it."""
TERM_SECONDS = 5.0
KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A living process of this node. ``start_time`` tells it from a later one with the same pid."""

    name: str
    pid: int
    start_time: float

    def alive(self) -> bool:
        process = _process(self.pid)
        return process is not None and process.create_time() == self.start_time

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def find_leftovers(paths: NodePaths, confs: Iterable[Path] = ()) -> list[Leftover]:
    """Everything of this node that runs. ``confs``: supervisord configurations that are this node's."""
    found = {item.pid: item for item in (*engines(paths), *_workers({str(conf) for conf in confs}))}
    found.update({item.pid: item for item in locked_daemons(paths)})
    return sorted(found.values(), key=lambda item: _ORDER.index(item.name) if item.name in _ORDER else len(_ORDER))


_ORDER = ("proxyd", "launcherd", "electiond", "gossipd", "tunneld", "keeper")


def _workers(confs: set[str]) -> list[Leftover]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MESH_SUPERVISOR_CONF") not in confs or _process(process.pid) is None:
                continue
            module = next((word for word in process.cmdline() if word.startswith("services.")), "")
            if module and not module.startswith("services.meshctl"):
                found.append(Leftover(module.split(".")[1], process.pid, process.create_time()))
        except (psutil.Error, OSError, ValueError):
            continue  # Not ours to look into, or gone.
    return found


def locked_daemons(paths: NodePaths) -> list[Leftover]:
    """Daemons that hold their lock, in the order in which they should stop."""
    found = []
    for path in paths.bus.glob("*.lock"):
        pid = _lock_owner(path)
        process = _process(pid) if pid else None
        if process is not None:
            found.append(Leftover(path.stem, process.pid, process.create_time()))
    return sorted(found, key=lambda item: _ORDER.index(item.name) if item.name in _ORDER else len(_ORDER))


def _lock_owner(path: Path) -> int | None:
    try:
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read().strip() or 0)
    except (OSError, ValueError):
        return None
    return None


def engines(paths: NodePaths) -> list[Leftover]:
    """Engine processes of this node, recorded or marked."""
    found: dict[int, Leftover] = {}
    for path in paths.engines.glob("*.json"):
        try:
            identity = json.loads(path.read_bytes())["identity"]
            pid, ticks, boot = int(identity["pid"]), int(identity["start_time"]), str(identity["boot_id"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        process = _process(pid)
        if process is not None and (ticks, boot) == _launcherd_identity(process):
            found[pid] = Leftover("engine", pid, process.create_time())
    folder = f"{paths.engines}{os.sep}"
    for process in psutil.process_iter():
        try:
            if process.environ().get(ENGINE_MARK, "").startswith(folder) and _process(process.pid) is not None:
                found[process.pid] = Leftover("engine", process.pid, process.create_time())
        except (psutil.Error, OSError, ValueError):
            continue  # Not ours to look into, or gone.
    return list(found.values())


def end(leftovers: Iterable[Leftover]) -> list[Leftover]:
    """SIGTERM, then SIGKILL; those that survived even that."""
    remaining = [item for item in leftovers if item.alive()]
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for item in remaining:
            item.signal(number)
        deadline = time.monotonic() + seconds
        while remaining and time.monotonic() < deadline:
            time.sleep(0.05)
            remaining = [item for item in remaining if item.alive()]
    return remaining


def _process(pid: int) -> psutil.Process | None:
    """A living process, not a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except (psutil.Error, ValueError):
        return None


def _launcherd_identity(process: psutil.Process) -> tuple[int, str]:
    """(start time, boot id) as launcherd's records have them."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[19]), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return round(process.create_time() * 1e6), ""
