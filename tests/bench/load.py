"""The load client: a process of its own that takes one JSON command per line and answers with one JSON line.

    {"op": "latency", "port": 8080, "model": "m", "requests": 200, ...}   one connection, one request after another
    {"op": "rate", "port": 8080, "model": "m", "concurrency": 16, "seconds": 1.0, "stream": false, ...}

What makes it honest: raw uvloop protocols and httptools, so the client is the cheapest part; TCP_NODELAY;
keep-alive connections opened and warmed before the clock starts; every answer is read to its end and checked (status
200; a stream needs `[DONE]` and, where the number is known, exactly as many tokens); a wrong answer is counted as an
error and never as a fast one. Latency runs from the write of the request to the last byte of the answer. Every
command has a time limit.

This file imports nothing of meshd.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import uvloop

STALLS_KEPT = 20_000


@dataclass(frozen=True, kw_only=True)
class Command:
    """One measurement. `seconds` and `limit_seconds` are wall time, `warm` is requests per connection."""

    op: str
    port: int
    model: str
    host: str = "127.0.0.1"
    path: str = "/v1/chat/completions"
    headers: dict[str, str] = field(default_factory=dict)
    prompt: str = "Say one word."
    stream: bool = False
    max_tokens: int = 1
    expect_tokens: int | None = None
    requests: int = 200
    concurrency: int = 1
    seconds: float = 1.0
    warm: int = 10
    limit_seconds: float = 30.0


@dataclass(kw_only=True)
class Tally:
    """What a measurement saw. Times in seconds; `stalls` holds each stream's longest wait, the first included."""

    latencies: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    completed: int = 0
    tokens: int = 0
    errors: int = 0
    reconnects: int = 0
    first_error: str = ""
    measured_seconds: float = 0.0

    def fail(self, reason: str) -> None:
        self.errors += 1
        self.first_error = self.first_error or reason[:300]


