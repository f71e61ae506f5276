"""A node as a whole: started with nothing set, stopped without a trace, healed after the worst."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.ids import DAEMONS
from tests.engines.scripted_engine import Script
from tests.processes.node import PORTS, ROOT, Node, node_with_scripted_engine, private_home, processes_of, wait_for


def supervisord_pid(node: Node) -> int:
    return psutil.Process(node.pid("gossipd")).ppid()


def test_down_leaves_no_process_behind() -> None:
    with node_with_scripted_engine(Script(tokens=4)) as node:
        wait_for(lambda: node.chat("tiny-a", "hi").status == 200, 30, "an answer")
        assert len(processes_of(node.home)) >= 8
        node.meshctl("down")
        assert processes_of(node.home) == []


def test_an_engine_that_refuses_to_stop_is_gone_too() -> None:
    with node_with_scripted_engine(Script(tokens=4, ignore_sigterm=True)) as node:
        wait_for(lambda: node.chat("tiny-a", "hi").status == 200, 30, "an answer")
        node.meshctl("down")
        assert processes_of(node.home) == []


def test_the_start_after_supervisord_was_killed_sweeps_and_serves() -> None:
    with node_with_scripted_engine(Script(tokens=4)) as node:
        wait_for(lambda: node.chat("tiny-a", "hi").status == 200, 30, "an answer")
        daemons = {node.pid(daemon) for daemon in DAEMONS}
        os.kill(supervisord_pid(node), signal.SIGKILL)
        wait_for(lambda: not daemons & {process.pid for process in processes_of(node.home)}, 20, "daemons gone")
        node.forget_address()
        node.up()
        wait_for(lambda: node.chat("tiny-a", "hi").status == 200, 30, "an answer after the new start")
        wait_for(lambda: len(engines_of(node)) == 1, 20, "exactly one engine")


def engines_of(node: Node) -> list[psutil.Process]:
    return [
        process
        for process in processes_of(node.home)
        if any("scripted_engine" in word for word in process.cmdline())
    ]


@pytest.fixture
def clone() -> Iterator[tuple[Path, Path]]:
    """A copy of what git has, with an environment that can import meshd's packages, and an empty HOME."""
    with private_home() as folder:
        repository, home = folder / "r", folder / "h"
        home.mkdir()
        parts = ["bin", "services", "shared", "supervisord.conf", ".run", "docs/guide"]
        command = ["git", "-C", str(ROOT), "ls-files", "-z", *parts]
        files = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        for name in filter(None, files.split("\0")):
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, repository / name)
        yield repository, home


def test_supervisord_in_the_repository_with_no_variable_set_starts_an_idle_node(clone: tuple[Path, Path]) -> None:
    repository, home = clone
    binaries = Path(sys.executable).parent
    # Only the ports differ from what a person would have: the usual ones may be taken on this machine.
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "MESHD_PYTHON": sys.executable, **PORTS}
    conf = str(repository / "supervisord.conf")

    def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(binaries / program), "-c", conf, *words],
            env=environment, cwd=repository, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    started = run("supervisord")
    assert started.returncode == 0, started.stderr
    try:
        node = Node(home / ".mesh", root=repository, environment={**environment})
        running = len(DAEMONS) + 1
        wait_for(lambda: run("supervisorctl", "status").stdout.count("RUNNING") == running, 30, "six processes")
        answer = node.chat("anything", "hi")
        assert answer.status == 503
        assert "meshctl up" in answer.json()["error"]["message"]
        assert (home / ".mesh" / "logs" / "gossipd.log").exists()
        for daemon in DAEMONS:
            assert run("supervisorctl", "restart", daemon).returncode == 0
            tail = run("supervisorctl", "tail", daemon)
            assert f"{daemon} ready" in tail.stdout, tail
        node.meshctl("down")
    finally:
        run("supervisorctl", "shutdown")
    left = [process for process in psutil.process_iter() if str(repository) in " ".join(_cmdline(process))]
    assert left == []


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_two_nodes_with_their_own_homes_do_not_disturb_each_other() -> None:
    script = Script(tokens=4)
    with node_with_scripted_engine(script) as one, node_with_scripted_engine(script, models=("tiny-b",)) as two:
        wait_for(lambda: one.chat("tiny-a", "hi").status == 200, 30, "an answer of the first")
        wait_for(lambda: two.chat("tiny-b", "hi").status == 200, 30, "an answer of the second")
        assert one.chat("tiny-b", "hi").status == 404
        one.meshctl("down")
        assert two.chat("tiny-b", "hi").status == 200
