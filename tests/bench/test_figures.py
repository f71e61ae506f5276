"""The pure parts of the bench: statistics, verdicts, printing, comparing bodies, reading arguments, and the load
client against the stand-in for a moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import bodies, load, peers, upstream
from tests.bench.__main__ import DESCRIPTIONS, main, parts_of, systems_of
from tests.bench.figures import (
    Figure,
    Target,
    as_json,
    figure_of_rounds,
    lines,
    median,
    number,
    pairwise_differences,
    pairwise_ratios,
    percentile,
    skipped,
)
from tests.bench.proxy import LEAST_ROUNDS, Plan

# -- statistics


def test_percentiles_interpolate_between_neighbours() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([1.0, 2.0]) == 1.5
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_among_the_values(values: list[float], percent: float) -> None:
    slack = 1e-6
    assert min(values) - slack <= percentile(values, percent) <= max(values) + slack


def test_systems_are_compared_round_by_round() -> None:
    """A slow round is slow for both, so it moves neither the ratio nor the difference."""
    ours, theirs = [10.0, 1.0, 20.0], [20.0, 2.0, 40.0]
    assert pairwise_ratios(ours, theirs) == (0.5, 0.5, 0.5)
    assert pairwise_differences(ours, theirs) == (-10.0, -1.0, -20.0)
    assert pairwise_ratios([1.0, 2.0], [0.0, 4.0]) == (0.5,)
    with pytest.raises(ValueError):
        pairwise_ratios([1.0], [1.0, 2.0])


# -- figures


@pytest.mark.parametrize(
    ("value", "target", "verdict"),
    [
        (0.2, Target("<=", 0.25), "ok"),
        (0.25, Target("<=", 0.25), "ok"),
        (0.26, Target("<=", 0.25), "missed"),
        (1.0, Target("<", 1), "missed"),
        (0.8, Target(">=", 0.8), "ok"),
        (0.0, Target("==", 0), "ok"),
        (5.0, None, "info"),
        (None, Target("<=", 1), "skipped"),
        (None, None, "skipped"),
    ],
)
def test_verdicts(value: float | None, target: Target | None, verdict: str) -> None:
    assert Figure(name="x", unit="ms", value=value, target=target).verdict == verdict


def test_a_figure_of_no_rounds_is_skipped_and_says_why() -> None:
    figure = figure_of_rounds("x", "ms", [], Target("<=", 1))
    assert (figure.verdict, figure.why) == ("skipped", "no round completed")
    assert figure_of_rounds("x", "ms", [3.0, 1.0, 2.0]).value == 2.0


def test_lines_are_aligned() -> None:
    figures = [
        Figure(name="a.long.name", unit="ms", value=0.1234, target=Target("<=", 0.25)),
        Figure(name="b", unit="req/s", value=12345.6),
        skipped("c", "x", "nginx: no apt", Target(">=", 0.8)),
    ]
    assert lines(figures) == [
        "a.long.name  0.123  ms     <=0.25  ok",
        "b            12346  req/s  -       info",
        "c                -  x      >=0.8   skipped  nginx: no apt",
    ]
    assert lines([]) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.0371, "0.037"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234"), (-0.5, "-0.500")],
)
def test_numbers_keep_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_json_is_a_list_of_all_fields() -> None:
    (entry,) = json.loads(as_json([Figure(name="x", unit="ms", value=1.0, target=Target("<", 2), rounds=(1.0,))]))
    assert entry == {
        "name": "x",
        "value": 1.0,
        "unit": "ms",
        "target": "<2",
        "verdict": "ok",
        "why": "",
        "rounds": [1.0],
    }


# -- arguments


def test_names_choose_parts() -> None:
    assert parts_of(["proxy.bodies", "proxy.latency"]) == {
        "proxy": ["latency", "bodies"],
        "node": [],
        "tunnel": [],
        "slots": [],
    }
    assert parts_of([]) == parts_of(["proxy", "node", "tunnel", "slots"])
    with pytest.raises(click.BadParameter, match=r"proxy\.latency"):
        parts_of(["proxies"])


def test_direct_is_always_compared() -> None:
    assert systems_of("nginx, proxyd") == ["direct", "proxyd", "nginx"]
    assert systems_of(None)[0] == "direct"
    with pytest.raises(click.BadParameter, match="haproxy"):
        systems_of("haproxy")


def test_exit_statuses() -> None:
    run = CliRunner().invoke
    assert run(main, ["list"]).exit_code == 0
    assert all(name in run(main, ["list"]).output for name in DESCRIPTIONS)
    assert run(main, ["nonsense"]).exit_code == 2
    assert run(main, ["--nonsense"]).exit_code == 2
    assert run(main, ["--systems", "nonsense"]).exit_code == 2


def test_rounds_end_at_the_limit_but_not_before_the_second() -> None:
    plan = Plan(parts=(), systems=(), rounds=5)
    said: list[str] = []
    assert list(plan.each_round(9, -1.0, said.append, "x")) == list(range(LEAST_ROUNDS))
    assert list(plan.each_round(9, 60.0, said.append, "x")) == list(range(5))
    assert said[0] == "x, round 1 of 5"


# -- bodies


def test_an_unchanged_request_has_no_difference() -> None:
    for case in bodies.cases("m"):
        difference = bodies.compare(case.body, case.body, ["X-A"], ["x-a", "host"])
        assert difference == bodies.Difference(identical=True)
        assert bodies.words(difference) == ""


def test_what_a_proxy_did_is_named() -> None:
    sent, received = b'{"a": 1, "b": 1.0, "c": 2}', b'{"a":1,"c":3,"d":null}'
    difference = bodies.compare(sent, received, ["X-A", "X-B"], ["x-b"])
    assert not difference.identical
    assert bodies.words(difference) == "lost b; added d; changed c; headers lost X-A"
    assert bodies.compare(sent, b"not json", [], []).lost == {"a", "b", "c"}


# -- the pieces


def test_the_stand_in_takes_llama_servers_command_line() -> None:
    words = ["-m", "/x/a.gguf", "-mg", "0", "--port", "7", "--alias", "a", "--jinja", "-np", "4"]
    assert upstream.read_options(words) == {"model": "/x/a.gguf", "port": "7", "alias": "a"}


def test_a_load_line_is_one_write() -> None:
    """Less than a page, so that a pipe passes it on in one piece."""
    tally = load.Tally(latencies=[0.012345] * 200, stalls=[0.1] * 500, completed=200)
    assert len(json.dumps(load.summary(tally, keep_latencies=True))) < 4096


def test_nginx_is_configured_for_streams_and_kept_connections() -> None:
    text = peers.nginx_configuration(port=1, upstream_port=2, work=Path("/w"), user="")
    for needed in ("keepalive 128;", "proxy_buffering off;", "access_log off;", "worker_processes 1;"):
        assert needed in text
    assert text.count("{") == text.count("}")


# -- the load client and the stand-in, for a moment


@contextlib.asynccontextmanager
async def stand_in(tokens: int) -> AsyncIterator[int]:
    """A stand-in in this process that streams so many tokens; gives its port."""
    answers = upstream.Answers("m")
    if tokens < upstream.TOKENS_PER_STREAM:
        answers.stream_events = answers.stream_events[: tokens + 1] + answers.stream_events[-1:]
    received: deque[upstream.Received] = deque(maxlen=upstream.REQUESTS_KEPT)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: upstream.Connection(answers, received), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def measured(tokens: int = upstream.TOKENS_PER_STREAM, **fields: object) -> load.Tally:
    async def measure() -> load.Tally:
        async with stand_in(tokens) as port:
            return await load.measure(load.Command(port=port, model="m", **fields))  # type: ignore[arg-type]

    return asyncio.run(measure())


def test_the_client_counts_requests_and_tokens() -> None:
    tally = measured(op="latency", requests=5, warm=1)
    assert (tally.completed, tally.errors, len(tally.latencies)) == (5, 0, 5)
    tally = measured(op="latency", requests=3, warm=0, stream=True, expect_tokens=32)
    assert (tally.completed, tally.tokens, tally.errors, len(tally.stalls)) == (3, 96, 0, 3)


def test_the_client_stops_at_its_deadline() -> None:
    tally = measured(op="rate", concurrency=2, seconds=0.05, warm=1)
    assert tally.errors == 0
    assert tally.completed > 0
    assert 0.04 < tally.measured_seconds < 1


def test_a_truncated_stream_is_an_error_and_not_a_completed_one() -> None:
    tally = measured(tokens=7, op="latency", requests=3, warm=0, stream=True, expect_tokens=32)
    assert (tally.completed, tally.errors) == (0, 3)
    assert "7 tokens instead of 32" in tally.first_error


def test_nobody_there_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        command = load.Command(op="latency", port=closed.getsockname()[1], model="m", requests=1)
        tally = asyncio.run(load.measure(command))
    assert tally.completed == 0
    assert tally.errors == 1
