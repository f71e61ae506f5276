"""`bin/bench node`: what an idle node costs, how fast it starts, and what a restart of proxyd does to its clients.

Parts: `start` (from supervisord's start to the first answer of the API), `idle` (memory and processor time), `restart`
(the longest wait of a request while proxyd restarts under load). Targets: DESIGN §2, §10.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.bench import mesh
from tests.bench.children import BenchError, free_port, http_get, http_post
from tests.bench.figures import Figure, Target, figure_of_rounds, skipped
from tests.bench.lineup import Say

PARTS = ("start", "idle", "restart")
START_ROUNDS = 3
SETTLE_SECONDS, IDLE_SECONDS = 5.0, 20.0
LOAD_BEFORE_SECONDS, LOAD_AFTER_SECONDS = 1.0, 3.0
RESTARTS = 3
CLIENTS = 8
POLL_SECONDS = 0.005
MIB = 1024 * 1024

START_TARGET = Target("<=", 2.0)
MEMORY_TARGET = Target("<=", 250)
CPU_TARGET = Target("<=", 2.0)
WAIT_TARGET = Target("<=", 0.5)
FAILURES_TARGET = Target("==", 0)


def run(parts: Sequence[str], say: Say) -> list[Figure]:
    """All figures of the parts asked for. Raises: BenchError."""
    figures: list[Figure] = []
    if "start" in parts:
        figures += _or_skipped(start(say), ("node.start.first_answer", "s", START_TARGET))
    if "idle" in parts:
        rows = (("node.idle.pss", "MiB", MEMORY_TARGET), ("node.idle.cpu", "% core", CPU_TARGET))
        figures += _or_skipped(idle(say), *rows)
    if "restart" in parts:
        rows = (("node.restart.max_wait", "s", WAIT_TARGET), ("node.restart.failures", "requests", FAILURES_TARGET))
        figures += _or_skipped(restart(say), *rows)
    return figures


def _or_skipped(figures: Iterator[Figure], *rows: tuple[str, str, Target]) -> list[Figure]:
    """The figures, or the rows as skipped with the reason where no node can be started."""
    try:
        return list(figures)
    except mesh.NoNode as error:
        return [skipped(name, unit, str(error), target) for name, unit, target in rows]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = mesh.short_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(say: Say) -> Iterator[Figure]:
    """Seconds from supervisord's start to the first 200 of GET /live and of GET /v1/models, of an idle node."""
    live: list[float] = []
    models: list[float] = []
    for number in range(START_ROUNDS):
        say(f"node start, round {number + 1} of {START_ROUNDS}")
        with _folder() as home:
            port = free_port()
            node = mesh.Node(home, MESH_API_PORT=str(port))
            answered = _FirstAnswers(port, ("/live", "/v1/models"))
            answered.start()
            try:
                node.up()
            finally:
                answered.give_up()
            try:
                started = _started_at(node.supervisor_pid())
                answered.join()
                for path, seconds in (("/live", live), ("/v1/models", models)):
                    if path not in answered.at:
                        raise mesh.NoNode(f"GET {path} never answered 200: {answered.last}")
                    seconds.append(answered.at[path] - started)
            finally:
                node.stop()
    yield figure_of_rounds("node.start.first_answer", "s", live, START_TARGET, "GET /live")
    yield figure_of_rounds("node.start.models_answer", "s", models, None, "GET /v1/models")


def _started_at(pid: int) -> float:
    """When a process started, on the clock of `_now`, in steps of a clock tick (10 ms)."""
    if sys.platform.startswith("linux"):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        per_second = subprocess.run(["getconf", "CLK_TCK"], capture_output=True, text=True, check=True).stdout
        return ticks / int(per_second)
    return psutil.Process(pid).create_time()


