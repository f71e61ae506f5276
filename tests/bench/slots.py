"""`bin/bench slots`: how fast a node answers while a load waits behind a long generation.

One place for llms. Model *a* generates for a minute; a request for *b* waits until it has finished. Meanwhile, one
after the other: `/live`, `/health` of both kinds, the model list, a request to an embedding model that is loaded, and
the cancellation of a request that waits for *c*, from its client's disconnect to launcherd's word that nobody waits
any more. Target: DESIGN §7 (nothing waits or stops under a lock); TRAPS 19.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared import codec
from shared.io.bus import Mirror
from shared.io.drive import Tasks
from shared.messages.models import SlotChanged
from shared.paths import NodePaths
from tests.bench import mesh
from tests.bench.children import BenchError
from tests.bench.figures import Figure, Target, percentile, skipped
from tests.bench.lineup import Say
from tests.engines.scripted_engine import Script, write_engine

PARTS = ("wait",)
GENERATION_SECONDS = 60.0
TOKEN_SECONDS = 0.1
LLMS = ("busy", "waiting", "cancelled")
EMBEDDING = "loaded"
PAUSE_SECONDS = 0.01
"""Between two questions, so that the client takes no processor time from the node that is measured."""
STATE_SECONDS = 20.0
TARGET = Target("<=", 50)
KINDS = ("live", "health", "api_health", "models", "embedding", "cancellation")


@dataclass
class Waited:
    """What was seen. Seconds by what was asked; the ends of the generation and of the request that waited for it."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    generated: str = ""
    answered: str = ""
    generated_at: float = 0.0
    answered_at: float = 0.0
    reason: str = ""
    """Why the load waited in the end, in the words of its slot."""


def run(parts: Sequence[str], say: Say) -> list[Figure]:
    """All figures of the parts asked for. Raises: BenchError."""
    if "wait" not in parts:
        return []
    say(f"slots wait: a load behind a generation of {GENERATION_SECONDS:g} s")
    folder = mesh.short_folder()
    try:
        with waiting_node(folder, GENERATION_SECONDS) as node:
            waited = asyncio.run(measure(folder, node.api_port(), GENERATION_SECONDS))
    except mesh.NoNode as error:
        return [skipped(f"slots.{kind}.max", "ms", str(error), TARGET) for kind in KINDS]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures(waited)


def figures(waited: Waited) -> list[Figure]:
    """p99 without a target, and the maximum, of each kind in ms."""
    found: list[Figure] = []
    for kind, seconds in waited.seconds.items():
        if not seconds:
            found.append(skipped(f"slots.{kind}.max", "ms", "the generation ended before it was asked", TARGET))
            continue
        values = [value * 1000 for value in seconds]
        why = f"{len(values)} while a load waited"
        found.append(Figure(name=f"slots.{kind}.p99", unit="ms", value=percentile(values, 99)))
        found.append(Figure(name=f"slots.{kind}.max", unit="ms", value=max(values), target=TARGET, why=why))
    return found


@contextlib.contextmanager
def waiting_node(home: Path, generation_seconds: float) -> Iterator[mesh.Node]:
    """A running node with one place for llms, and engines that generate for so long. Raises: NoNode."""
    folder = home / "bench-models"
    folder.mkdir(parents=True)
    try:
        from tests.engines.tiny_models import write_embedding, write_llm
    except ImportError as error:
        raise mesh.NoNode(f"no models: {error.name} is not installed") from error
    for seed, name in enumerate(LLMS, start=1):
        write_llm(folder / f"{name}.gguf", name=name, seed=seed)
    write_embedding(folder / f"{EMBEDDING}.gguf", name=EMBEDDING)
    tokens = round(generation_seconds / TOKEN_SECONDS)
    engine = write_engine(home / "llama-server", Script(tokens=tokens, token_seconds=TOKEN_SECONDS))
    (home / "mesh.toml").write_text(
        f"[models]\nserve = [{json.dumps(LLMS[0])}]\nfolders = [{json.dumps(str(folder))}]\nmax_loaded_models = [1]\n"
        f"[engine]\npath = {json.dumps(str(engine))}\n"
    )
    node = mesh.Node(home)
    node.up()
    try:
        yield node
    finally:
        node.stop()


# -- the measurement ---------------------------------------------------------------------------------------------


class Slots:
    """The newest slot of each model, as launcherd publishes it."""

    def __init__(self, home: Path, tasks: Tasks) -> None:
        self._slots: dict[str, SlotChanged] = {}
        self._changed = asyncio.Event()
        mirror = Mirror("launcherd", NodePaths(home), self._take_all, self._take)
        mirror.start(tasks)
        self.close = mirror.close

    def _take_all(self, messages: list[codec.Message]) -> None:
        self._slots.clear()
        for message in messages:
            self._take(message)

    def _take(self, message: codec.Message) -> None:
        if isinstance(message, SlotChanged):
            self._slots[message.model] = message
            self._changed.set()

    def reason(self, model: str) -> str:
        slot = self._slots.get(model)
        return slot.reason if slot is not None else ""

    async def until(self, model: str, state: str, *, waiting: int = 0) -> None:
        """Until the model is in that state, and so many requests wait. Raises: BenchError when it is not in time."""
        try:
            async with asyncio.timeout(STATE_SECONDS):
                while (slot := self._slots.get(model)) is None or slot.state != state or slot.waiting < waiting:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            known = self._slots.get(model)
            found = f"{known.state}, {known.waiting} wait: {known.reason}" if known is not None else "no slot"
            raise BenchError(f"{model} is not {state} ({found})") from error


