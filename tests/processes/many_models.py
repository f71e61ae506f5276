"""Many clients on the many models of one node: what they ask, what they must get, and who watches the engines.

Every answer is compared with the model's own, taken alone before: text at temperature 0 word for word, vectors and
scores within `TOLERANCE`. Nothing is asked a second time, so an error that a client would see is an error here.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai

from services.launcherd.command_line import ENGINE_MARK
from services.launcherd.io.process import ProcessIdentity, marked_processes
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script, write_engine
from tests.processes.node import Node, private_home, started

MODELS: Mapping[str, str] = {
    "llm-a": "llm",
    "llm-b": "llm",
    "llm-c": "llm",
    "emb-a": "embedding",
    "emb-b": "embedding",
    "rank-a": "reranking",
}
LIMITS = {"llm": 2, "embedding": 1, "reranking": 1}
TOLERANCE = 1e-5
REQUEST_LIMIT_SECONDS = 150.0
SAMPLE_SECONDS = 0.05
_STARTS = re.compile(r"event=engine_starts .*?model=(\S+)")


@contextmanager
def node_with_many_models(script: Script | None = None) -> Iterator[Node]:
    """A running node with the models of `MODELS`, limits `LIMITS` and the embedded engine, or scripted ones.

    It must end clean.
    """
    with private_home() as home:
        folder = home / "my-models"
        folder.mkdir()
        write = {
            "llm": tiny_models.write_llm,
            "embedding": tiny_models.write_embedding,
            "reranking": tiny_models.write_reranking,
        }
        for seed, (name, type) in enumerate(MODELS.items(), start=1):
            write[type](folder / f"{name}.gguf", name=name, seed=seed)
        limits = ", ".join(str(limit) for limit in LIMITS.values())
        engine = "embedded" if script is None else str(write_engine(home / "llama-server", script))
        (home / "mesh.toml").write_text(
            f'[models]\nfolders = ["{folder}"]\nserve = ["llm-a"]\nmax_loaded_models = [{limits}]\n'
            f'[engine]\npath = "{engine}"\nthreads = 1\ncontext_tokens = 1024\n'
        )
        with started(Node(home)) as node:
            yield node
        left = marked_processes(ENGINE_MARK, f"{home}/")
        assert left == [], f"engines outlived meshctl down: {left}"


# -- questions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request and the kind of its answer. `stream` is how a client may ask, not part of the question."""

    model: str
    path: str
    body: Mapping[str, Any]

    @property
    def may_stream(self) -> bool:
        return self.path in ("/v1/chat/completions", "/v1/completions")


def questions() -> list[Question]:
    asked: list[Question] = []
    for name, type in MODELS.items():
        if type == "llm":
            for text, tokens in (("hello", 6), ("tell me of the boat", 16), ("cold coal " * 20, 11)):
                chat = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
                asked.append(Question(model=name, path="/v1/chat/completions", body=chat))
            plain = {"prompt": "bird able army", "max_tokens": 9, "temperature": 0}
            asked.append(Question(model=name, path="/v1/completions", body=plain))
        elif type == "embedding":
            for texts in (["one boat"], ["army", "baby back ball", "cold coal " * 10]):
                asked.append(Question(model=name, path="/v1/embeddings", body={"input": texts}))
        else:
            for query in ("boat", "cold coal"):
                ranked = {"query": query, "documents": ["able army", "a boat of coal", "face", "dust duty each"]}
                asked.append(Question(model=name, path="/v1/rerank", body=ranked))
    return asked


Answer = str | list[float]


