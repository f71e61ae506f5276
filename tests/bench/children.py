"""Child processes of the bench: started on loopback, watched, and stopped by the process id we started.

Each child leads a process group of its own and dies with the bench (PR_SET_PDEATHSIG where the system has it), so
nothing outlives a run, however it ends.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


class BenchError(Exception):
    """Something the bench needs did not work; the text is for the person who ran it."""


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def plain_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without HTTP proxies, which would catch loopback requests, plus `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**kept, "NO_PROXY": "*", **(extra or {})}


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One process and what it started."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                list(command),
                stdin=stdin,
                stdout=output if stdout is None else stdout,
                stderr=output,
                env=plain_environment(env),
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_tail(self, characters: int = 400) -> str:
        return self.log.read_text(errors="replace")[-characters:].strip()

    def stop(self, wait_seconds: float = 5.0) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its group."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(wait_seconds)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def http_get(port: int, path: str, *, timeout_seconds: float = 5.0) -> tuple[int, bytes]:
    """Status and body of one GET on loopback. Raises: OSError when nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def http_post(
    port: int,
    path: str,
    body: bytes,
    headers: Sequence[tuple[str, str]],
    *,
    chunked: bool = False,
    timeout_seconds: float = 20.0,
) -> tuple[int, bytes]:
    """Status and body of one POST on loopback with exactly these headers, plus Host and the body's framing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        connection.putrequest("POST", path, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        if chunked:
            connection.putheader("Transfer-Encoding", "chunked")
            pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
            connection.endheaders(iter(pieces), encode_chunked=True)
        else:
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def wait_for_answer(child: Child, port: int, path: str, *, limit_seconds: float) -> None:
    """Returns when GET `path` answers 200. Raises: BenchError when the child dies or the time is up."""
    give_up = time.monotonic() + limit_seconds
    last = "no answer"
    while time.monotonic() < give_up:
        if child.process.poll() is not None:
            raise BenchError(f"{child.name} exited with {child.process.returncode}: {child.log_tail()}")
        try:
            status, _ = http_get(port, path, timeout_seconds=1.0)
        except OSError as error:
            last = str(error)
        else:
            if status == 200:
                return
            last = f"status {status}"
        time.sleep(0.05)
    raise BenchError(f"{child.name} did not answer within {limit_seconds:g} s ({last}): {child.log_tail()}")


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time used so far by these processes and all their descendants; the dead count nothing."""
    total = 0.0
    seen: set[int] = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for member in family:
            if member.pid in seen:
                continue
            seen.add(member.pid)
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
    return total


class LoadClient:
    """The load client's process: one JSON line in, one JSON line out."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("load.py"))]
        self._child = Child("load client", command, log=log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def measure(self, **command: Any) -> dict[str, Any]:
        """Runs one command of load.py. Raises: BenchError when the client broke."""
        to, back = self._pipes()
        try:
            to.write(json.dumps(command).encode() + b"\n")
            to.flush()
            answer: dict[str, Any] = json.loads(back.readline())
        except (OSError, ValueError) as error:
            raise BenchError(f"the load client broke: {error}: {self._child.log_tail()}") from error
        return answer

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._child.process.stdin is not None
        assert self._child.process.stdout is not None
        return self._child.process.stdin, self._child.process.stdout

    @property
    def pid(self) -> int:
        return self._child.pid

    def stop(self) -> None:
        self._child.stop()
