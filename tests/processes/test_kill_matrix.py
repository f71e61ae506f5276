"""Each daemon is killed alone while a stream runs and new connections keep coming.

gossipd, electiond, tunneld and launcherd cost nothing; proxyd refuses no connection; status shows all healed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from shared.ids import DAEMONS
from tests.engines.scripted_engine import Script
from tests.processes.node import ConnectLoop, Node, Stream, node_with_scripted_engine, wait_for

TOKENS = 100
WHOLE = "".join(f"w{number} " for number in range(TOKENS))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    script = Script(tokens=TOKENS, token_seconds=0.03)
    with node_with_scripted_engine(script) as running:
        wait_for(lambda: running.chat("tiny-a", "hi", max_tokens=1).status == 200, 30, "the first answer")
        yield running


def engine_pid(node: Node) -> int:
    models = {row["name"]: row for row in node.status()["models"]}
    return int(models["tiny-a"]["here"]["pid"])


def killed_under_load(node: Node, pid: int, daemon: str) -> tuple[Stream, ConnectLoop]:
    """SIGKILL ``pid`` in the middle of a stream; both loads to their end, the node healed."""
    stream, loop = Stream(node, "tiny-a", TOKENS), ConnectLoop(node, "tiny-a")
    stream.start()
    loop.start()
    assert stream.started.wait(20)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: node.pid(daemon) not in (0, pid) and node.healed(), 20, f"{daemon} running again")
    stream.join(60)
    loop.finish()
    return stream, loop


@pytest.mark.parametrize("daemon", ["gossipd", "electiond", "tunneld", "launcherd"])
def test_killing_a_daemon_costs_no_request(node: Node, daemon: str) -> None:
    engine = engine_pid(node)
    stream, loop = killed_under_load(node, node.pid(daemon), daemon)
    assert stream.error == ""
    assert stream.done
    assert stream.text == WHOLE
    assert loop.failures == []
    assert loop.answered > 0
    assert wait_for(lambda: engine_pid(node), 10, "the engine in status") == engine


def test_killing_the_supervised_proxyd_costs_nothing(node: Node) -> None:
    stream, loop = killed_under_load(node, node.pid("proxyd"), "proxyd")
    assert stream.error == ""
    assert stream.text == WHOLE
    assert loop.failures == []


def test_killing_the_serving_worker_refuses_no_connection(node: Node) -> None:
    worker = next(row["serving_pid"] for row in node.status()["daemons"] if row["name"] == "proxyd")
    assert worker != node.pid("proxyd")
    stream, loop = Stream(node, "tiny-a", TOKENS), ConnectLoop(node, "tiny-a")
    stream.start()
    loop.start()
    assert stream.started.wait(20)
    os.kill(worker, signal.SIGKILL)
    stream.join(60)
    wait_for(lambda: node.chat("tiny-a", "hi", max_tokens=1).status == 200, 20, "an answer after the kill")
    loop.finish()
    # The worker's own requests are cut, and visibly so: never a stream that ends as if it were complete.
    assert not stream.done
    assert stream.error or stream.text != WHOLE
    assert not [failure for failure in loop.failures if "Refused" in failure]
    assert len(loop.failures) <= 2, loop.failures


def test_restarting_proxyd_keeps_streams_and_hardly_delays_new_requests(node: Node) -> None:
    stream, loop = Stream(node, "tiny-a", TOKENS), ConnectLoop(node, "tiny-a")
    stream.start()
    loop.start()
    assert stream.started.wait(20)
    before = node.pid("proxyd")
    node.meshctl("restart", "proxyd")
    assert node.pid("proxyd") != before
    stream.join(60)
    loop.finish()
    assert stream.error == ""
    assert stream.text == WHOLE
    assert loop.failures == []
    print(f"slowest request during the restart: {loop.slowest_seconds:.3f} s")


def test_restarting_every_daemon_by_its_plain_name(node: Node) -> None:
    before = {daemon: node.pid(daemon) for daemon in DAEMONS}
    for daemon in DAEMONS:
        node.meshctl("restart", daemon)
    after = {daemon: node.pid(daemon) for daemon in DAEMONS}
    assert all(after[daemon] not in (0, before[daemon]) for daemon in DAEMONS)
    wait_for(lambda: node.chat("tiny-a", "hi", max_tokens=1).status == 200, 20, "an answer after all restarts")