def answer_of(question: Question, reply: Mapping[str, Any]) -> Answer:
    """What counts of a reply: its text, or its numbers in the order of the inputs.

    Raises: ValueError when another model answered.
    """
    path = question.path
    if reply["model"] != question.model:
        raise ValueError(f"{question.model} was asked and {reply['model']} answered")
    if path == "/v1/embeddings":
        items = sorted(reply["data"], key=lambda item: int(item["index"]))
        return [float(number) for item in items for number in item["embedding"]]
    if path == "/v1/rerank":
        items = sorted(reply["results"], key=lambda item: int(item["index"]))
        return [float(item["relevance_score"]) for item in items]
    choice = reply["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def text_of_stream(question: Question, body: bytes) -> str:
    """The text of a stream. Raises: ValueError for an error event, another model, or a stream without its end."""
    text, done = "", False
    for line in body.decode().splitlines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"error in the stream: {event['error']}")
        if event["model"] != question.model:
            raise ValueError(f"{question.model} was asked and {event['model']} answered")
        for choice in event["choices"]:
            text += (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
    if not done:
        raise ValueError(f"the stream ended early: {body[-200:]!r}")
    return text


def same(answer: Answer, reference: Answer) -> bool:
    if isinstance(answer, str) or isinstance(reference, str):
        return answer == reference
    pairs = zip(answer, reference, strict=False)
    return len(answer) == len(reference) and all(abs(one - other) <= TOLERANCE for one, other in pairs)


def references(node: Node) -> dict[int, Answer]:
    """The answer to each of `questions`, by its index, one after the other and nobody else asking."""
    found: dict[int, Answer] = {}
    for index, question in enumerate(questions()):
        reply = node.request("POST", question.path, {"model": question.model, **question.body}, timeout=60)
        assert reply.status == 200, f"{question.model} {question.path}: {reply.status} {reply.body[:300]!r}"
        found[index] = answer_of(question, reply.json())
    return found


def tell_apart(known: Mapping[int, Answer]) -> bool:
    """Whether every model answers the same questions differently."""
    by_model = {name: [answer for i, answer in known.items() if questions()[i].model == name] for name in MODELS}
    return len(set(map(str, by_model.values()))) == len(MODELS)


# -- clients -----------------------------------------------------------------------------------------------------


class Http:
    """A keep-alive HTTP/1.1 connection, opened when it is needed."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and whole body. Raises: OSError, EOFError."""
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        assert self._reader is not None
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await self._writer.drain()
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        if headers.get("transfer-encoding", "") == "chunked":
            parts = []
            while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                parts.append(await self._reader.readexactly(size))
                await self._reader.readexactly(2)
            await self._reader.readexactly(2)
            whole = b"".join(parts)
        elif "content-length" in headers:
            whole = await self._reader.readexactly(int(headers["content-length"]))
        else:
            whole = await self._reader.read()
        if headers.get("connection", "").lower() == "close" or "content-length" not in headers:
            self.close()
        return int(lines[0].split()[1]), whole

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass
class Outcome:
    """What all clients together saw."""

    answered: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0

    @property
    def requests(self) -> int:
        return sum(self.answered.values())


class Crowd(threading.Thread):
    """So many clients at once; each asks `requests_each` questions drawn from `seed`, or until `finish`.

    Every tenth client is the openai package, as people use it, with its retries switched off.
    """

    def __init__(
        self, node: Node, known: Mapping[int, Answer], *, clients: int, seed: str, requests_each: int = 1_000_000
    ) -> None:
        super().__init__(daemon=True)
        self.outcome = Outcome()
        self._base = node.api
        self._known = known
        self._clients = clients
        self._seed = seed
        self._requests_each = requests_each
        self._end = threading.Event()

    def run(self) -> None:
        asyncio.run(self._all())

    def finish(self, seconds: float = REQUEST_LIMIT_SECONDS) -> Outcome:
        """No new requests; those that run are answered."""
        self._end.set()
        self.join(seconds)
        assert not self.is_alive(), f"requests still run after {seconds:g} s"
        return self.outcome

    def wait(self, seconds: float) -> Outcome:
        """Until every client has asked all it has to ask."""
        self.join(seconds)
        assert not self.is_alive(), f"not all answered within {seconds:g} s: {self.outcome.requests} were"
        return self.outcome

    def answered_more_than(self, requests: int) -> bool:
        return self.outcome.requests > requests

    async def _all(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._clients)))

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self._seed} client {number}")
        asked = questions()
        url = urlsplit(self._base)
        http = Http(url.hostname or "", url.port or 0)
        # The connection pool is closed with it.
        async with openai.AsyncOpenAI(base_url=f"{self._base}/v1", api_key="unused", max_retries=0) as client:
            for count in range(self._requests_each):
                if self._end.is_set():
                    break
                index = chance.randrange(len(asked))
                question, stream = asked[index], chance.random() < 0.4
                if chance.random() < 0.2:
                    http.close()
                started = time.monotonic()
                try:
                    async with asyncio.timeout(REQUEST_LIMIT_SECONDS):
                        if number % 10 == 0 and question.path in ("/v1/chat/completions", "/v1/embeddings"):
                            answer = await _ask_openai(client, question)
                        else:
                            answer = await _ask(http, question, stream)
                except (OSError, EOFError, ValueError, KeyError, TimeoutError, openai.OpenAIError) as error:
                    self._failed(number, count, question, repr(error))
                    http.close()
                else:
                    if not same(answer, self._known[index]):
                        words = f"wrong answer {str(answer)[:150]}, not {str(self._known[index])[:150]}"
                        self._failed(number, count, question, words)
                self.outcome.answered[question.model] += 1
                seconds = time.monotonic() - started
                self.outcome.slowest_seconds = max(self.outcome.slowest_seconds, seconds)
        http.close()

    def _failed(self, number: int, count: int, question: Question, what: str) -> None:
        self.outcome.failures.append(
            f"{time.strftime('%H:%M:%S')} client {number}, request {count}, {question.model} {question.path}: {what}"
        )


