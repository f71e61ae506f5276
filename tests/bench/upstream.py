"""A stand-in for llama-server: answers chat requests at once with canned bytes, and remembers what it was sent.

Fast enough (uvloop, httptools, no framework) that what a proxy adds is visible next to it. It runs as a program of
its own with llama-server's command line, so launcherd can start it as an engine:

    python upstream.py -m MODEL.gguf --host 127.0.0.1 --port 0 -np 64 [any other llama-server option, ignored]

A streaming answer is 32 content events and `[DONE]`, chunked, with one write per event and TCP_NODELAY on, as
llama-server sends them. `GET /_received?last=N` gives the last N POST requests (64 are kept) as JSON: method, path,
headers in order, body in base64. Prints `ready PORT` once it listens. Requests are not pipelined by any client here,
so it doesn't queue them. With `LLAMA_API_KEY` set, `/props` wants that key, because launcherd tells its engines from
strangers that way; everything else is answered without, so that proxies which don't know the key can be compared.

This file imports nothing of meshd: it must run from anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import itertools
import json
import os
import signal
import socket
import sys
from typing import cast

import httptools
import uvloop

TOKENS_PER_STREAM = 32
REQUESTS_KEPT = 64


def _response(status: str, body: bytes, content_type: bytes = b"application/json; charset=utf-8") -> bytes:
    return (
        b"HTTP/1.1 %s\r\nServer: stand-in\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: keep-alive\r\n\r\n"
        % (status.encode(), content_type, len(body))
    ) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class Answers:
    """The canned bytes, made once for one model name; and the key `/props` wants, if any."""

    def __init__(self, model: str, key: bytes = b"") -> None:
        self.key = key
        common = {"id": "chatcmpl-standin", "created": 1700000000, "model": model}
        message = {"role": "assistant", "content": "a"}
        chat = {
            **common,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
        }
        completion = {
            **common,
            "object": "text_completion",
            "content": "a",
            "stop": True,
            "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}],
        }
        listed = {"id": model, "object": "model", "created": 1700000000, "owned_by": "bench"}
        self.chat = _response("200 OK", _json(chat))
        self.completion = _response("200 OK", _json(completion))
        self.models = _response("200 OK", _json({"object": "list", "data": [listed]}))
        self.health = _response("200 OK", b'{"status":"ok"}')
        self.props = _response(
            "200 OK", _json({"model_path": model, "total_slots": 64, "default_generation_settings": {"n_ctx": 4096}})
        )
        self.slots = _response("200 OK", b"[]")
        self.refused = _response("401 Unauthorized", b'{"error":{"code":401,"message":"Invalid API Key"}}')
        self.missing = _response("404 Not Found", b'{"error":{"code":404,"message":"not found"}}')
        self.stream_head = (
            b"HTTP/1.1 200 OK\r\nServer: stand-in\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n"
        )
        events = [self._event(common, {"role": "assistant", "content": None}, None)]
        events += [self._event(common, {"content": f" t{n}"}, None) for n in range(TOKENS_PER_STREAM)]
        events.append(self._event(common, {}, "stop"))
        self.stream_events = [_chunk(e) for e in events] + [_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]

    @staticmethod
    def _event(common: dict[str, object], delta: dict[str, object], finish: str | None) -> bytes:
        choice = {"index": 0, "finish_reason": finish, "delta": delta}
        return b"data: " + _json({**common, "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


Received = tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]


class Connection(asyncio.Protocol):
    """One client connection: a request is answered when its last byte is in."""

    def __init__(self, answers: Answers, received: collections.deque[Received]) -> None:
        self._answers = answers
        self._received = received
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.close()

    def on_message_begin(self) -> None:
        self._headers = []
        self._parts = []

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        if name.lower() == b"expect" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        transport = self._transport
        if transport is None:
            return
        answers, path = self._answers, self._path
        if self._parser.get_method() != b"POST":
            transport.write(self._answer_get(path))
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._received.append((b"POST", path, self._headers, body))
        if b'"stream":true' in body or b'"stream": true' in body:
            transport.write(answers.stream_head)
            self._send_event(0)
        elif path.endswith(b"/chat/completions"):
            transport.write(answers.chat)
        else:
            transport.write(answers.completion)

    def _answer_get(self, url: bytes) -> bytes:
        answers = self._answers
        path, _, query = url.partition(b"?")
        if path == b"/_received":
            last = int(query.removeprefix(b"last=") or REQUESTS_KEPT)
            return _response("200 OK", _json([_readable(r) for r in list(self._received)[-last:]]))
        if path == b"/props" and answers.key and (b"Authorization", b"Bearer " + answers.key) not in self._titled():
            return answers.refused
        known = {
            b"/health": answers.health,
            b"/v1/health": answers.health,
            b"/v1/models": answers.models,
            b"/models": answers.models,
            b"/props": answers.props,
            b"/slots": answers.slots,
        }
        return known.get(path, answers.missing)

    def _titled(self) -> list[tuple[bytes, bytes]]:
        return [(name.title(), value) for name, value in self._headers]

    def _send_event(self, number: int) -> None:
        if self._transport is None:
            return
        events = self._answers.stream_events
        self._transport.write(events[number])
        if number + 1 < len(events):
            self._loop.call_soon(self._send_event, number + 1)


def _readable(received: Received) -> dict[str, object]:
    method, path, headers, body = received
    return {
        "method": method.decode("latin-1"),
        "path": path.decode("latin-1"),
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers],
        "body_base64": base64.b64encode(body).decode("ascii"),
    }


async def serve(host: str, port: int, model: str) -> None:
    """Listens until SIGTERM or SIGINT; a port of 0 takes a free one."""
    loop = asyncio.get_running_loop()
    answers = Answers(model, os.environ.get("LLAMA_API_KEY", "").encode())
    received: collections.deque[Received] = collections.deque(maxlen=REQUESTS_KEPT)
    server = await loop.create_server(lambda: Connection(answers, received), host, port, backlog=1024)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()
    server.close()


def read_options(argv: list[str]) -> dict[str, str]:
    """The few options that matter, by long name.

    By hand: argparse would read llama-server's `-mg 0` as `-m g`.
    """
    long_names = {"-m": "model", "-a": "alias"} | {f"--{name}": name for name in ("model", "alias", "host", "port")}
    options: dict[str, str] = {}
    for word, following in itertools.pairwise(argv):
        if word in long_names:
            options[long_names[word]] = following
    return options


def main(argv: list[str]) -> None:
    if "--version" in argv:
        print("version: 1 (stand-in)")
        return
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    options = read_options(argv)
    name = options.get("alias") or os.path.basename(options.get("model", "stand-in")).removesuffix(".gguf")
    uvloop.run(serve(options.get("host", "127.0.0.1"), int(options.get("port", "8080")), name))


if __name__ == "__main__":
    main(sys.argv[1:])
