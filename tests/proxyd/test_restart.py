"""keeper, stub and worker are killed and restarted one by one while connections keep coming and a stream runs."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.messages.daemon import DaemonInfo, GetDaemonInfo
from tests.engines.scripted_engine import Script
from tests.proxyd.supervised import ConnectLoop, Stream, Supervised, ask_proxyd, scripted_model, supervised
from tests.waiting import run_async, wait_until

TOKENS = 80
WHOLE = "".join(f"w{number} " for number in range(TOKENS)).strip()
LONGEST_WAIT_SECONDS = 2.0
"""On a machine shared with other jobs; 0.05 s is usual, 0.5 s is promised."""


@pytest.fixture(scope="module")
def node() -> Iterator[Supervised]:
    home = Path(tempfile.mkdtemp(prefix="mesh-", dir="/tmp"))
    try:
        with supervised(home) as running, scripted_model(running.paths, Script(tokens=100_000, token_seconds=0.025)):
            running.wait_live()
            yield running
    finally:
        shutil.rmtree(home, ignore_errors=True)


def streaming(node: Supervised, tokens: int = TOKENS) -> Stream:
    stream = Stream(node.ports()["api"], tokens)
    stream.start()
    assert stream.began.wait(20), (stream.error, node.log())
    return stream


def is_whole(stream: Stream) -> None:
    stream.join(60)
    assert stream.error == ""
    assert stream.text.strip() == WHOLE
    assert stream.done


def one_new_worker(node: Supervised, old: list[int]) -> int:
    """The one worker once it is another one, of the stub that runs now, and answers."""

    def settled() -> int:
        workers = node.workers()
        return workers[0] if len(workers) == 1 and workers[0] not in old and node.is_current(workers[0]) else 0

    worker = wait_until(settled, 20, "a new worker")
    wait_until(node.is_live, 20, "the new worker answers")
    return worker


def test_restart_keeps_streams_and_refuses_and_delays_nothing(node: Supervised) -> None:
    old, stub, ports = node.workers(), node.pid("proxyd"), node.ports()
    stream = streaming(node)
    with ConnectLoop(node.ports()["api"]) as loop:
        node.restart("proxyd")
        wait_until(lambda: len(node.workers()) == 2, 20, "old and new worker side by side")
        wait_until(lambda: "draining" in node.log(), 20, "the old worker drains")
        is_whole(stream)
        one_new_worker(node, old)
    assert node.pid("proxyd") != stub
    assert node.ports() == ports
    assert loop.failures == []
    print(f"restart: {loop.answers} answers, slowest {loop.slowest_seconds:.3f} s")
    assert loop.slowest_seconds < LONGEST_WAIT_SECONDS


def test_two_restarts_in_a_row_leave_one_worker(node: Supervised) -> None:
    old, stream = node.workers(), streaming(node)
    with ConnectLoop(node.ports()["api"]) as loop:
        node.restart("proxyd")
        node.restart("proxyd")
        is_whole(stream)
        worker = one_new_worker(node, old)
    assert node.workers() == [worker]
    assert loop.failures == []
    # The ended worker's bus sockets had the same names.
    info = run_async(ask_proxyd(node, GetDaemonInfo()))
    assert isinstance(info, DaemonInfo)
    assert info.pid == worker


def test_killing_the_stub_costs_nothing(node: Supervised) -> None:
    old, stub, stream = node.workers(), node.pid("proxyd"), streaming(node)
    with ConnectLoop(node.ports()["api"]) as loop:
        os.kill(stub, signal.SIGKILL)
        is_whole(stream)
        one_new_worker(node, old)
    assert node.pid("proxyd") not in (0, stub)
    assert loop.failures == []
    assert loop.slowest_seconds < LONGEST_WAIT_SECONDS


def test_killing_the_worker_refuses_no_connection_and_cuts_only_its_own_streams(node: Supervised) -> None:
    old, stub, stream = node.workers(), node.pid("proxyd"), streaming(node, 100_000)
    with ConnectLoop(node.ports()["api"]) as loop:
        os.kill(old[-1], signal.SIGKILL)
        one_new_worker(node, old)
    stream.join(30)
    assert not stream.done, "a cut stream must not look complete"
    assert node.pid("proxyd") == stub, "the stub started the new worker itself"
    assert loop.refused == []
    # Whatever the worker had accepted died with it; with one connection at a time that is at most one.
    assert len(loop.failures) <= 1
    print(f"worker killed: {loop.answers} answers, slowest {loop.slowest_seconds:.3f} s")


def test_killing_the_keeper_costs_nothing_and_keeps_the_very_sockets(node: Supervised) -> None:
    keeper, worker, ports, stream = node.pid("keeper"), node.workers(), node.ports(), streaming(node)
    with ConnectLoop(node.ports()["api"]) as loop:
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: node.pid("keeper") not in (0, keeper), 20, "a new keeper")
        wait_until(lambda: node.log().count("event=listening listener=api") >= 2, 20, "the new keeper has the sockets")
        is_whole(stream)
    assert node.workers() == worker
    assert node.ports() == ports
    assert loop.failures == []
    # And the new keeper's sockets serve a worker that never saw the old keeper.
    with ConnectLoop(node.ports()["api"]) as loop:
        node.restart("proxyd")
        one_new_worker(node, worker)
    assert loop.failures == []


def test_killing_keeper_and_stub_together_costs_nothing(node: Supervised) -> None:
    old, stream = node.workers(), streaming(node)
    with ConnectLoop(node.ports()["api"]) as loop:
        for name in ("keeper", "proxyd"):
            os.kill(node.pid(name), signal.SIGKILL)
        is_whole(stream)
        one_new_worker(node, old)
    assert loop.failures == []


def test_a_connection_without_a_request_yet_is_answered_by_the_draining_worker(node: Supervised) -> None:
    """uvicorn's own shutdown closes it, which its client sees as a reset."""
    old = node.workers()
    stream = streaming(node)
    early = [http.client.HTTPConnection("127.0.0.1", node.ports()["api"], timeout=20) for _ in range(8)]
    for connection in early:
        connection.connect()
    kept = http.client.HTTPConnection("127.0.0.1", node.ports()["api"], timeout=20)
    kept.request("GET", "/live")
    assert kept.getresponse().read()
    node.restart("proxyd")
    wait_until(lambda: len(node.workers()) == 2 and f"draining pid={old[-1]}" in node.log(), 20, "the worker drains")
    for connection in [*early, kept]:
        connection.request("GET", "/live")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("connection")) == (200, "close")
        answer.read()
    is_whole(stream)
    one_new_worker(node, old)


def test_connections_wait_while_no_worker_runs(node: Supervised) -> None:
    """The kernel's queue holds them for the next worker."""
    old = node.workers()
    os.kill(node.pid("proxyd"), signal.SIGSTOP)
    try:
        os.kill(old[-1], signal.SIGKILL)
        wait_until(lambda: node.workers() == [], 10, "no worker")
        waiting = socket.create_connection(("127.0.0.1", node.ports()["api"]), 5)
        waiting.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    finally:
        os.kill(node.pid("proxyd"), signal.SIGCONT)
    waiting.settimeout(20)
    assert waiting.recv(100).startswith(b"HTTP/1.1 200")
    waiting.close()
