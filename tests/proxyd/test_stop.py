"""Going down: nothing is left behind, whatever still runs; and a worker whose node is gone goes too."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from tests.engines.scripted_engine import Script
from tests.proxyd.supervised import Stream, Supervised, scripted_model, supervised
from tests.waiting import wait_until

ENDLESS = Script(tokens=100_000, token_seconds=0.02)


def ours(node: Supervised) -> list[psutil.Process]:
    """Processes of the node; the scripted engine belongs to the test."""
    found = []
    for process in node.running():
        with contextlib.suppress(psutil.Error):
            # A process that ended just now has no command line any more.
            if "scripted" not in " ".join(process.cmdline()):
                found.append(process)
    return found


def streaming(node: Supervised) -> Stream:
    stream = Stream(node.ports()["api"])
    stream.start()
    assert stream.began.wait(20), (stream.error, node.log())
    return stream


def test_shutdown_ends_streams_draining_workers_and_everything_else(mesh_home: Path) -> None:
    with supervised(mesh_home) as node, scripted_model(node.paths, ENDLESS):
        node.wait_live()
        old, first = node.workers(), streaming(node)
        node.restart("proxyd")
        wait_until(lambda: len(node.workers()) == 2 and "draining" in node.log(), 20, "the old worker drains")
        second = streaming(node)
        assert old[0] in node.workers()
        node.stop()
        assert ours(node) == []
        for stream in (first, second):
            stream.join(10)
            assert not stream.done, "an ended stream must not look complete"


def test_after_supervisord_is_killed_nothing_stays_and_the_next_start_serves(mesh_home: Path) -> None:
    with supervised(mesh_home) as node, scripted_model(node.paths, ENDLESS):
        node.wait_live()
        streaming(node)
        node.restart("proxyd")
        wait_until(lambda: len(node.workers()) == 2 and "draining" in node.log(), 20, "the old worker drains")
        assert node.process is not None
        ports = node.ports()
        os.kill(node.process.pid, signal.SIGKILL)
        node.process.wait()
        wait_until(lambda: not ours(node), 15, "every process has noticed")
        node.start()
        node.wait_live()
        assert node.ports() == ports


def test_supervisord_stub_and_keeper_killed_at_once_leave_no_worker(mesh_home: Path) -> None:
    with supervised(mesh_home) as node, scripted_model(node.paths, ENDLESS):
        node.wait_live()
        streaming(node)
        pids = [node.pid("proxyd"), node.pid("keeper")]
        assert node.process is not None
        # Stopped first, supervisord starts neither again; killed last, its death tells nobody.
        os.kill(node.process.pid, signal.SIGSTOP)
        for pid in (*pids, node.process.pid):
            os.kill(pid, signal.SIGKILL)
        node.process.wait()
        wait_until(lambda: not ours(node), 20, "the worker has noticed that its node is gone")


def test_stopping_proxyd_alone_keeps_answering_for_a_while(mesh_home: Path) -> None:
    """It could be half of a restart; ``worker_life`` says when it is taken for what it is."""
    with supervised(mesh_home) as node:
        node.wait_live()
        worker = node.workers()
        node.supervisor.call("stopProcess", "proxyd", True)
        assert node.is_live()
        assert node.workers() == worker
        node.supervisor.call("startProcess", "proxyd", False)
        wait_until(lambda: (now := node.workers()) and now[-1] != worker[0] and len(now) == 1, 20, "it is replaced")
        assert node.is_live()
