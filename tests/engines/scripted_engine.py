"""A stand-in for `llama-server` that does what a script says: load slowly, crash, hang, refuse to stop, stream.

It takes llama-server's command line and speaks its HTTP. Its reply is the words `w0 w1 w2 …`; a prompt that ends in
such words is continued where it stopped, so that an unbroken reply can be told from one joined wrongly. The script
is JSON, inline or a file's path, in `SCRIPTED_ENGINE`; `write_engine` makes an executable that carries its own.
`GET /scripted` tells counters, `POST /scripted` changes the script while it runs.

Called `whisper-server`, `sd-server`, `flm` or `ryzenai-server` it takes that program's command line, and nothing else,
and speaks its HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import httptools

from tests.engines.scripted_programs import PROGRAMS, strict_options


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the engine does. The defaults are a fast engine without faults; durations in seconds."""

    start_seconds: float = 0.0
    """Before it listens."""
    load_seconds: float = 0.0
    """`/health` and everything else answer 503 for so long."""
    stderr: str = ""
    """Said at the start."""
    exit_status: int | None = None
    """Ends with this status instead of listening; negative: by that signal."""
    exit_starts: int = 1_000_000
    """Only the first so many starts fail; counted in `starts_file`."""
    exit_loading: bool = False
    """`exit_status` happens after `load_seconds` instead of at once."""
    starts_file: str = ""
    """Gets one line with the pid per start."""
    alone_file: str = ""
    """Locked as long as it lives; a start that finds it locked by another engine adds a line. `{model}` in it is the
    model's name: then only engines of the same model may not meet."""
    tokens: int = 16
    """Words of a reply, unless `max_tokens` is smaller."""
    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    crash_after_tokens: int | None = None
    """SIGKILLs itself when a reply has so many words."""
    hang: str = ""
    """`accept`: no request is ever answered; `generate`: health is fine, nothing else answers."""
    hang_after_tokens: int | None = None
    """Replies stop there, connections stay open."""
    cut_after_tokens: int | None = None
    """The connection closes there, the engine lives on."""
    crash_after_cut_seconds: float | None = None
    """SIGKILLs itself so long after such a cut."""
    health_status: int = 200
    """Of the health route once it is ready; whisper-server of old has none: 404."""
    ignore_sigterm: bool = False
    status: int = 200
    """Of inference requests; anything else comes with an error object."""
    record_file: str = ""
    """Gets one JSON line per request: method, target, headers in order, body, seconds."""


@dataclass
class Counters:
    requests: int = 0
    active: int = 0
    peak: int = 0
    """Most generations at one time; more than `-np` wait, as in llama-server."""
    finished: int = 0
    cancelled: int = 0
    """Generations whose client went away."""


INFERENCE = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"}
PUBLIC = {"/health", "/v1/health", "/v1/models", "/models", "/scripted"}
_LAST_WORD = re.compile(r"w(\d+)\s*$")


def write_engine(path: Path, script: Script | None = None) -> Path:
    """An executable stand-in with its own script; name it `llama-server`, or as one of `PROGRAMS`."""
    text = json.dumps(asdict(script or Script()))
    here = Path(__file__).resolve()
    program = f"{shlex.quote(sys.executable)} {shlex.quote(str(here))}"
    given = {"PYTHONPATH": str(here.parents[2]), "SCRIPTED_ENGINE": text, "SCRIPTED_PROGRAM": path.name}
    environ = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    path.write_text(f'#!/bin/sh\n{environ} exec {program} "$@"\n')
    path.chmod(0o755)
    return path


