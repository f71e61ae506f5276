"""One engine process: started, watched, asked, stopped.

An engine leads its own session, writes its own log file and holds no pipe of ours, so it lives on when launcherd
is restarted or killed. Everything here goes by the process's identity; a reused pid is never touched.

Readiness means that it generated something: `/health` turns 200 before the first token is known to come. What went
wrong is decided by facts (exit status, files, who listens), never by words in the log; those are only detail.

Source: DESIGN §2 (engines outlive launcherd), §7; TRAPS 21, 23, 28, 30, 31.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from services.launcherd.command_line import EngineCommand
from services.launcherd.io.engine_http import EngineAddress, call_engine
from services.launcherd.io.engine_log import log_tail, open_log, trim_log
from services.launcherd.io.process import (
    ExitStatus,
    ExitWatch,
    ProcessIdentity,
    family,
    identify,
    is_alive,
    send_signal,
    signal_family,
)
from services.launcherd.recipes import FirstRequest
from shared.errors import (
    EngineExited,
    EngineMissing,
    EnginePortTaken,
    LoadFailed,
    LoadTimedOut,
    ModelFileMissing,
    OptionRefused,
    StateNotWritable,
)
from shared.recipes import BUILTIN_RECIPES, LLAMACPP, Recipe

HEALTH_POLL_SECONDS = (0.01, 0.25)
"""First and longest pause between two looks at an engine that loads."""
CALL_SECONDS = 5.0
"""Longest silence of `/health` while loading before it is asked again."""
LOG_TRIM_SECONDS = 15.0
KILL_SECONDS = 10.0
"""How long a killed process may take to vanish (a GPU driver tears down its memory first)."""
REASON_LINES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a loading engine is at: `starting`, `loading`, `answering` (its first request). For people."""

    phase: str
    seconds: float
    last_line: str


OnProgress = Callable[[Progress], None]


