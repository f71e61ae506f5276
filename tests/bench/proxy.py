"""`bin/bench proxy`: what proxyd adds between client and engine, next to what others add, in one run.

Parts: `latency` (one request at a time), `requests` and `streams` (16 at a time), `bodies` (what arrives at the
engine), all against the stand-in; `engine` (one token at a time, and 64 streams) against a real one.
Targets: DESIGN §10.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.bench import peers
from tests.bench.bodies import body_figures
from tests.bench.figures import (
    Figure,
    Target,
    figure_of_rounds,
    median,
    pairwise_differences,
    pairwise_ratios,
    percentile,
    skipped,
)
from tests.bench.lineup import Lineup, Say, System, lineup

PARTS = ("latency", "requests", "streams", "bodies", "engine")
STAND_IN_PARTS = ("latency", "requests", "streams", "bodies")



@dataclass(frozen=True)
class Size:
    """How much of a latency is measured: rounds, requests in each, and when to stop beginning rounds."""

    rounds: int
    requests: int
    limit_seconds: float


LATENCY = Size(20, 100, 40.0)
ANY_CORE_LATENCY = Size(7, 100, 15.0)
ENGINE_LATENCY = Size(15, 40, 30.0)
RATE_ROUNDS, RATE_SECONDS, RATE_LIMIT_SECONDS = 7, 0.7, 50.0
STALL_SECONDS, STREAM_LIMIT_SECONDS = 0.4, 70.0
ENGINE_STREAM_ROUNDS, ENGINE_STREAM_SECONDS, ENGINE_STREAM_LIMIT_SECONDS = 4, 2.0, 90.0
LEAST_ROUNDS = 2
"""Done even where a limit has passed; the limits add up to less than six minutes with both starts."""
CONCURRENCY, ENGINE_STREAMS, STREAM_TOKENS = 16, 64, 32
ERRORS_FORGIVEN = 0.02
"""Share of its answers that a peer may get wrong before it drops out; of direct and proxyd none."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run. `rounds` replaces every number of rounds (fewer: faster, noisier)."""

    parts: Sequence[str]
    systems: Sequence[str]
    rounds: int | None = None

    def each_round(self, usual: int, limit_seconds: float, say: Say, what: str) -> Iterator[int]:
        """Numbers of the rounds to do: all, or as many as begin within the limit, but at least two."""
        total, began = self.rounds or usual, time.monotonic()
        for number in range(total):
            if number >= LEAST_ROUNDS and time.monotonic() - began > limit_seconds:
                return
            say(f"{what}, round {number + 1} of {total}")
            yield number


def run(plan: Plan, say: Say) -> list[Figure]:
    """All figures of the parts asked for. Raises: BenchError."""
    figures: list[Figure] = []
    fast = [part for part in STAND_IN_PARTS if part in plan.parts]
    if fast:
        with lineup("stand-in", plan.systems, say) as running:
            figures += _about(running, "fast")
            if "latency" in fast:
                figures += latency(running, plan, say)
            if "requests" in fast:
                figures += requests(running, plan, say)
            if "streams" in fast:
                figures += streams(running, plan, say)
            if "bodies" in fast:
                say("bodies received")
                figures += body_figures(running, plan.systems)
    if "engine" in plan.parts:
        with lineup("real", plan.systems, say) as running:
            figures += _about(running, "engine")
            figures += engine_latency(running, plan, say)
            figures += engine_streams(running, plan, say)
    return figures


def _about(running: Lineup, stage: str) -> list[Figure]:
    """Which systems run, with their versions, and which don't and why."""
    present = [f"{system.name} {running.versions.get(system.name, '')}".strip() for system in running.systems]
    figures = [Figure(name=f"{stage}.systems", unit="running", value=float(len(present)), why=", ".join(present))]
    figures += [skipped(f"{stage}.{name}", "-", why) for name, why in running.missing.items()]
    return figures


class Rounds:
    """Measurements by system, one per round; a system that made (too many) errors drops out, its first error kept."""

    def __init__(self, running: Lineup) -> None:
        self.running = running
        self.values: dict[str, list[float]] = {system.name: [] for system in running.systems}
        self.faults: dict[str, str] = {}
        self.errors: dict[str, int] = {}

    def measure(self, system: System, **command: object) -> dict[str, object] | None:
        """One command; None when the system has dropped out, now or before."""
        if system.name in self.faults:
            return None
        answer = self.running.measure(system, **command)
        errors, completed = int(answer["errors"]), int(answer["completed"])
        self.errors[system.name] = self.errors.get(system.name, 0) + errors
        if errors > (completed * ERRORS_FORGIVEN if system.name in peers.NAMES else 0):
            self.faults[system.name] = f"{errors} errors, {completed} right answers: {answer['first_error']}"
            return None
        return answer

    def add(self, system: System, value: float) -> None:
        self.values[system.name].append(value)

    def whole(self, name: str) -> Sequence[float]:
        """The system's rounds, or nothing if it isn't there or dropped out."""
        return () if name in self.faults else self.values.get(name, ())

    def why_not(self, name: str) -> str:
        return self.faults.get(name, "not running")

    def remark(self, name: str) -> str:
        """Words about errors that were forgiven, or that made the system drop out."""
        forgiven = self.errors.get(name, 0)
        return self.faults.get(name) or (f"{forgiven} errors" if forgiven else "")

    def others(self) -> list[str]:
        return [system.name for system in self.running.systems if system.name != "direct"]