class Engine:
    def __init__(self, script: Script, options: dict[str, str], key: str) -> None:
        self.script = script
        self.counters = Counters()
        self.alias = options.get("--alias", options.get("--model", "scripted"))
        self.model = options.get("--model", "")
        self.program = PROGRAMS.get(os.environ.get("SCRIPTED_PROGRAM", ""))
        self.health = self.program.health if self.program else "/health"
        self.inference = set(self.program.inference) if self.program else INFERENCE
        self.form = options.get("--inference-path", "/v1/audio/transcriptions")
        if "--inference-path" in options:
            self.inference = {self.form}
        self.tag = options.get("flm tag", "")
        self.parallel = int(options.get("--parallel", "4"))
        self.key = key
        self.ready_at = time.monotonic() + script.load_seconds
        self.turns = asyncio.Semaphore(self.parallel)

    def record(self, request: Request) -> None:
        if not self.script.record_file:
            return
        line = {
            "method": request.method,
            "target": request.target,
            "headers": [[name, value] for name, value in request.headers],
            "body": request.body.decode("latin-1"),
            "seconds": time.monotonic(),
        }
        with open(self.script.record_file, "a") as file:
            file.write(json.dumps(line) + "\n")

    async def answer(self, request: Request, connection: Connection) -> None:
        path = request.target.partition("?")[0]
        if path == "/scripted":
            if request.method == "POST":
                self.script = replace(self.script, **json.loads(request.body))
            connection.reply(200, {**asdict(self.counters), "pid": os.getpid(), "parallel": self.parallel})
            return
        self.record(request)
        if self.script.hang == "accept" or (self.script.hang == "generate" and path not in PUBLIC):
            await asyncio.Event().wait()
        if path not in PUBLIC and self.key and request.header("authorization") != f"Bearer {self.key}":
            connection.error(401, "Invalid API Key", "authentication_error")
        elif time.monotonic() < self.ready_at:
            connection.error(503, "Loading model", "unavailable_error")
        elif path == self.health and self.script.health_status == 200:
            connection.reply(200, {"status": "ok", "models": [], "data": []})
        elif self.program and path not in self.inference:
            connection.error(404, "not found", "not_found_error")
        elif path in ("/health", "/v1/health"):
            connection.reply(200, {"status": "ok"})
        elif path == "/props":
            connection.reply(200, {"total_slots": self.parallel, "model_path": self.model})
        elif path == "/slots":
            slots = [{"id": n, "is_processing": n < self.counters.active} for n in range(self.parallel)]
            connection.reply(200, slots)
        elif path in ("/v1/models", "/models"):
            connection.reply(200, {"object": "list", "data": [{"id": self.alias, "object": "model"}]})
        elif path not in self.inference:
            connection.error(404, "File Not Found", "not_found_error")
        elif request.method != "POST":
            connection.error(405, "Method Not Allowed", "invalid_request_error")
        else:
            await self.infer(path, request, connection)

    async def infer(self, path: str, request: Request, connection: Connection) -> None:
        body: dict[str, Any] = {}
        try:
            if path != self.form:
                body = json.loads(request.body)
            elif b'name="file"' not in request.body or b"RIFF" not in request.body:
                raise ValueError("no sound in the form")
            if self.tag and body.get("model") != self.tag:
                raise ValueError(f"flm serves {self.tag}")
            if path.startswith("/v1/images/") and not body.get("prompt"):
                raise ValueError("prompt required")
        except ValueError as error:
            connection.error(400, str(error), "invalid_request_error")
            return
        self.counters.requests += 1
        async with self.turns:
            self.counters.active += 1
            self.counters.peak = max(self.counters.peak, self.counters.active)
            try:
                if self.script.first_token_seconds:
                    await asyncio.sleep(self.script.first_token_seconds)
                if self.script.status != 200:
                    connection.error(self.script.status, "scripted error", "server_error")
                elif path == "/v1/embeddings":
                    inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
                    data = [{"index": n, "embedding": [0.1, 0.2, 0.3]} for n in range(len(inputs))]
                    connection.reply(200, {"object": "list", "model": self.alias, "data": data})
                elif path == self.form:
                    words = " ".join(f"w{number}" for number in range(self.script.tokens))
                    connection.reply(200, {"text": words})
                elif path.startswith("/v1/images/"):
                    image = base64.b64encode(b"\x89PNG\r\n\x1a\n" + body["prompt"].encode()).decode()
                    connection.reply(200, {"created": 1, "data": [{"b64_json": image}], "output_format": "png"})
                elif path == "/v1/rerank":
                    scores = [{"index": n, "relevance_score": 1.0 - n} for n in range(len(body["documents"]))]
                    connection.reply(200, {"object": "list", "model": self.alias, "results": scores})
                else:
                    await self.generate(path == "/v1/chat/completions", body, connection)
                self.counters.finished += 1
            except asyncio.CancelledError:
                self.counters.cancelled += 1
                raise
            finally:
                self.counters.active -= 1

    async def generate(self, chat: bool, body: dict[str, Any], connection: Connection) -> None:
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        last = _LAST_WORD.search(prompt if isinstance(prompt, str) else "")
        first = int(last[1]) + 1 if last else 0
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or self.script.tokens
        count = max(0, min(int(limit), self.script.tokens - first))
        reason = "length" if limit < self.script.tokens - first else "stop"
        usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": count + 3}
        stream = bool(body.get("stream"))
        if stream:
            connection.begin_stream()
            if chat:
                connection.event(self.chunk(chat, {"role": "assistant", "content": None}, None))
        words = []
        for number in range(count):
            if self.script.token_seconds:
                await asyncio.sleep(self.script.token_seconds)
            elif number % 8 == 0:
                await asyncio.sleep(0)
            await self.fault(number, connection)
            words.append(f"w{first + number} ")
            if stream:
                connection.event(self.chunk(chat, {"content": words[-1]}, None))
        await self.fault(count, connection)
        if not stream:
            text = "".join(words)
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            kind = "chat.completion" if chat else "text_completion"
            reply = {"id": "scripted", "object": kind, "created": 1, "model": self.alias}
            connection.reply(200, {**reply, "choices": [choice], "usage": usage})
            return
        connection.event(self.chunk(chat, {}, reason))
        if body.get("stream_options", {}).get("include_usage"):
            connection.event({**self.chunk(chat, {}, None), "choices": [], "usage": usage})
        connection.event("[DONE]")
        connection.end_stream()

    async def fault(self, words: int, connection: Connection) -> None:
        if self.script.crash_after_tokens == words:
            # Let what was written so far leave the process first.
            while connection.transport.get_write_buffer_size():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.script.cut_after_tokens == words:
            connection.transport.close()
            if self.script.crash_after_cut_seconds is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(self.script.crash_after_cut_seconds, os.kill, os.getpid(), signal.SIGKILL)
        if self.script.hang_after_tokens == words:
            await asyncio.Event().wait()

    def chunk(self, chat: bool, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"delta": delta} if chat else {"text": delta.get("content") or ""}
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {
            "choices": [{"index": 0, "finish_reason": reason, **choice}],
            "created": 1,
            "id": "scripted",
            "model": self.alias,
            "object": kind,
        }


