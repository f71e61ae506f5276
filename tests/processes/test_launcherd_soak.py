"""launcherd is killed again and again while two models take turns in the one place there is.

TRAPS 32: kill -9 of launcherd during a load, during an eviction, during a request: restart converges, no orphan, no
double load. DESIGN §2: SIGKILL of launcherd costs no request.
"""

from __future__ import annotations

import http.client
import os
import signal
import threading
import time
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest

from services.launcherd.command_line import ENGINE_MARK
from services.launcherd.io.process import marked_processes
from tests.engines.scripted_engine import Script
from tests.processes.node import Node, Stream, node_with_scripted_engine, processes_of, wait_for

SEED = "launcherd soak"
KILLS = 20
LONGEST_PAUSE_SECONDS = 2.5
"""One turn takes about as long: stop the one engine, start the other, answer."""
TOKENS = 8
WHOLE = "".join(f"w{number} " for number in range(TOKENS))
MODELS = ("tiny-a", "tiny-b")


class Client(threading.Thread):
    """Asks the two models in turn, one request after the other, every second one as a stream."""

    def __init__(self, node: Node, first: int) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._first = first
        self._end = threading.Event()
        self.answered = 0
        self.failures: list[str] = []
        self.slowest_seconds = 0.0

    def run(self) -> None:
        while not self._end.is_set() and self.answered < 10_000:
            model = MODELS[(self._first + self.answered) % len(MODELS)]
            started = time.monotonic()
            failure = self._stream(model) if self.answered % 4 > 1 else self._chat(model)
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started)
            self.answered += 1
            if failure:
                self.failures.append(f"request {self.answered} to {model}: {failure}")

    def _chat(self, model: str) -> str:
        try:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
            answer = self._node.request("POST", "/v1/chat/completions", body, timeout=60)
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        if answer.status != 200:
            return f"{answer.status} {answer.body[:300]!r}"
        reply = answer.json()
        said = (reply["model"], reply["choices"][0]["message"]["content"])
        return "" if said == (model, WHOLE) else f"wrong answer {said}"

    def _stream(self, model: str) -> str:
        stream = Stream(self._node, model, TOKENS)
        stream.run()
        if stream.error or not stream.done:
            return stream.error or "the stream ended early"
        return "" if (stream.model, stream.text) == (model, WHOLE) else f"wrong answer {stream.model} {stream.text}"

    def finish(self) -> None:
        self._end.set()
        self.join(90)
        assert not self.is_alive()


def pause_seconds(number: int) -> float:
    """When the next kill comes: the same in every run, spread over a whole turn."""
    digest = blake2b(f"{SEED} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32 * LONGEST_PAUSE_SECONDS


def engines(home: Path) -> list[int]:
    return sorted(identity.pid for identity, _ in marked_processes(ENGINE_MARK, f"{home}/"))


def last_event(home: Path) -> str:
    """What launcherd was at."""
    log = (home / "logs" / "launcherd.log").read_text()
    return log.rpartition("event=model_")[2].partition(" ")[0]


@pytest.mark.slow
def test_killing_launcherd_twenty_times_costs_no_request(tmp_path: Path) -> None:
    starts, overlaps = tmp_path / "starts", tmp_path / "overlaps"
    script = Script(
        load_seconds=0.7, tokens=TOKENS, token_seconds=0.08, starts_file=str(starts), alone_file=str(overlaps)
    )
    with node_with_scripted_engine(script, MODELS) as node:
        wait_for(lambda: node.chat("tiny-a", "hi", max_tokens=1).status == 200, 30, "the first answer")
        clients = [Client(node, first) for first in range(2)]
        for client in clients:
            client.start()
        seen: Counter[str] = Counter()
        for number in range(KILLS):
            pid = wait_for(lambda: node.pid("launcherd"), 20, "launcherd")
            answered = sum(client.answered for client in clients)
            wait_for(lambda known=answered: sum(c.answered for c in clients) > known, 60, f"answers before {number}")
            time.sleep(pause_seconds(number))  # Not for something to happen: the moment of the kill.
            os.kill(pid, signal.SIGKILL)
            seen[last_event(node.home)] += 1
            wait_for(lambda old=pid: node.pid("launcherd") not in (0, old), 30, f"launcherd again after {number}")
        for client in clients:
            client.finish()
        for client in clients:
            assert client.failures == []
        left = wait_for(lambda: engines(node.home), 5, "an engine")
        known = [row["here"]["pid"] for row in node.status()["models"] if row["here"] and row["here"]["pid"]]
        assert left == sorted(known)
        requests = sum(client.answered for client in clients)
        started = len(starts.read_text().split())
        print(f"{requests} requests, {started} engine starts, killed while {dict(seen)}, slowest "
              f"{max(client.slowest_seconds for client in clients):.1f} s")  # fmt: skip
        assert overlaps.read_text() == "", "two engines at once where there is one place"
        assert requests >= KILLS
        assert started <= requests + KILLS + 2, "an engine was started for nothing"
    wait_for(lambda: not processes_of(node.home), 10, "the end of every process")