def _compared(
    rounds: Rounds, figure: str, unit: str, ours: str, theirs: str, target: Target | None, *, ratio: bool
) -> Figure:
    """ours against theirs, round by round: the ratio, or the difference in `unit`."""
    for name in (ours, theirs):
        if not rounds.whole(name):
            return skipped(figure, unit, f"{name}: {rounds.why_not(name)}", target)
    compare = pairwise_ratios if ratio else pairwise_differences
    return figure_of_rounds(figure, unit, compare(rounds.whole(ours), rounds.whole(theirs)), target)


def _proxyd_always(rounds: Rounds, wanted: Sequence[str]) -> list[str]:
    """The systems to report on: those that run, and proxyd even where it doesn't, so that it isn't overlooked."""
    others = rounds.others()
    return others if "proxyd" in others or "proxyd" not in wanted else [*others, "proxyd"]


def latency(running: Lineup, plan: Plan, say: Say) -> list[Figure]:
    """Milliseconds that each system adds to a request when only one is on its way, against the stand-in."""
    with running.separate_cores() as pinned:
        figures = _added(running, plan, say, "fast.c1", LATENCY, Target("<=", 0.25), against_peers=True)
    if not pinned:
        return figures
    how = "client and engine on one core, the proxy on the other"
    free = _added(running, plan, say, "fast.c1.any_core", ANY_CORE_LATENCY, None)
    return [replace(figures[0], why=how), *figures[1:], *free]


def engine_latency(running: Lineup, plan: Plan, say: Say) -> list[Figure]:
    """The same for one token of a real engine. It works on several cores itself, so nothing is pinned."""
    return _added(running, plan, say, "engine.c1", ENGINE_LATENCY, Target("<=", 0.35))


def _added(
    running: Lineup, plan: Plan, say: Say, stage: str, size: Size, target: Target | None, *, against_peers: bool = False
) -> list[Figure]:
    """Median and 99th percentile of each round, less those of direct in the same round."""
    p50, p99 = Rounds(running), Rounds(running)
    for number in plan.each_round(size.rounds, size.limit_seconds, say, f"{stage} latency"):
        for system in running.in_order(number):
            answer = p50.measure(system, op="latency", requests=size.requests, limit_seconds=60)
            if answer is not None:
                sample = _milliseconds(answer["latencies_us"])
                p50.add(system, median(sample))
                p99.add(system, percentile(sample, 99))
    figures = [figure_of_rounds(f"{stage}.p50.direct", "ms", p50.whole("direct"))]
    names = _proxyd_always(p50, plan.systems)
    figures += [
        _compared(p50, f"{stage}.added_p50.{name}", "ms", name, "direct", _ours(name, target), ratio=False)
        for name in names
    ]
    if against_peers:
        figures += [
            _added_against(p50, f"{stage}.added_p50.proxyd/{peer}", peer) for peer in ("sglang-router", "litellm")
        ]
    if target is not None:
        p99.faults = p50.faults
        figures += [
            _compared(p99, f"{stage}.added_p99.{name}", "ms", name, "direct", None, ratio=False) for name in names
        ]
    return figures


def _added_against(rounds: Rounds, figure: str, peer: str) -> Figure:
    """What proxyd adds divided by what the peer adds; below 1 it adds less."""
    for name in ("proxyd", peer, "direct"):
        if not rounds.whole(name):
            return skipped(figure, "x", f"{name}: {rounds.why_not(name)}", Target("<", 1))
    ours = pairwise_differences(rounds.whole("proxyd"), rounds.whole("direct"))
    theirs = pairwise_differences(rounds.whole(peer), rounds.whole("direct"))
    return figure_of_rounds(figure, "x", pairwise_ratios(ours, theirs), Target("<", 1))