class Request:
    def __init__(self) -> None:
        self.method = ""
        self.target = ""
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.keep_alive = True

    def header(self, name: str) -> str:
        return next((value for known, value in self.headers if known.lower() == name), "")


class Connection(asyncio.Protocol):
    """One client. Pipelined requests are answered in order."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.request = Request()
        self.waiting: list[Request] = []
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.waiting.clear()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.error(400, "bad request", "invalid_request_error")
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self.request.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.request.headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if self.request.header("expect") == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.request.body += body

    def on_message_complete(self) -> None:
        self.request.method = self.parser.get_method().decode()
        self.request.keep_alive = self.parser.should_keep_alive()
        self.waiting.append(self.request)
        self.request = Request()
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self.answer_all())

    async def answer_all(self) -> None:
        while self.waiting:
            request = self.waiting.pop(0)
            await self.engine.answer(request, self)
            if not request.keep_alive:
                self.transport.close()
        self.task = None

    def reply(self, status: int, body: object) -> None:
        payload = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Scripted\r\nContent-Type: application/json; charset=utf-8\r\n"
        self.transport.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)

    def error(self, status: int, text: str, kind: str) -> None:
        self.reply(status, {"error": {"code": status, "message": text, "type": kind}})

    def begin_stream(self) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.transport.write(head.encode())

    def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        payload = f"data: {text}\n\n".encode()
        self.transport.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")

    def end_stream(self) -> None:
        self.transport.write(b"0\r\n\r\n")


def _options(argv: list[str]) -> dict[str, str]:
    program = PROGRAMS.get(os.environ.get("SCRIPTED_PROGRAM", ""))
    if program is not None:
        return strict_options(program, argv)
    aliases = {"-m": "--model", "-np": "--parallel", "-a": "--alias", "-c": "--ctx-size"}
    options = {}
    for index, argument in enumerate(argv):
        if argument.startswith("-"):
            following = argv[index + 1] if index + 1 < len(argv) else ""
            options[aliases.get(argument, argument)] = following
    return options


async def _run(script: Script, options: dict[str, str]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        if script.ignore_sigterm:
            signal.signal(number, signal.SIG_IGN)
        else:
            loop.add_signal_handler(number, os._exit, 0)
    await asyncio.sleep(script.start_seconds)
    engine = Engine(script, options, os.environ.get("LLAMA_API_KEY", ""))
    server = await loop.create_server(
        lambda: Connection(engine), options.get("--host", "127.0.0.1"), int(options["--port"]), backlog=1024
    )
    if script.exit_status is not None:
        await asyncio.sleep(script.load_seconds)
        _end(script.exit_status)
    await server.serve_forever()


def _end(status: int) -> None:
    sys.stderr.flush()
    if status < 0:
        os.kill(os.getpid(), -status)
        signal.pause()
    os._exit(status)


def main() -> None:
    if "--version" in sys.argv:
        print("version: 1 (scripted)")
        return
    if "--help" in sys.argv:
        print("--model --host --port --alias --parallel --ctx-size --cache-ram --no-webui --slots --metrics --jinja")
        return
    text = os.environ.get("SCRIPTED_ENGINE", "{}")
    raw = json.loads(text if text.startswith("{") else Path(text).read_text())
    unknown = set(raw) - {field.name for field in fields(Script)}
    if unknown:
        sys.exit(f"unknown keys in the script: {sorted(unknown)}")
    script = Script(**raw)
    starts = 1
    if script.starts_file:
        with open(script.starts_file, "a+") as file:
            file.write(f"{os.getpid()}\n")
            file.seek(0)
            starts = len(file.readlines())
    if script.alone_file:
        # Open until the process ends, and the lock with it.
        alone = script.alone_file.replace("{model}", _options(sys.argv[1:]).get("--alias", "model"))
        lock = os.open(alone, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.write(lock, f"{os.getpid()}\n".encode())
    if script.stderr:
        print(script.stderr, file=sys.stderr, flush=True)
    if starts > script.exit_starts:
        script = replace(script, exit_status=None)
    if script.exit_status is not None and not script.exit_loading:
        _end(script.exit_status)
    try:
        import uvloop

        uvloop.run(_run(script, _options(sys.argv[1:])))
    except ImportError:
        asyncio.run(_run(script, _options(sys.argv[1:])))
    except OSError as error:
        sys.exit(f"couldn't bind HTTP server socket: {error}")


if __name__ == "__main__":
    main()