async def measure(home: Path, port: int, generation_seconds: float) -> Waited:
    """Asks until shortly before the generation ends; then both it and the request behind it must end well.

    Raises: BenchError.
    """
    waited, tasks = Waited(), Tasks()
    busy, waiting, cancelled = LLMS
    slots = Slots(home, tasks)
    try:
        async with asyncio.timeout(generation_seconds * 2 + 4 * STATE_SECONDS):
            await ask(port, "POST", "/v1/embeddings", {"model": EMBEDDING, "input": "hello"})
            await slots.until(busy, "ready")
            generation = asyncio.create_task(_generate(port, busy, waited))
            end = time.monotonic() + generation_seconds - min(2.0, generation_seconds / 4)
            behind = asyncio.create_task(_ask_behind(port, waiting, waited))
            await slots.until(waiting, "queued", waiting=1)
            while time.monotonic() < end:
                for kind in KINDS:
                    if kind == "cancellation":
                        seconds = await _cancel(port, cancelled, slots)
                    else:
                        seconds = await _timed(port, kind)
                    waited.seconds[kind].append(seconds)
                    waited.reason = slots.reason(waiting)
                    await asyncio.sleep(PAUSE_SECONDS)
            if generation.done() or behind.done():
                raise BenchError("the generation ended before its time: nothing waited behind it")
            await asyncio.gather(generation, behind)
    except (OSError, EOFError, ValueError, TimeoutError) as error:
        raise BenchError(f"{type(error).__name__}: {error}") from error
    finally:
        slots.close()
        await tasks.cancel()
    return waited


async def _timed(port: int, kind: str) -> float:
    """Seconds of one request on a connection of its own, opening it included."""
    began = time.perf_counter()
    match kind:
        case "embedding":
            await ask(port, "POST", "/v1/embeddings", {"model": EMBEDDING, "input": "hello"})
        case "models":
            await ask(port, "GET", "/v1/models")
        case "api_health":
            await ask(port, "GET", "/api/v1/health")
        case _:
            await ask(port, "GET", f"/{kind}")
    return time.perf_counter() - began


async def _cancel(port: int, model: str, slots: Slots) -> float:
    """Seconds from the disconnect of the only client that waits for the model until its load is dropped."""
    async with _sent(port, "POST", "/v1/chat/completions", _chat(model, 1)) as (_, writer):
        await slots.until(model, "queued", waiting=1)
        began = time.perf_counter()
        writer.transport.abort()
        await slots.until(model, "unloaded")
        return time.perf_counter() - began


async def _generate(port: int, model: str, waited: Waited) -> None:
    body = {**_chat(model, 0), "stream": True}
    whole = await ask(port, "POST", "/v1/chat/completions", body)
    waited.generated_at = time.monotonic()
    for line in whole.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                waited.generated += choice["delta"].get("content") or ""
    if "data: [DONE]" not in whole.decode():
        raise BenchError(f"the generation was cut: {whole[-200:]!r}")


async def _ask_behind(port: int, model: str, waited: Waited) -> None:
    reply = await ask(port, "POST", "/v1/chat/completions", _chat(model, 2))
    waited.answered_at = time.monotonic()
    waited.answered = json.loads(reply)["choices"][0]["message"]["content"]


def _chat(model: str, tokens: int) -> dict[str, object]:
    """All that the engine has to say for 0 tokens."""
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    return {**body, "max_tokens": tokens} if tokens else body


@contextlib.asynccontextmanager
async def _sent(
    port: int, method: str, path: str, body: Mapping[str, object] | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which one request was written."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        if data:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}\r\n".encode() + data)
        yield reader, writer
    finally:
        writer.close()


async def ask(port: int, method: str, path: str, body: Mapping[str, object] | None = None) -> bytes:
    """The body of a 200. Raises: BenchError for another status, OSError, EOFError."""
    async with _sent(port, method, path, body) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        rest = await reader.read()
    if b"chunked" in head.lower():
        rest = _unchunked(rest)
    if head.split()[1] != b"200":
        raise BenchError(f"{method} {path}: {head.split()[1].decode()} {rest[:300]!r}")
    return rest


def _unchunked(body: bytes) -> bytes:
    """Raises: ValueError for a body that is cut."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = body.index(b"\r\n", at)
        size = int(body[at:line_end].split(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 4 + size
