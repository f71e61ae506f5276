"""keeper and proxyd under a real supervisord, with the node's own configuration text; the other daemons are left out.

launcherd is spoken for by a bus server in the test's process, whose one model runs on a scripted engine process.
"""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shared.codec import Message
from shared.ids import ModelName, SlotId
from shared.io.bus import BusClient, BusServer
from shared.io.drive import Tasks
from shared.io.supervisor import Supervisor
from shared.messages.daemon import Done, StoryEntry
from shared.messages.leases import AcquireLease, CreditsConfirmed, LeaseGranted, ReportCredits
from shared.messages.models import InventoryChanged, SlotChanged
from shared.paths import NodePaths
from shared.supervisor_conf import layout_of, render
from tests.engines.scripted_engine import Script, write_engine
from tests.waiting import wait_until

MODEL = "scripted"
KEPT = ("eventlistener:keeper", "program:proxyd")


@dataclass
class Supervised:
    """A running supervisord with keeper and proxyd."""

    home: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    seen: set[int] = field(default_factory=set)
    """Every pid that ran for this home."""

    @property
    def paths(self) -> NodePaths:
        return NodePaths(self.home)

    @property
    def supervisor(self) -> Supervisor:
        return Supervisor(f"unix://{self.home}/run/supervisor.sock", timeout_seconds=20)

    def start(self) -> None:
        """Start supervisord; does not wait for the daemons."""
        (self.home / "logs").mkdir(exist_ok=True)
        self.paths.prepare()
        text = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=(";",))
        text.read_string(render(layout_of(self.paths, {**self.env, "MESHD_PYTHON": sys.executable})))
        for section in text.sections():
            if section.startswith(("program:", "eventlistener:")) and section not in KEPT:
                text.remove_section(section)
        with open(self.paths.supervisor_conf, "w", encoding="utf-8") as file:
            text.write(file)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MESH", "SUPERVISOR"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(self.paths.supervisor_conf)],
            env={**environment, "HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        # A first request also wakes supervisord, which else starts nothing for its first second.
        wait_until(self._answers, 20, "supervisord answers")

    def _answers(self) -> bool:
        try:
            return bool(self.supervisor.call("getPID"))
        except OSError:
            return False

    def stop(self) -> None:
        """``supervisorctl shutdown`` and its end."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.supervisor.call("shutdown")
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def running(self) -> list[psutil.Process]:
        """Our processes, by the ``MESH_HOME`` in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("MESH_HOME") == str(self.home) and process.status() != psutil.STATUS_ZOMBIE:
                    self.seen.add(process.pid)
                    found.append(process)
        return found

    def pid(self, name: str) -> int:
        """As supervisord knows it; 0 while it does not run."""
        try:
            info = self.supervisor.call("getProcessInfo", name)
        except OSError:
            return 0
        return int(info["pid"]) if info["statename"] in ("RUNNING", "STARTING") else 0

    def workers(self) -> list[int]:
        """Pids of all workers, oldest first."""
        found = []
        for process in self.running():
            with contextlib.suppress(psutil.Error):
                if "services.proxyd.worker" in process.cmdline():
                    found.append(process)
        return [process.pid for process in sorted(found, key=lambda process: (process.create_time(), process.pid))]

    def ports(self) -> dict[str, int]:
        try:
            return dict(json.loads((self.paths.state / "ports.json").read_bytes()))
        except (OSError, ValueError):
            return {}

    def wait_live(self, seconds: float = 20) -> None:
        wait_until(lambda: self.ports().keys() >= {"api", "console"} and self.is_live(), seconds, "both ports answer")

    def is_live(self) -> bool:
        try:
            return self.get("/live")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        port: str = "api",
        host: str = "127.0.0.1",
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection(host, self.ports()[port], timeout=20)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None, *, port: str = "api") -> tuple[int, bytes]:
        status, _, body = self.request("GET", path, None, headers, port=port)
        return status, body

    def restart(self, name: str) -> None:
        """As ``supervisorctl restart`` does it.

        That one waits a second before it returns; here only until the program runs: between fork and exec a SIGTERM is
        caught by the handler of supervisord's copy and lost, and supervisord waits 10 s to kill what it started.
        """
        wait_until(lambda: self._is_executed(name), 20, f"supervisord has started {name}")
        self.supervisor.call("stopProcess", name, True)
        self.supervisor.call("startProcess", name, False)

    def _is_executed(self, name: str) -> bool:
        pid = self.pid(name)
        with contextlib.suppress(psutil.Error):
            return pid != 0 and f"services.{name}" in psutil.Process(pid).cmdline()
        return False

    def is_current(self, worker: int) -> bool:
        """Whether the worker was started by the stub that runs now."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(worker).ppid() == self.pid("proxyd")
        return False

    def log(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}"
            for path in sorted((self.home / "logs").glob("*.log"))
        )


@contextmanager
def supervised(home: Path, *, config: str | None = "", **env: str) -> Iterator[Supervised]:
    """Running keeper and proxyd; ``config`` is ``mesh.toml``'s text, None for no file."""
    if config is not None:
        (home / "mesh.toml").write_text(config)
    node = Supervised(home, {"MESH_API_PORT": "0", "MESH_CONSOLE_PORT": "0", "MESH_HOST": "127.0.0.1", **env})
    node.start()
    try:
        yield node
    except BaseException:
        print(node.log())
        raise
    finally:
        node.stop()
        for process in node.running():
            with contextlib.suppress(psutil.Error):
                process.kill()