class EngineProcess:
    """A running engine, ours or adopted. Create it with `start_engine` or `attach`, inside the running loop."""

    def __init__(
        self,
        identity: ProcessIdentity,
        address: EngineAddress,
        *,
        model_parts: Sequence[str],
        log_path: Path,
        recipe: Recipe = BUILTIN_RECIPES[LLAMACPP],
        first_request: FirstRequest | None = None,
        usage_status: int | None = None,
    ) -> None:
        self.identity = identity
        self.address = address
        self.recipe = recipe
        self.log_path = log_path
        self._first_request = first_request
        self._usage_status = usage_status
        self._model_parts = tuple(model_parts)
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._watch = ExitWatch(identity, self._on_exit)
        self._trimmer = self._loop.create_task(self._trim_log())

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def exit_status(self) -> ExitStatus | None:
        """How it ended, once that is noticed."""
        return self._exited.result() if self._exited.done() else None

    def is_alive(self) -> bool:
        """Asks the system, so it is right even before the exit was noticed."""
        return not self._exited.done() and is_alive(self.identity)

    async def wait_exited(self) -> ExitStatus:
        """Returns when the process has ended, within milliseconds of it. May be awaited by several."""
        return await asyncio.shield(self._exited)

    def log_tail(self, lines: int) -> tuple[str, ...]:
        """The log's last lines."""
        return log_tail(self.log_path, lines)

    async def wait_ready(self, timeout_seconds: float, on_progress: OnProgress | None = None) -> None:
        """Returns once the engine is ready and has answered a first request, such as for one token.

        The process runs on after a failure: stop it. Raises: ModelFileMissing, OptionRefused, EnginePortTaken,
        EngineExited (with the status), LoadTimedOut, LoadFailed (it answers, but not as it should).
        """
        started = time.monotonic()

        def tell(phase: str) -> None:
            if on_progress is not None:
                line = "".join(self.log_tail(1))
                on_progress(Progress(phase=phase, seconds=time.monotonic() - started, last_line=line))

        try:
            async with asyncio.timeout(timeout_seconds):
                await self._until_healthy(tell)
                if self._first_request is not None:
                    tell("answering")
                    await self._first_answer(self._first_request)
        except TimeoutError:
            raise LoadTimedOut(f"the engine was not ready after {timeout_seconds:.0f} s{self._last_words()}") from None

    async def probe(self, timeout_seconds: float) -> bool:
        """Whether the engine answers in time, where the recipe says so even its work loop."""
        try:
            async with asyncio.timeout(timeout_seconds):
                path = self.recipe.probe_path or self.recipe.health_path
                await self._unless_exited(call_engine(self.address, path))
        except (OSError, TimeoutError, LoadFailed):
            return False
        return True

    async def accepts_key(self, timeout_seconds: float) -> bool:
        """Whether a healthy engine answers there and knows our key; a stranger on a reused port does not.

        Other engines than llama.cpp's may have no key, or show it nowhere: there it counts who listens.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                health, _ = await call_engine(self.address, self.recipe.health_path)
                if self.recipe.name != LLAMACPP:
                    return health in self.recipe.ready_statuses and self._owns_port() is True
                stranger = EngineAddress(host=self.address.host, port=self.address.port, api_key="")
                refused, _ = await call_engine(stranger, "/props")
                known, _ = await call_engine(self.address, "/props")
        except (OSError, TimeoutError):
            return False
        return health == 200 and refused in (401, 403) and known == 200 and self._owns_port() is not False

    async def stop(self, grace_seconds: float = 2.0) -> ExitStatus:
        """SIGTERM, after `grace_seconds` SIGKILL, to the process and its session; then nothing of it is left.

        May be repeated, and called for an engine that is gone. Raises: LoadFailed when even SIGKILL does not end it.
        """
        if not self._exited.done():
            signal_family(self.identity, signal.SIGTERM)
            # A stopped process would not see the SIGTERM.
            signal_family(self.identity, signal.SIGCONT)
            try:
                async with asyncio.timeout(grace_seconds):
                    await self.wait_exited()
            except TimeoutError:
                signal_family(self.identity, signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_SECONDS):
                status = await self.wait_exited()
        except TimeoutError:
            raise LoadFailed(f"engine process {self.pid} does not end, not even by SIGKILL") from None
        self.release()
        return status

    def release(self) -> None:
        """Stops watching and lets the engine run on; this object is of no more use. May be repeated."""
        self._watch.close()
        self._trimmer.cancel()

    def _on_exit(self, status: ExitStatus) -> None:
        self._trimmer.cancel()
        # A wrapper script may have died without the engine it started.
        for member in family(self.identity):
            send_signal(member, signal.SIGKILL)
        if not self._exited.done():
            self._exited.set_result(status)

    async def _until_healthy(self, tell: Callable[[str], None]) -> None:
        pause, longest = HEALTH_POLL_SECONDS
        phase = "starting"
        while True:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    status, _ = await self._unless_exited(call_engine(self.address, self.recipe.health_path))
                if status in self.recipe.ready_statuses:
                    break
                phase = "loading"
            except (OSError, TimeoutError):
                pass
            tell(phase)
            await self._unless_exited(asyncio.sleep(pause))
            pause = min(longest, pause * 1.5)
        if self._owns_port() is False:
            raise EnginePortTaken(f"another process answers on port {self.address.port}")

    async def _first_answer(self, first: FirstRequest) -> None:
        try:
            asked = call_engine(self.address, first.path, first.body, first.content_type)
            status, reply = await self._unless_exited(asked)
        except OSError as error:
            # A connection that breaks is most often the first sign of a crash: give the exit a moment to show.
            await asyncio.wait([self._exited], timeout=1.0)
            self._check_exited()
            raise LoadFailed(f"the engine broke off its first answer: {error}{self._last_words()}") from error
        if status == 401:
            raise EnginePortTaken(f"a server with another key answers on port {self.address.port}")
        if status != 200 or not _is_object(reply):
            text = reply[:200].decode(errors="replace")
            raise LoadFailed(f"the engine's first answer was {status}: {text}{self._last_words()}")

    async def _unless_exited(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or the error of `_check_exited` as soon as the process ends."""
        task = self._loop.create_task(work)
        try:
            await asyncio.wait((task, self._exited), return_when=asyncio.FIRST_COMPLETED)
            self._check_exited()
            return await task
        finally:
            if not task.cancel():
                task.cancelled() or task.exception()  # Seen: not worth a warning from the loop.

    def _check_exited(self) -> None:
        """Raises: the error that fits, if the process has ended."""
        if not self._exited.done():
            return
        status = self._exited.result()
        missing = _missing(self._model_parts)
        if missing:
            raise ModelFileMissing(f"the engine {status}: {missing} is gone")
        if port_in_use(self.address.host, self.address.port):
            raise EnginePortTaken(f"the engine {status}: another process took port {self.address.port} first")
        if status.status is not None and status.status == self._usage_status:
            raise OptionRefused(f"the engine cannot use its arguments{self._last_words()}")
        raise EngineExited(f"the engine {status} before it was ready{self._last_words()}", status.status)

    def _owns_port(self) -> bool | None:
        """Whether the engine or a child of it listens on its port; None if the system does not tell."""
        for member in (self.identity, *family(self.identity)):
            try:
                connections = psutil.Process(member.pid).net_connections(kind="tcp")
            except psutil.NoSuchProcess:
                continue
            except (psutil.Error, OSError):
                return None
            for connection in connections:
                if connection.status == psutil.CONN_LISTEN and connection.laddr[1] == self.address.port:
                    return True
        return False

    def _last_words(self) -> str:
        lines = self.log_tail(REASON_LINES)
        return "; its last words: " + " | ".join(lines) if lines else "; it wrote no log"

    async def _trim_log(self) -> None:
        while True:
            await asyncio.sleep(LOG_TRIM_SECONDS)
            await asyncio.to_thread(trim_log, self.log_path)