def request_bytes(command: Command) -> bytes:
    """The whole HTTP request, head and body, as every client of an OpenAI API would send it."""
    body = {
        "model": command.model,
        "messages": [{"role": "user", "content": command.prompt}],
        "max_tokens": command.max_tokens,
        "temperature": 0,
        "stream": command.stream,
    }
    payload = json.dumps(body, separators=(",", ":")).encode()
    lines = [
        f"POST {command.path} HTTP/1.1",
        f"Host: {command.host}:{command.port}",
        "User-Agent: meshd-bench",
        "Accept: */*",
        "Content-Type: application/json",
        *(f"{name}: {value}" for name, value in command.headers.items()),
        f"Content-Length: {len(payload)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + payload


def count_tokens(stream: bytes) -> int:
    """Content events in an SSE body, whatever the spacing of the JSON."""
    return stream.count(b'"content":"') + stream.count(b'"content": "')


class Run:
    """State that all connections of one command share."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.request = request_bytes(command)
        self.tally = Tally()
        self.deadline = float("inf")
        self.measuring = False
        self.cut_at = float("inf")
        self.finished = asyncio.Event()
        self.waiting = 0
        self.clients: list[Client] = []

    def cut(self) -> None:
        """At the deadline: streams still running count the tokens they have, and nothing later counts."""
        self.measuring = False
        self.cut_at = time.perf_counter()
        self.tally.tokens += sum(client.tokens_so_far() for client in self.clients)

    def one_done(self) -> None:
        self.waiting -= 1
        if self.waiting <= 0:
            self.finished.set()


class Client(asyncio.Protocol):
    """One keep-alive connection that sends its next request as soon as the answer is complete.

    It opens a new connection where the server closes the old one between two requests, as llama-server does after
    every stream, and sends a request once more that met a connection just being closed; both count as `reconnects`
    and their time counts as the request's.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._left = 0
        self._idle = True
        self._complete = False
        self._keep_alive = True
        self._reused = False
        self._answering = False
        self._dropped = 0
        self._connecting: asyncio.Task[None] | None = None
        self._sent = 0.0
        self._last_read = 0.0
        self._longest = 0.0
        self._streaming = run.command.stream

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        self._reused = False
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._dropped:
            self._dropped -= 1
            return
        self._transport = None
        if self._idle:
            return
        if self._reused and not self._answering:
            self._connect()
        else:
            self._run.tally.fail(f"connection lost before the answer was complete: {exc}")
            self._next()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._answering = True
        if self._streaming:
            waited = now - self._last_read
            self._last_read = now
            if waited > self._longest:
                self._longest = waited
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._run.tally.fail(f"not HTTP: {error}")
            self._stop()
            return
        if self._complete:
            self._answered(now)

    # -- httptools

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()

    # -- driving

    async def connect(self) -> None:
        """Raises: OSError."""
        command = self._run.command
        await asyncio.get_running_loop().create_connection(lambda: self, command.host, command.port)

    def start(self, requests: int) -> None:
        """Sends up to `requests` requests, one after another, or until the run's deadline."""
        self._left = requests
        self._run.waiting += 1
        self._idle = False
        self._next()

    def tokens_so_far(self) -> int:
        """Tokens of the stream that is being received now."""
        return 0 if self._idle or not self._streaming else count_tokens(b"".join(self._parts))

    def close(self) -> None:
        self._idle = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> None:
        if self._left <= 0 or time.perf_counter() >= self._run.deadline:
            self._stop()
            return
        self._left -= 1
        self._complete = False
        self._answering = False
        self._parts = []
        self._longest = 0.0
        self._sent = self._last_read = time.perf_counter()
        if self._transport is None:
            self._connect()
        else:
            self._transport.write(self._run.request)

    def _connect(self) -> None:
        self._run.tally.reconnects += 1
        self._connecting = asyncio.get_running_loop().create_task(self._connect_and_send())

    async def _connect_and_send(self) -> None:
        try:
            await self.connect()
        except OSError as error:
            self._run.tally.fail(f"cannot connect: {error}")
            self._stop()
            return
        if self._transport is not None:
            self._transport.write(self._run.request)

    def _answered(self, now: float) -> None:
        run, tally = self._run, self._run.tally
        self._reused = True
        fault, tokens = self._judge()
        if fault:
            tally.fail(fault)
        elif run.measuring:
            tally.completed += 1
            tally.tokens += tokens
            tally.latencies.append(now - self._sent)
            if self._streaming and len(tally.stalls) < STALLS_KEPT:
                tally.stalls.append(self._longest)
        if not self._keep_alive and self._transport is not None:
            self._dropped += 1
            self._transport.abort()
            self._transport = None
        self._next()

    def _judge(self) -> tuple[str, int]:
        """What is wrong with the answer, or nothing, and the tokens of a stream."""
        status, body = self._parser.get_status_code(), b"".join(self._parts)
        if status != 200:
            return f"status {status}: {body[:200]!r}", 0
        if not self._streaming:
            return ("", 0) if body else ("an empty answer", 0)
        tokens, expected = count_tokens(body), self._run.command.expect_tokens
        if b"[DONE]" not in body:
            return "stream without [DONE]", tokens
        if expected is not None and tokens != expected:
            return f"stream with {tokens} tokens instead of {expected}", tokens
        return "", tokens

    def _stop(self) -> None:
        if not self._idle:
            self._idle = True
            self._run.one_done()


async def measure(command: Command) -> Tally:
    """Connects, warms, measures. A run that outlasts `limit_seconds` returns what it has, with an error."""
    run = Run(command)
    clients = run.clients
    try:
        async with asyncio.timeout(command.limit_seconds):
            for _ in range(command.concurrency if command.op == "rate" else 1):
                client = Client(run)
                clients.append(client)
                await client.connect()
            if command.warm:
                for client in clients:
                    client.start(command.warm)
                await run.finished.wait()
                run.finished.clear()
            await _measured(run)
    except (OSError, TimeoutError) as error:
        run.tally.fail(f"{type(error).__name__}: {error}")
    finally:
        for client in clients:
            client.close()
    return run.tally


async def _measured(run: Run) -> None:
    command = run.command
    started = time.perf_counter()
    run.measuring = True
    if command.op == "rate":
        run.deadline = started + command.seconds
        asyncio.get_running_loop().call_later(command.seconds, run.cut)
    for client in run.clients:
        client.start(command.requests if command.op == "latency" else sys.maxsize)
    await run.finished.wait()
    run.tally.measured_seconds = min(time.perf_counter(), run.cut_at) - started


def summary(tally: Tally, *, keep_latencies: bool) -> dict[str, object]:
    """What goes back: small, so that a line is one write. Times in microseconds."""
    answer: dict[str, object] = {
        "completed": tally.completed,
        "tokens": tally.tokens,
        "errors": tally.errors,
        "first_error": tally.first_error,
        "reconnects": tally.reconnects,
        "measured_seconds": tally.measured_seconds,
        "latency_us": quantiles(tally.latencies),
        "stall_us": quantiles(tally.stalls),
    }
    if keep_latencies:
        answer["latencies_us"] = [round(latency * 1e6, 1) for latency in tally.latencies]
    return answer


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p99 and maximum in microseconds, by nearest rank; empty for no values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    ranks = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {name: round(ordered[rank] * 1e6, 1) for name, rank in ranks.items()}


def main() -> None:
    gc.disable()
    for line in sys.stdin:
        fields: dict[str, Any] = json.loads(line)
        command = Command(**fields)
        tally = uvloop.run(measure(command))
        print(json.dumps(summary(tally, keep_latencies=command.op == "latency")), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
