"""services.meshctl.leftovers: exactly this node's processes are found and ended, whatever their pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.meshctl.leftovers import ENGINE_MARK, Leftover, end, engines, find_leftovers, locked_daemons
from shared.paths import NodePaths

Start = Callable[..., subprocess.Popen[str]]

HOLD_LOCK = """
import signal, sys
from pathlib import Path
from shared.io.daemon_process import DaemonLock
lock = DaemonLock(Path(sys.argv[1]), "gossipd")
print("held", flush=True)
signal.pause()
"""
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('on', flush=True); signal.pause()"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python that prints a line when it is ready; ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def record(paths: NodePaths, process: subprocess.Popen[str], *, later: int = 0) -> None:
    """What launcherd writes about an engine; ``later``: a start time that is not this process's."""
    fields = Path(f"/proc/{process.pid}/stat").read_bytes().rpartition(b")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    identity = {"pid": process.pid, "start_time": int(fields[19]) + later, "boot_id": boot}
    (paths.engines / f"{process.pid}.json").write_text(json.dumps({"identity": identity}))


def test_a_daemon_is_found_by_the_lock_it_holds(node_paths: NodePaths, start: Start) -> None:
    process = start(HOLD_LOCK, str(node_paths.lock_file("gossipd")))
    assert [(item.name, item.pid) for item in locked_daemons(node_paths)] == [("gossipd", process.pid)]
    assert end(locked_daemons(node_paths)) == []
    assert process.wait(5) == -signal.SIGTERM
    assert locked_daemons(node_paths) == []


def test_a_stale_lock_file_accuses_nobody(node_paths: NodePaths) -> None:
    """Its pid may be somebody else's by now."""
    node_paths.lock_file("gossipd").write_text(str(os.getpid()))
    assert locked_daemons(node_paths) == []


@pytest.mark.skipif(sys.platform != "linux", reason="start times in ticks are Linux's")
def test_an_engine_is_found_by_its_record_unless_the_pid_was_reused(node_paths: NodePaths, start: Start) -> None:
    engine, stranger = start(STUBBORN), start(STUBBORN)
    record(node_paths, engine)
    record(node_paths, stranger, later=1)
    (node_paths.engines / "broken.json").write_text("{")
    assert [item.pid for item in engines(node_paths)] == [engine.pid]


def test_an_engine_without_a_record_is_found_by_its_mark(node_paths: NodePaths, start: Start) -> None:
    mark = str(node_paths.engines / "lost.json")
    engine = start(STUBBORN, **{ENGINE_MARK: mark})
    start(STUBBORN, **{ENGINE_MARK: "/another/node/engines/x.json"})
    assert [item.pid for item in find_leftovers(node_paths)] == [engine.pid]


def test_a_worker_is_found_by_the_configuration_it_runs_under(node_paths: NodePaths, start: Start) -> None:
    """proxyd's workers finish their streams in the background and hold no lock."""
    conf = str(node_paths.supervisor_conf)
    worker = start(STUBBORN, "services.proxyd.worker", MESH_SUPERVISOR_CONF=conf)
    start(STUBBORN, "services.meshctl", MESH_SUPERVISOR_CONF=conf)
    start(STUBBORN, "services.proxyd.worker", MESH_SUPERVISOR_CONF="/another/supervisord.conf")
    found = find_leftovers(node_paths, [node_paths.supervisor_conf])
    assert [(item.name, item.pid) for item in found] == [("proxyd", worker.pid)]
    assert find_leftovers(node_paths) == []


def test_one_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setattr("services.meshctl.leftovers.TERM_SECONDS", 0.2)
    process = start(STUBBORN)
    assert end([Leftover("engine", process.pid, psutil.Process(process.pid).create_time())]) == []
    assert process.wait(5) == -signal.SIGKILL


def test_a_reused_pid_is_never_signalled(start: Start) -> None:
    process = start("import signal; print('on', flush=True); signal.pause()")
    earlier = Leftover("engine", process.pid, psutil.Process(process.pid).create_time() - 5)
    assert end([earlier]) == []
    assert process.poll() is None
