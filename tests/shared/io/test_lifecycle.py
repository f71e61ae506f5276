"""How a daemon starts and stops, with real processes and a real supervisord."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shared.errors import AlreadyRunning, StateError
from shared.io.drive import Tasks
from shared.io.lifecycle import DaemonLock, StopSignal, run_loop, stop_kind
from shared.paths import REPOSITORY, NodePaths
from tests.daemons import daemon_environment
from tests.waiting import run_async, wait_until

DAEMON = """
import asyncio, sys
from shared.errors import StateError
from shared.io import log
from shared.io.drive import Tasks
from shared.io.lifecycle import StopSignal, run_daemon

async def fail():
    {failure}

async def main(paths, config):
    tasks, stop = Tasks(), StopSignal()
    if {failing}:
        tasks.start(fail(), "fails")
    log.ready("gossipd")
    kind = await stop.wait_or(tasks)
    with open(paths.home / "kinds", "a") as file:
        print(kind, file=file)

run_daemon("gossipd", main)
"""


def kinds(home: Path) -> list[str]:
    """Why daemons of ``home`` have stopped so far: a pipe to a dead supervisord could not tell."""
    path = home / "kinds"
    return path.read_text().split() if path.exists() else []


def write_daemon(home: Path, failure: str = "") -> Path:
    script = home / "daemon.py"
    script.write_text(DAEMON.format(failure=failure or "pass", failing=bool(failure)))
    return script


def run_script(home: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=daemon_environment(home, **env),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@contextmanager
def daemon(home: Path, script: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(script)], env=daemon_environment(home, **env), cwd=home, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "gossipd ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


# -- starting ----------------------------------------------------------------------------------------------------


def test_a_second_daemon_of_one_home_is_refused_with_its_owner(mesh_home: Path) -> None:
    script = write_daemon(mesh_home)
    with daemon(mesh_home, script) as first:
        second = run_script(mesh_home, str(script))
        assert second.returncode == 1
        assert "code=already_running" in second.stdout
        assert (
            f"gossipd already runs for {mesh_home} (pid {first.pid}): another node uses this MESH_HOME" in second.stdout
        )
        assert "Traceback" not in second.stdout + second.stderr
        assert first.poll() is None
    third = run_script(mesh_home, "-c", "from shared.io.lifecycle import start_daemon; start_daemon('gossipd')")
    assert third.returncode == 0, "a killed daemon leaves no lock behind"


def test_a_lock_is_per_daemon_and_names_its_holder(node_paths: NodePaths) -> None:
    lock = DaemonLock(node_paths.lock_file("gossipd"), "gossipd")
    other = DaemonLock(node_paths.lock_file("tunneld"), "tunneld")
    with pytest.raises(AlreadyRunning, match=rf"\(pid {os.getpid()}\)"):
        DaemonLock(node_paths.lock_file("gossipd"), "gossipd")
    del lock, other
    DaemonLock(node_paths.lock_file("gossipd"), "gossipd")


def test_a_lock_that_cannot_be_opened_is_a_state_error(node_paths: NodePaths) -> None:
    node_paths.lock_file("gossipd").mkdir()
    with pytest.raises(StateError, match="cannot open"):
        DaemonLock(node_paths.lock_file("gossipd"), "gossipd")


@pytest.mark.parametrize(
    ("env", "toml", "words"),
    [
        ({"MESH_HOME": "relative"}, "", "code=state reason=\"MESH_HOME'relative is not an absolute path"),
        ({"MESH_API_PORT": "web"}, "", "MESH_API_PORT"),
        ({}, "[api]\nprot = 1", "did you mean port?"),
    ],
    ids=["home", "variable", "file"],
)
def test_a_daemon_that_cannot_start_says_why_and_exits_1(
    mesh_home: Path, env: dict[str, str], toml: str, words: str
) -> None:
    script = write_daemon(mesh_home)
    (mesh_home / "mesh.toml").write_text(toml)
    done = run_script(mesh_home, str(script), **env)
    assert done.returncode == 1
    assert "event=cannot_start daemon=gossipd" in done.stdout
    assert words.replace("'", "=") in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("raise StateError('no space left')", 'event=stopped daemon=gossipd code=state reason="no space left"'),
        ("raise KeyError('broken invariant')", "event=crash daemon=gossipd line=\"KeyError: 'broken invariant'\""),
        (
            "await asyncio.sleep(0); raise RuntimeError('later')",
            'event=crash daemon=gossipd line="RuntimeError: later"',
        ),
    ],
)
def test_a_failing_task_ends_the_daemon_loudly(mesh_home: Path, failure: str, words: str) -> None:
    done = run_script(mesh_home, str(write_daemon(mesh_home, failure)))
    assert done.returncode == 1
    assert words in done.stdout
    assert kinds(mesh_home) == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_daemon_dies_with_its_parent(mesh_home: Path) -> None:
    script = write_daemon(mesh_home)
    parent_script = (
        "import signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, sys.argv[1]], stdout=open('child.log', 'w'))\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_script, str(script)],
        cwd=mesh_home,
        env=daemon_environment(mesh_home),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        log = mesh_home / "child.log"
        wait_until(lambda: "ready" in log.read_text(), 15, "the daemon is ready")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: gone(child), 10, "the daemon has died with its parent")
    assert kinds(mesh_home) == ["node"], "by an orderly stop"


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# -- stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_supervisord_a_stop_is_the_nodes(mesh_home: Path, number: signal.Signals) -> None:
    with daemon(mesh_home, write_daemon(mesh_home)) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        assert process.wait(10) == 0
        assert kinds(mesh_home) == ["node"]


def test_a_supervisord_that_does_not_answer_is_dead(mesh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISOR_SERVER_URL", f"unix://{mesh_home}/gone.sock")
    assert stop_kind() == "orphaned"
    monkeypatch.delenv("SUPERVISOR_SERVER_URL")
    assert stop_kind() == "node"


SUPERVISORD_CONF = """
[unix_http_server]
file=%(here)s/s.sock
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisord]
logfile=%(here)s/supervisord.log
pidfile=%(here)s/supervisord.pid
[supervisorctl]
serverurl=unix://%(here)s/s.sock
[program:gossipd]
command={python} %(here)s/daemon.py
redirect_stderr=true
stdout_logfile=%(here)s/daemon.log
startsecs=0
autorestart=false
"""


class Node:
    """A real supervisord with one daemon that logs why it stops."""

    def __init__(self, home: Path) -> None:
        self.home = home
        write_daemon(home)
        self.conf = home / "s.conf"
        self.conf.write_text(SUPERVISORD_CONF.format(python=sys.executable))
        self.supervisord = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(self.conf)],
            cwd=home,
            env=daemon_environment(home),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def log(self) -> str:
        path = self.home / "daemon.log"
        return path.read_text() if path.exists() else ""

    def control(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self.conf), *command],
            cwd=self.home,
            env=daemon_environment(self.home),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout

    def wait_for(self, text: str, count: int = 1) -> None:
        wait_until(lambda: self.log().count(text) >= count, 20, f"{text!r} {count} times in the log")

    def wait_for_kinds(self, *expected: str) -> None:
        wait_until(lambda: kinds(self.home) == list(expected), 20, f"it has stopped as {expected}")


@pytest.fixture
def node(mesh_home: Path) -> Iterator[Node]:
    made = Node(mesh_home)
    try:
        made.wait_for("gossipd ready\n")
        yield made
    finally:
        if made.supervisord.poll() is None:
            made.supervisord.terminate()
            try:
                made.supervisord.wait(20)
            except subprocess.TimeoutExpired:
                made.supervisord.kill()
                made.supervisord.wait()


def test_why_a_daemon_stops_is_learnt_from_supervisord(node: Node) -> None:
    """`supervisorctl restart` means this one alone, a shutdown the whole node."""
    assert "gossipd: started" in node.control("restart", "gossipd")
    node.wait_for_kinds("alone")
    node.wait_for("gossipd ready\n", 2)
    node.control("shutdown")
    node.wait_for_kinds("alone", "node")
    assert node.supervisord.wait(20) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_supervisord_takes_its_daemons_along_as_orphans(node: Node) -> None:
    (daemon_pid,) = [child.pid for child in psutil.Process(node.supervisord.pid).children()]
    child = psutil.Process(daemon_pid)
    node.supervisord.kill()
    node.supervisord.wait()
    node.wait_for_kinds("orphaned")
    wait_until(lambda: gone(child), 10, "the daemon has ended")


def test_a_sigterm_to_supervisord_is_the_nodes_end(node: Node) -> None:
    node.supervisord.terminate()
    node.wait_for_kinds("node")
    assert node.supervisord.wait(20) == 0


# -- inside one loop ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_supervisord(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUPERVISOR_SERVER_URL", raising=False)


@pytest.mark.usefixtures("no_supervisord")
def test_wait_or_returns_the_kind_or_raises_what_a_task_raised() -> None:
    async def stopped() -> str:
        tasks, stop = Tasks(), StopSignal()
        tasks.start(asyncio.Event().wait(), "long")
        waiting = asyncio.ensure_future(stop.wait_or(tasks))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        kind = await waiting
        await tasks.cancel()
        return kind

    async def failed() -> str:
        tasks, stop = Tasks(), StopSignal()

        async def fail() -> None:
            await asyncio.sleep(0)
            raise LookupError("lost")

        tasks.start(fail(), "fails")
        return await stop.wait_or(tasks)

    assert run_async(stopped()) == "node"
    with pytest.raises(LookupError, match="lost"):
        run_async(failed())


@pytest.mark.usefixtures("no_supervisord")
def test_a_signal_that_came_before_anybody_waits_is_not_lost() -> None:
    async def scene() -> str:
        stop = StopSignal()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        return await stop.wait_or(Tasks())

    assert run_async(scene()) == "node"


def test_the_loop_is_uvloops() -> None:
    uvloop = pytest.importorskip("uvloop")
    seen: list[object] = []

    async def look() -> None:
        seen.append(type(asyncio.get_running_loop()))

    run_loop(look())
    assert seen == [uvloop.Loop]


def test_nothing_of_the_repository_is_needed_in_the_working_folder(mesh_home: Path) -> None:
    """Daemons run from wherever supervisord was started."""
    assert (REPOSITORY / "shared").is_dir()
    assert run_script(mesh_home, "-c", "import shared.io.lifecycle").returncode == 0