async def _ask(http: Http, question: Question, stream: bool) -> Answer:
    """Raises: OSError, EOFError, ValueError, KeyError."""
    body: dict[str, Any] = {"model": question.model, **question.body}
    streams = stream and question.may_stream
    if streams:
        body["stream"] = True
    status, reply = await http.post(question.path, body)
    if status != 200:
        raise ValueError(f"{status} {reply[:300]!r}")
    return text_of_stream(question, reply) if streams else answer_of(question, json.loads(reply))


async def _ask_openai(client: openai.AsyncOpenAI, question: Question) -> Answer:
    body: dict[str, Any] = {"model": question.model, **question.body}
    if question.path == "/v1/embeddings":
        made = await client.embeddings.create(**body, encoding_format="float")
        return [number for item in made.data for number in item.embedding]
    reply = await client.chat.completions.create(**body)
    if reply.model != question.model:
        raise ValueError(f"{question.model} was asked and {reply.model} answered")
    return str(reply.choices[0].message.content)


# -- engines -----------------------------------------------------------------------------------------------------


def engines(node: Node) -> dict[int, str]:
    """Pid and model of every engine process of the node, known to launcherd or not."""
    found = {}
    for identity, _ in marked_processes(ENGINE_MARK, f"{node.home}/"):
        name = model_of(identity)
        if name:
            found[identity.pid] = name
    return found


def model_of(identity: ProcessIdentity) -> str:
    """From the engine's command line; empty for a process that is just becoming an engine, or is gone."""
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{identity.pid}/cmdline", "rb") as file:
            words = file.read().decode().split("\0")
        return os.path.basename(words[words.index("--model") + 1]).removesuffix(".gguf")
    return ""


class EngineWatch(threading.Thread):
    """Looks at all engine processes again and again: never two of one model, never more of a type than its limit."""

    def __init__(self, node: Node, types: Mapping[str, str] = MODELS, limits: Mapping[str, int] = LIMITS) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._types = types
        self._limits = limits
        self._end = threading.Event()
        self.samples = 0
        self.doubled: list[str] = []
        self.crowded: list[str] = []
        self.pids: defaultdict[str, set[int]] = defaultdict(set)

    def run(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            found = engines(self._node)
            self.samples += 1
            for pid, name in found.items():
                self.pids[name].add(pid)
            self.doubled += [f"{name}: {found}" for name, count in Counter(found.values()).items() if count > 1]
            types = Counter(self._types[name] for name in found.values() if name in self._types)
            self.crowded += [f"{type}: {found}" for type, count in types.items() if count > self._limits[type]]

    def finish(self) -> None:
        self._end.set()
        self.join(10)


def loads(node: Node) -> Counter[str]:
    """How often each model's engine was started, as launcherd logged it."""
    return Counter(_STARTS.findall((node.home / "logs" / "launcherd.log").read_text(errors="replace")))


def known_engines(node: Node) -> dict[int, str]:
    """Pid and model of every engine that belongs to a slot, as `meshctl status` says."""
    rows = node.status()["models"]
    return {row["here"]["pid"]: row["name"] for row in rows if row["here"] and row["here"]["pid"]}


def report(outcome: Outcome, started: Mapping[str, int], seconds: float) -> str:
    counts = ", ".join(f"{name} {started.get(name, 0)}" for name in MODELS)
    return (
        f"{outcome.requests} requests in {seconds:.1f} s, {len(outcome.failures)} failures, "
        f"slowest {outcome.slowest_seconds:.1f} s; loads: {counts}"
    )