async def start_engine(command: EngineCommand, log_path: Path) -> EngineProcess:
    """Starts the process; it is not ready yet. Cancelling this leaves no process behind.

    Raises: ModelFileMissing, EngineMissing, StateNotWritable, LoadFailed when the process cannot be started.
    """
    missing = _missing(command.model.parts)
    if missing:
        raise ModelFileMissing(f"{missing} is not there (any more)")
    spawning = asyncio.get_running_loop().run_in_executor(None, _spawn, command, log_path)
    try:
        pid = await asyncio.shield(spawning)
    except asyncio.CancelledError:
        await asyncio.shield(_kill_spawned(spawning))
        raise
    except FileNotFoundError as error:
        raise EngineMissing(f"the engine {command.argv[0]} is not there: {error.strerror}") from error
    except PermissionError as error:
        raise EngineMissing(f"the engine {command.argv[0]} cannot be run: {error}") from error
    except OSError as error:
        raise LoadFailed(f"the engine cannot be started: {error}") from error
    # Not waited for yet, so the pid is still its own, dead or alive.
    identity = identify(pid, zombie=True) or ProcessIdentity(pid, 0, "")
    address = EngineAddress(host=command.host, port=command.port, api_key=command.api_key)
    return EngineProcess(
        identity,
        address,
        model_parts=command.model.parts,
        log_path=log_path,
        recipe=command.recipe,
        first_request=command.first_request,
        usage_status=command.usage_status,
    )


def _spawn(command: EngineCommand, log_path: Path) -> int:
    """Pid of the new process, which leads its own session. Raises: OSError; StateNotWritable."""
    try:
        log = open_log(log_path)
    except OSError as error:
        raise StateNotWritable(
            f"the engine's log {log_path} cannot be written: {error.strerror or error}; free space on that disk or "
            "make the folder writable"
        ) from error
    try:
        process = subprocess.Popen(
            command.argv,
            env=dict(command.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=log_path.parent,
            start_new_session=True,
        )
    finally:
        os.close(log)
    # ExitWatch waits for it; this object must neither do so nor complain that nobody did.
    process.returncode = 0
    return process.pid


async def _kill_spawned(spawning: asyncio.Future[int]) -> None:
    """Undoes a start that nobody waits for any more; the process is gone when this returns."""
    await asyncio.wait([spawning])
    if spawning.exception() is None:
        pid = spawning.result()
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, pid, 0)


def _missing(parts: Sequence[str]) -> str:
    """The first file that does not exist, or empty."""
    return next((path for path in parts if not os.path.exists(path)), "")


def _is_object(reply: bytes) -> bool:
    try:
        return isinstance(json.loads(reply), dict)
    except ValueError:
        return False


def new_api_key() -> str:
    """A key nobody can guess."""
    return secrets.token_urlsafe(24)


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now. Somebody may a moment later: retry on EnginePortTaken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def port_in_use(host: str, port: int) -> bool:
    """Whether some process listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False
