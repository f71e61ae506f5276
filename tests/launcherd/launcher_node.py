"""A launcherd of its own, with real engines, asked over the real bus."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from services.launcherd.command_line import ENGINE_MARK
from services.launcherd.io.engine_http import EngineAddress, call_engine
from services.launcherd.io.process import marked_processes, send_signal
from shared import codec
from shared.errors import DaemonUnreachable, RequestRefused
from shared.ids import HolderId, ModelName, RequestId
from shared.io.bus import BusClient
from shared.messages.daemon import ExplainSubject, Explanation, GetSnapshot, Snapshot
from shared.messages.leases import AcquireLease, CreditUse, LeaseGranted, ReportCredits, ReturnCredits
from shared.messages.models import LoadModel, ModelLoaded, SlotChanged
from shared.paths import NodePaths
from tests.daemons import DaemonProcess, start_daemon_process
from tests.engines.scripted_engine import Script, write_engine
from tests.waiting import run_async, wait_until


class LauncherNode:
    """`ask` speaks to the daemon; everything else is made of it."""

    def __init__(self, home: Path, models: Path) -> None:
        self.home = home
        self.models = models
        self.daemon: DaemonProcess | None = None
        self._settings: dict[str, dict[str, object]] = {}
        self._requests = 0

    # -- the process -----------------------------------------------------------------------------------------

    def configure(self, **sections: dict[str, object]) -> None:
        """Write mesh.toml: small engines, plus what is given."""
        settings: dict[str, dict[str, object]] = {
            "models": {"folders": [str(self.models)]},
            "engine": {"path": "embedded", "context_tokens": 512, "parallel": 2, "threads": 1},
        }
        for source in (self._settings, sections):
            for name, values in source.items():
                settings.setdefault(name, {}).update(values)
        self._settings = settings
        lines = []
        for name, values in settings.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        (self.home / "mesh.toml").write_text("\n".join(lines) + "\n")

    def use_script(self, script: Script) -> None:
        """Run scripted engines from now on."""
        path = write_engine(self.home / "llama-server", script)
        self.configure(engine={"path": str(path)})

    def start(self, **env: str) -> DaemonProcess:
        self.daemon = start_daemon_process("launcherd", self.home, **env)
        self.daemon.wait_ready()
        return self.daemon

    def restart_after_kill(self) -> None:
        """SIGKILL, and a new launcherd."""
        assert self.daemon is not None
        self.daemon.kill()
        self.start()

    def engines(self) -> list[int]:
        """Pids of every engine process of this node, known to launcherd or not."""
        return sorted(identity.pid for identity, _ in marked_processes(ENGINE_MARK, str(self.home)))

    # -- the bus ---------------------------------------------------------------------------------------------

    def ask(self, request: codec.Message, seconds: float = 20.0) -> Any:
        """Raises: RequestRefused, DaemonUnreachable."""

        async def exchange() -> codec.Message:
            client = BusClient("launcherd", NodePaths(self.home))
            try:
                return await client.request(request, deadline_seconds=seconds)
            finally:
                client.close()

        return run_async(exchange(), seconds + 5)

    def refusal(self, request: codec.Message, seconds: float = 20.0) -> RequestRefused:
        try:
            reply = self.ask(request, seconds)
        except RequestRefused as error:
            return error
        raise AssertionError(f"not refused: {reply}")

    def give_up(self, request: codec.Message, seconds: float) -> None:
        """Ask, and go away without an answer after so many seconds."""
        try:
            self.ask(request, seconds)
        except (DaemonUnreachable, RequestRefused):
            return
        raise AssertionError("it was answered")

    def load(self, model: str, **options: Any) -> ModelLoaded:
        reply = self.ask(LoadModel(model=ModelName(model), **options))
        assert isinstance(reply, ModelLoaded)
        return reply

    def acquire(self, model: str, holder: str = "proxy", seconds: float = 20.0) -> LeaseGranted:
        self._requests += 1
        request = AcquireLease(
            holder=HolderId(holder), request_id=RequestId(f"{holder}-{self._requests}"), model=ModelName(model)
        )
        reply = self.ask(request, seconds)
        assert isinstance(reply, LeaseGranted)
        return reply

    def give_back(self, lease: LeaseGranted, holder: str = "proxy") -> None:
        """Return all its credits."""
        self._requests += 1
        request_id = RequestId(f"back-{self._requests}")
        request = ReturnCredits(
            holder=HolderId(holder), request_id=request_id, slot_id=lease.slot_id, count=lease.credits
        )
        self.ask(request)

    def report(self, lease: LeaseGranted, *, in_use: int = 0, holder: str = "proxy") -> Any:
        use = CreditUse(
            slot_id=lease.slot_id,
            model=lease.model,
            credits=lease.credits,
            in_use=in_use,
            started_total=1,
            last_use_age_seconds=0.0,
        )
        return self.ask(ReportCredits(holder=HolderId(holder), daemon="proxyd", pid=1, uses=(use,)))

    def snapshot(self) -> list[codec.Message]:
        reply = self.ask(GetSnapshot())
        assert isinstance(reply, Snapshot)
        return [codec.decode(item) for item in reply.items]

    def slot(self, model: str) -> SlotChanged | None:
        """The newest slot of a model."""
        slots = [item for item in self.snapshot() if isinstance(item, SlotChanged) and item.model == model]
        return slots[-1] if slots else None

    def wait_state(self, model: str, state: str, seconds: float = 15.0) -> SlotChanged:
        def look() -> SlotChanged | None:
            slot = self.slot(model)
            return slot if slot is not None and slot.state == state else None

        found = wait_until(look, seconds, f"{model} is {state}")
        assert found is not None
        return found

    def why(self, subject: str) -> str:
        reply = self.ask(ExplainSubject(subject=subject))
        assert isinstance(reply, Explanation)
        return "\n".join(reply.sentences)


def chat(lease: LeaseGranted, text: str = "hello", max_tokens: int = 4) -> str:
    """One answer from the leased engine."""
    _, _, port = lease.base_url.rpartition(":")
    address = EngineAddress(host="127.0.0.1", port=int(port), api_key=lease.api_key)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    status, reply = run_async(call_engine(address, "/v1/chat/completions", body))
    assert status == 200, reply
    answer: str = json.loads(reply)["choices"][0]["message"]["content"]
    return answer


def change_script(lease: LeaseGranted, **changes: object) -> None:
    """Make a running scripted engine behave otherwise."""
    _, _, port = lease.base_url.rpartition(":")
    address = EngineAddress(host="127.0.0.1", port=int(port), api_key=lease.api_key)
    status, reply = run_async(call_engine(address, "/scripted", changes))
    assert status == 200, reply


@contextmanager
def launcher_node(home: Path, models: Path) -> Iterator[LauncherNode]:
    """A node that is ended afterwards, and that must not leave an engine when it is ended in order."""
    node = LauncherNode(home, models)
    node.configure()
    try:
        yield node
    except BaseException:
        if node.daemon is not None:
            print(node.daemon.log())
        raise
    finally:
        if node.daemon is not None:
            node.daemon.end()
        left = marked_processes(ENGINE_MARK, str(home))
        for identity, _ in left:
            send_signal(identity, signal.SIGKILL)
    assert not left, "engines were left behind"


def pid_of(node: LauncherNode, model: str) -> int:
    """Pid of a loaded model's engine."""
    slot = node.slot(model)
    assert slot is not None
    assert psutil.pid_exists(slot.pid)
    return slot.pid


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