@dataclass
class GenerousLauncherd:
    """Speaks for launcherd with one ready model, and gives every holder its share: a killed worker's never lapse."""

    base_url: str
    asked: list[Message] = field(default_factory=list)
    """What is not about leases."""
    slot = SlotChanged(
        slot_id=SlotId("slot-1"), model=ModelName(MODEL), type="llm", state="ready", reason="ready", origin="flag",
        parallel=4,
    )  # fmt: skip

    def state_line(self) -> str:
        return "test"

    def snapshot(self) -> list[Message]:
        return [InventoryChanged(models=()), self.slot]

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return ()

    async def handle(self, request: Message, _deadline: float) -> Message:
        match request:
            case AcquireLease():
                return LeaseGranted(
                    model=self.slot.model, slot_id=self.slot.slot_id, base_url=self.base_url, api_key="", credits=4,
                    parallel=4,
                )  # fmt: skip
            case ReportCredits():
                return CreditsConfirmed()
        self.asked.append(request)
        return Done()


@contextmanager
def scripted_model(paths: NodePaths, script: Script) -> Iterator[GenerousLauncherd]:
    """The model ``scripted`` on a scripted engine, leased out by a stand-in for launcherd on the node's bus."""
    program = write_engine(paths.home / "llama-server", script)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    engine = subprocess.Popen(
        [str(program), "--port", str(port), "--parallel", "32"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ended = threading.Event()
    launcherd = GenerousLauncherd(f"http://127.0.0.1:{port}")

    async def serve() -> None:
        tasks = Tasks()
        server = BusServer("launcherd", paths, launcherd, launcherd.handle, tasks)
        server.start()
        await asyncio.to_thread(ended.wait)
        await tasks.cancel()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        wait_until(lambda: _connects(port), 10, "the scripted engine listens")
        yield launcherd
    finally:
        ended.set()
        thread.join(10)
        engine.send_signal(signal.SIGKILL)
        engine.wait()


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


async def ask_proxyd(node: Supervised, request: Message) -> Message:
    client = BusClient("proxyd", node.paths)
    try:
        return await client.request(request)
    finally:
        client.close()


class Stream(threading.Thread):
    """One streamed chat, read to its end."""

    def __init__(self, port: int, tokens: int = 100_000) -> None:
        super().__init__()
        self.text, self.error, self.done = "", "", False
        self.began = threading.Event()
        self._port, self._tokens = port, tokens

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": self._tokens}
        body["messages"] = [{"role": "user", "content": "go"}]
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            for raw in connection.getresponse():
                line = raw.decode().strip()
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.error = str(event["error"])
                        continue
                    self.text += event["choices"][0]["delta"].get("content") or ""
                    if self.text:
                        self.began.set()
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            connection.close()


class ConnectLoop(threading.Thread):
    """New connection, ``GET path``, close, over and over: counts answers, failures and the longest wait."""

    def __init__(self, port: int, path: str = "/live") -> None:
        super().__init__()
        self.answers, self.slowest_seconds = 0, 0.0
        self.failures: list[str] = []
        self._port, self._path = port, path
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            started = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
            try:
                connection.request("GET", self._path)
                if connection.getresponse().read():
                    self.answers += 1
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            finally:
                connection.close()
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - started)

    def __enter__(self) -> ConnectLoop:
        self.start()
        wait_until(lambda: self.answers >= 5, 20, "the connect loop gets answers")
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(30)

    @property
    def refused(self) -> list[str]:
        return [failure for failure in self.failures if "Refused" in failure]