def _now() -> float:
    """Seconds since boot on Linux, as /proc counts a process's start; else the wall clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform.startswith("linux") else time.time()


class _FirstAnswers(threading.Thread):
    """Asks until each path has answered 200 once; `at` holds when, on the clock of `_now`."""

    def __init__(self, port: int, paths: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.at: dict[str, float] = {}
        self.last = "no answer"
        self._port = port
        self._paths = paths
        self._deadline = time.monotonic() + mesh.COMMAND_LIMIT_SECONDS

    def give_up(self, after_seconds: float = 2.0) -> None:
        self._deadline = time.monotonic() + after_seconds

    def run(self) -> None:
        for path in self._paths:
            while path not in self.at and time.monotonic() < self._deadline:
                try:
                    status, body = http_get(self._port, path, timeout_seconds=1.0)
                except OSError as error:
                    self.last = str(error)
                else:
                    if status == 200:
                        self.at[path] = _now()
                        break
                    self.last = f"status {status} {body[:80]!r}"
                time.sleep(POLL_SECONDS)


def idle(say: Say) -> Iterator[Figure]:
    """MiB of proportional memory and percent of one core of a node without configuration, by daemon.

    The sum counts everything but supervisord, which has lines of its own; keeper and helpers are in the sum.
    """
    with _folder() as home:
        node = mesh.Node(home)
        say("starting an idle node")
        node.up()
        try:
            say(f"idle node: settling for {SETTLE_SECONDS:g} s, then watching for {IDLE_SECONDS:g} s")
            time.sleep(SETTLE_SECONDS)
            before, began = _cpu_by_daemon(node), time.monotonic()
            time.sleep(IDLE_SECONDS)
            elapsed = time.monotonic() - began
            after = _cpu_by_daemon(node)
            cpu = {name: (after[name] - before.get(name, 0.0)) / elapsed * 100 for name in after}
            memory = {name: sum(map(_pss_mib, group)) for name, group in node.processes().items()}
        finally:
            node.stop()
    how = "PSS, without supervisord" if sys.platform.startswith("linux") else "RSS, without supervisord"
    yield Figure(
        name="node.idle.pss", unit="MiB", value=_without_supervisord(memory), target=MEMORY_TARGET, why=how
    )
    yield from (Figure(name=f"node.idle.pss.{name}", unit="MiB", value=value) for name, value in memory.items())
    yield Figure(name="node.idle.cpu", unit="% core", value=_without_supervisord(cpu), target=CPU_TARGET)
    yield from (Figure(name=f"node.idle.cpu.{name}", unit="% core", value=value) for name, value in cpu.items())


def _without_supervisord(values: dict[str, float]) -> float:
    return sum(value for name, value in values.items() if name != "supervisord")


def _cpu_by_daemon(node: mesh.Node) -> dict[str, float]:
    """User and system seconds so far, by daemon."""
    seconds: dict[str, float] = {}
    for name, group in node.processes().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = [process.cpu_times() for process in group]
            seconds[name] = sum(t.user + t.system for t in times)
    return seconds


def _pss_mib(process: psutil.Process) -> float:
    """Proportional set size; the resident set where the system knows no such thing."""
    memory = process.memory_full_info()
    return float(getattr(memory, "pss", memory.rss)) / MIB


@dataclass
class _Seen:
    """What the clients met. Times in seconds."""

    longest_wait: float = 0.0
    completed: int = 0
    failures: int = 0
    first_failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, waited: float, failure: str) -> None:
        with self.lock:
            self.longest_wait = max(self.longest_wait, waited)
            self.completed += 1
            if failure:
                self.failures += 1
                self.first_failure = self.first_failure or failure


def restart(say: Say) -> Iterator[Figure]:
    """Clients that open a connection for each request, half streaming, while proxyd is restarted three times."""
    with _folder() as home:
        node = mesh.serving_node(home, "stand-in", "stand-in")
        say("starting a node with the stand-in engine")
        node.up()
        try:
            node.await_model("stand-in")
            port = node.api_port()
            seen, stop = _Seen(), threading.Event()
            clients = [
                threading.Thread(target=_ask, args=(port, number % 2 == 1, seen, stop), daemon=True)
                for number in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            try:
                time.sleep(LOAD_BEFORE_SECONDS)
                usual = seen.longest_wait
                pids: set[int] = set()
                for number in range(RESTARTS):
                    say(f"restarting proxyd under load, {number + 1} of {RESTARTS}")
                    pids.add(_proxyd_pid(node))
                    node.meshctl("restart", "proxyd")
                    time.sleep(LOAD_AFTER_SECONDS)
                pids.add(_proxyd_pid(node))
            finally:
                stop.set()
                for client in clients:
                    client.join(10)
            if len(pids) != RESTARTS + 1:
                raise BenchError(f"proxyd was not restarted {RESTARTS} times: pids {sorted(pids)}")
        finally:
            node.stop()
    how = f"{RESTARTS} restarts, {seen.completed} requests, {usual:.3f} s before the first"
    yield Figure(
        name="node.restart.max_wait", unit="s", value=seen.longest_wait, target=WAIT_TARGET, why=how
    )
    yield Figure(
        name="node.restart.failures",
        unit="requests",
        value=float(seen.failures),
        target=FAILURES_TARGET,
        why=seen.first_failure,
    )


def _proxyd_pid(node: mesh.Node) -> int:
    """Raises: NoNode when the node doesn't tell."""
    for daemon in node.status().get("daemons", ()):
        if daemon["name"] == "proxyd":
            return int(daemon["pid"])
    raise mesh.NoNode("the node tells no pid of proxyd")


def _ask(port: int, streaming: bool, seen: _Seen, stop: threading.Event) -> None:
    """Requests one after another, each on a connection of its own and read to its end."""
    content = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": "stand-in", "messages": content, "max_tokens": 32, "stream": streaming}).encode()
    while not stop.is_set():
        began, failure = time.perf_counter(), ""
        try:
            status, answer = http_post(port, "/v1/chat/completions", body, [("Content-Type", "application/json")])
            if status != 200:
                failure = f"status {status} {answer[:100]!r}"
            elif streaming and b"data: [DONE]" not in answer:
                failure = f"a stream ended early, after {len(answer)} bytes"
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
        seen.add(time.perf_counter() - began, failure)
