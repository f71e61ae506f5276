"""A real node for tests: real supervisord, five real daemons, a private ``MESH_HOME``, free ports."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from services.meshctl.node import Node as MeshctlNode
from shared.ids import DAEMONS
from shared.status_view import to_jsonable
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script, write_engine

ROOT = Path(__file__).resolve().parent.parent.parent
PORTS = {"MESH_API_PORT": "0", "MESH_CONSOLE_PORT": "0", "MESH_PORT": "0", "MESH_HOST": "127.0.0.1"}


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of ``condition``; AssertionError naming ``what`` when time is up."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.05)  # Asking a node costs it and this process some milliseconds of a core.


def processes_of(home: Path) -> list[psutil.Process]:
    """Every living process of the node: its environment names ``home`` as ``MESH_HOME``, or its command line does."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            named = process.environ().get("MESH_HOME") == str(home) or f"{home}/" in " ".join(process.cmdline())
            if named and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(process)
    return found


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Node:
    """One node under ``home``. Commands run as a user would run them: ``bin/meshctl``."""

    home: Path
    root: Path = ROOT
    environment: dict[str, str] = field(default_factory=dict)
    _api: str = ""

    def env(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return {**kept, **PORTS, "MESH_HOME": str(self.home), **self.environment}

    def meshctl(self, *words: str, check: bool = True, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [str(self.root / "bin" / "meshctl"), *words],
            env=self.env(), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if check:
            assert result.returncode == 0, (
                f"meshctl {' '.join(words)}: {result.returncode}\n{result.stdout}\n{result.stderr}"
            )
        return result

    def up(self, *words: str) -> None:
        self.meshctl("up", *words)

    def down(self) -> None:
        self.meshctl("down", check=False)

    def status(self) -> dict[str, Any]:
        """What `meshctl status --json` prints; asked from this process where that can be: it is asked often."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return self._told_status()
        found = MeshctlNode(self.env())
        if self.root != ROOT or found.is_down():
            return self._told_status()
        return dict(json.loads(json.dumps(to_jsonable(found.status()))))

    def _told_status(self) -> dict[str, Any]:
        return dict(json.loads(self.meshctl("status", "--json").stdout))

    @property
    def api(self) -> str:
        if not self._api:
            self._api = wait_for(lambda: self.status()["addresses"]["api"], 20, "the address of the inference port")
        return self._api

    def forget_address(self) -> None:
        """After a new start with port 0 the inference port may be another one."""
        self._api = ""

    def pid(self, daemon: str) -> int:
        """The pid that supervisord knows, 0 while it is not running."""
        rows = self.status()["daemons"]
        return int(next(row["pid"] for row in rows if row["name"] == daemon) or 0)

    def request(self, method: str, path: str, body: Any = None, timeout: float = 30.0) -> Answer:
        """One request on a connection of its own."""
        address = urlsplit(self.api)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())
        finally:
            connection.close()

    def chat(self, model: str, text: str, **fields: Any) -> Answer:
        return self.request(
            "POST", "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        )

    def healed(self) -> bool:
        """All five daemons run and answer."""
        rows = {row["name"]: row for row in self.status()["daemons"]}
        return all(rows[name]["pid"] and rows[name]["state"].lower() == "running" for name in DAEMONS)

    def logs(self) -> str:
        texts = [
            f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted((self.home / "logs").glob("*.log"))
        ]
        return "\n".join(texts)


@contextlib.contextmanager
def private_home() -> Iterator[Path]:
    """A short private directory that is gone afterwards, with everything that still runs in it killed by pid."""
    home = Path(tempfile.mkdtemp(prefix="mesh-", dir="/tmp"))
    try:
        yield home
    finally:
        for process in processes_of(home):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def started(node: Node) -> Iterator[Node]:
    """Up, and down again; after a failure its logs are printed."""
    try:
        node.up()
        yield node
    except BaseException:
        print(node.logs())
        raise
    finally:
        node.down()


@contextlib.contextmanager
def node_with_scripted_engine(
    script: Script, models: tuple[str, ...] = ("tiny-a",), config: str = ""
) -> Iterator[Node]:
    """A running node whose engine is the scripted one, with ``models`` on disk and the first one served."""
    with private_home() as home:
        folder = home / "my-models"
        folder.mkdir()
        for number, name in enumerate(models):
            tiny_models.write_llm(folder / f"{name}.gguf", seed=number + 1, name=name)
        engine = write_engine(home / "llama-server", script)
        (home / "mesh.toml").write_text(
            f'[models]\nfolders = ["{folder}"]\nserve = ["{models[0]}"]\n\n[engine]\npath = "{engine}"\n{config}'
        )
        with started(Node(home)) as node:
            yield node


class Stream(threading.Thread):
    """Reads one streamed chat to its end; ``text`` and ``error`` tell how it went."""

    def __init__(self, node: Node, model: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.model = ""
        self.error = ""
        self.done = False
        self.started = threading.Event()
        address = urlsplit(node.api)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        body = {"model": model, "stream": True, "max_tokens": tokens}
        self._body = json.dumps({**body, "messages": [{"role": "user", "content": "hello"}]})

    def run(self) -> None:
        try:
            self._connection.request(
                "POST", "/v1/chat/completions", self._body, {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            for raw in response:
                line = raw.decode().strip()
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.error = str(event["error"])
                        continue
                    self.model = event["model"]
                    for choice in event["choices"]:
                        self.text += choice["delta"].get("content") or ""
                    if self.text:
                        self.started.set()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            self._connection.close()


class ConnectLoop(threading.Thread):
    """New connection, one short chat, close, again and again until stopped. Remembers every failure."""

    def __init__(self, node: Node, model: str) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._model = model
        self._end = threading.Event()
        self.failures: list[str] = []
        self.answered = 0
        self.slowest_seconds = 0.0

    def run(self) -> None:
        while not self._end.is_set() and self.answered < 100_000:
            started = time.monotonic()
            try:
                answer = self._node.chat(self._model, "hi", max_tokens=1)
                if answer.status != 200:
                    self.failures.append(f"{answer.status} {answer.body[:200]!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            self.answered += 1
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started)

    def finish(self) -> None:
        self._end.set()
        self.join(60)