def requests(running: Lineup, plan: Plan, say: Say) -> list[Figure]:
    """Requests per second with 16 at a time, and the processor time each costs."""
    rounds, spent = Rounds(running), _pools(running)
    for number in plan.each_round(RATE_ROUNDS, RATE_LIMIT_SECONDS, say, f"requests, {CONCURRENCY} at a time"):
        for system in running.in_order(number):
            before = system.cpu_seconds()
            answer = rounds.measure(system, op="rate", concurrency=CONCURRENCY, seconds=RATE_SECONDS)
            if answer is not None:
                done = _number(answer["completed"])
                rounds.add(system, done / _number(answer["measured_seconds"]))
                if system.pids and done:
                    spent[system.name].append((system.cpu_seconds() - before) / done * 1e6)
    figures = _rates(rounds, "fast.c16.requests", "req/s")
    figures.append(
        _compared(rounds, "fast.c16.requests.proxyd/nginx", "x", "proxyd", "nginx", Target(">=", 0.8), ratio=True)
    )
    figures.append(
        _compared(
            rounds,
            "fast.c16.requests.proxyd/sglang-router",
            "x",
            "proxyd",
            "sglang-router",
            Target(">=", 1.1),
            ratio=True,
        )
    )
    return figures + _costs(spent, "fast.c16.requests.cpu", "us/req")


def streams(running: Lineup, plan: Plan, say: Say) -> list[Figure]:
    """32-token streams per second with 16 at a time, and how long a stream ever waits for bytes, alone and of 16."""
    rounds, alone, among = Rounds(running), Rounds(running), Rounds(running)
    common: Mapping[str, object] = {"op": "rate", "stream": True, "expect_tokens": STREAM_TOKENS}
    for number in plan.each_round(RATE_ROUNDS, STREAM_LIMIT_SECONDS, say, f"streams, {CONCURRENCY} at a time"):
        for system in running.in_order(number):
            answer = rounds.measure(system, concurrency=CONCURRENCY, seconds=RATE_SECONDS, warm=3, **common)
            if answer is not None:
                tokens = _number(answer["tokens"])
                rounds.add(system, tokens / STREAM_TOKENS / _number(answer["measured_seconds"]))
                among.add(system, _stall(answer))
            answer = alone.measure(system, concurrency=1, seconds=STALL_SECONDS, warm=3, **common)
            if answer is not None:
                alone.add(system, _stall(answer))
    figures = _rates(rounds, "fast.c16.streams", "str/s")
    figures.append(
        _compared(rounds, "fast.c16.streams.proxyd/direct", "x", "proxyd", "direct", Target(">=", 0.6), ratio=True)
    )
    for name in _proxyd_always(rounds, plan.systems):
        stall = _ours(name, Target("<=", 5))
        figures.append(
            _compared(alone, f"fast.c1.added_stall_p99.{name}", "ms", name, "direct", stall, ratio=False)
        )
    for system in running.systems:
        if among.whole(system.name):
            figures.append(figure_of_rounds(f"fast.c16.stall_p99.{system.name}", "ms", among.whole(system.name)))
    return figures


def engine_streams(running: Lineup, plan: Plan, say: Say) -> list[Figure]:
    """Tokens per second of a real engine with 64 streams."""
    rounds = Rounds(running)
    what = f"engine, {ENGINE_STREAMS} streams"
    for number in plan.each_round(ENGINE_STREAM_ROUNDS, ENGINE_STREAM_LIMIT_SECONDS, say, what):
        for system in running.in_order(number):
            answer = rounds.measure(
                system,
                op="rate",
                stream=True,
                concurrency=ENGINE_STREAMS,
                seconds=ENGINE_STREAM_SECONDS,
                max_tokens=STREAM_TOKENS,
                warm=1,
                limit_seconds=60,
            )
            if answer is not None:
                rounds.add(system, _number(answer["tokens"]) / _number(answer["measured_seconds"]))
    figures = _rates(rounds, f"engine.s{ENGINE_STREAMS}.tokens", "tok/s")
    name = f"engine.s{ENGINE_STREAMS}.tokens.proxyd/direct"
    figures.append(_compared(rounds, name, "x", "proxyd", "direct", Target(">=", 0.95), ratio=True))
    return figures


def _rates(rounds: Rounds, figure: str, unit: str) -> list[Figure]:
    names = [system.name for system in rounds.running.systems]
    return [
        figure_of_rounds(f"{figure}.{name}", unit, rounds.whole(name), why=rounds.remark(name))
        for name in names
    ]


def _costs(spent: Mapping[str, Sequence[float]], figure: str, unit: str) -> list[Figure]:
    return [figure_of_rounds(f"{figure}.{name}", unit, values) for name, values in spent.items() if values]


def _pools(running: Lineup) -> dict[str, list[float]]:
    return {system.name: [] for system in running.systems}


def _ours(name: str, target: Target | None) -> Target | None:
    return target if name == "proxyd" else None


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _milliseconds(microseconds: object) -> list[float]:
    assert isinstance(microseconds, list)
    return [value / 1000 for value in microseconds]


def _stall(answer: Mapping[str, object]) -> float:
    """The 99th percentile of the streams' longest waits, in ms; 0 when no stream was completed."""
    stalls = answer["stall_us"]
    assert isinstance(stalls, dict)
    return float(stalls.get("p99", 0.0)) / 1000
