"""`bin/bench tunnel`: what the way between two nodes costs.

Parts: `transports` (bulk and 16 KiB round trips of tunneld's QUIC and TLS over TCP, against plain TCP and against
TLS without us, two processes on loopback, one after another in each round) and `chat` (what a second node adds to a
chat). Targets: DESIGN §10.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import mesh
from tests.bench.children import BenchError, http_post
from tests.bench.figures import Figure, Target, figure_of_rounds, median, pairwise_differences, pairwise_ratios, skipped
from tests.bench.lineup import Say
from tests.bench.tunnel_end import KINDS, write_credentials

PARTS = ("transports", "chat")
ROUNDS = 5
CHATS = 200
CHAT_ROUNDS = 5
END_SECONDS = 60.0
POLL_SECONDS = 0.05
MODEL = "bench-model"
NAMES = {"plain": "plain TCP", "tls": "TLS without us", "tcp": "TLS over TCP", "quic": "QUIC"}

BULK_TARGET = Target(">=", 250)
ROUND_TRIP_TARGET = Target("<=", 0.15)
CHAT_ROWS = (("tunnel.chat.added", "ms"), ("tunnel.chat.local", "ms"), ("tunnel.chat.remote", "ms"))


def run(parts: Sequence[str], rounds: int | None, say: Say) -> list[Figure]:
    """All figures of the parts asked for. Raises: BenchError."""
    figures: list[Figure] = []
    if "transports" in parts:
        figures += transports(rounds or ROUNDS, say)
    if "chat" in parts:
        try:
            figures += chat(rounds or CHAT_ROUNDS, say)
        except mesh.NoNode as error:
            figures += [skipped(name, unit, str(error)) for name, unit in CHAT_ROWS]
    return figures


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = mesh.short_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- transports -------------------------------------------------------------------------------------------------------


def transports(rounds: int, say: Say) -> Iterator[Figure]:
    bulk: dict[str, list[float]] = {kind: [] for kind in KINDS}
    round_trip: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with _folder() as folder, contextlib.ExitStack() as stack:
        write_credentials(folder)
        ports = {kind: stack.enter_context(_serving(kind, folder)) for kind in KINDS}
        for number in range(rounds):
            for kind in KINDS:
                say(f"tunnel transports, round {number + 1} of {rounds}: {NAMES[kind]}")
                found = _measure(kind, folder, ports[kind])
                bulk[kind].append(found["bulk_mb_s"])
                round_trip[kind].append(found["round_trip_ms"])
    for kind in KINDS:
        best = kind == "tcp"
        yield figure_of_rounds(
            f"tunnel.{kind}.bulk", "MB/s", bulk[kind], BULK_TARGET if best else None, f"{NAMES[kind]}, loopback"
        )
        yield figure_of_rounds(
            f"tunnel.{kind}.round_trip", "ms", round_trip[kind], ROUND_TRIP_TARGET if best else None, "16 KiB, p50"
        )
    for kind, peer in (("tcp", "plain"), ("tcp", "tls"), ("quic", "tcp")):
        ratios = pairwise_ratios(bulk[kind], bulk[peer])
        why = f"of {NAMES[peer]} in the same round"
        yield figure_of_rounds(f"tunnel.{kind}.bulk_of_{peer}", "x", ratios, None, why)


@contextlib.contextmanager
def _serving(kind: str, folder: Path) -> Iterator[int]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        _command("serve", kind, folder), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.strip().isdigit():
            raise BenchError(f"the serving end of {NAMES[kind]} did not start")
        yield int(line)
    finally:
        process.kill()
        process.communicate()


def _measure(kind: str, folder: Path, port: int) -> dict[str, float]:
    try:
        command = [*_command("measure", kind, folder), str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=END_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{NAMES[kind]} was not measured within {END_SECONDS:g} s") from None
    if done.returncode or not done.stdout.strip():
        raise BenchError(f"{NAMES[kind]} cannot be measured: {done.stderr.strip()[-300:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _command(verb: str, kind: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.bench.tunnel_end", verb, kind, str(folder)]


# -- a chat through a second node -------------------------------------------------------------------------------------


def chat(rounds: int, say: Say) -> Iterator[Figure]:
    """One model on one node; the same chat asked there and through the other node, in turns."""
    with _folder() as first_home, _folder() as second_home:
        serving = mesh.serving_node(first_home, MODEL, "stand-in")
        (second_home / "mesh.toml").write_text("[models]\nfolders = []\n")
        asking = mesh.Node(second_home)
        try:
            say("tunnel chat: two nodes form a mesh")
            serving.up()
            serving.await_model(MODEL)
            token = serving.meshctl("invite").strip()
            asking.up()
            asking.meshctl("join", token)
            ports = (serving.api_port(), asking.api_port())
            _await_route(ports[1])
            local: list[float] = []
            remote: list[float] = []
            for number in range(rounds):
                say(f"tunnel chat, round {number + 1} of {rounds}")
                local.append(_chats(ports[0]))
                remote.append(_chats(ports[1]))
        finally:
            for node in (asking, serving):
                with contextlib.suppress(BenchError):
                    node.stop()
    added = pairwise_differences(remote, local)
    yield figure_of_rounds("tunnel.chat.added", "ms", added, None, "p50 through a second node, less the same without")
    yield figure_of_rounds("tunnel.chat.local", "ms", local, None, "p50 at the node that serves")
    yield figure_of_rounds("tunnel.chat.remote", "ms", remote, None, "p50 through the other node")


BODY = json.dumps({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}).encode()
JSON_TYPE = (("Content-Type", "application/json"),)


def _await_route(port: int) -> None:
    give_up = time.monotonic() + 30
    while http_post(port, "/v1/chat/completions", BODY, JSON_TYPE)[0] != 200:
        if time.monotonic() > give_up:
            raise mesh.NoNode("the second node never answered for the first one's model")
        time.sleep(POLL_SECONDS)


def _chats(port: int) -> float:
    """Median, milliseconds; a connection of its own for each."""
    seconds = []
    for _ in range(CHATS):
        began = time.perf_counter()
        status, _ = http_post(port, "/v1/chat/completions", BODY, JSON_TYPE)
        seconds.append(time.perf_counter() - began)
        if status != 200:
            raise BenchError(f"a chat was answered with {status}")
    return median(seconds) * 1000
