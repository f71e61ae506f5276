"""Real daemon processes for tests: started from the source tree, watched by their log, ended by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shared.paths import REPOSITORY
from tests.waiting import wait_until

READY_SECONDS = 20.0
STOP_SECONDS = 10.0


def daemon_environment(home: Path, **env: str) -> dict[str, str]:
    """What a daemon of a private node gets: nothing of the caller's configuration, no fixed port, loopback only."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MESH", "SUPERVISOR_"))}
    return {
        **environment,
        "HOME": str(home),
        "MESH_HOME": str(home),
        "MESH_HOST": "127.0.0.1",
        "MESH_PORT": "0",
        "MESH_API_PORT": "0",
        "MESH_CONSOLE_PORT": "0",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        **env,
    }


@dataclass
class DaemonProcess:
    """One running daemon. ``log_path`` has its stdout and stderr."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def is_ready(self) -> bool:
        return f"{self.name} ready\n" in self.log()

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Raises: AssertionError with the log when the daemon ends or stays silent."""
        try:
            wait_until(
                lambda: self.is_ready() or self.process.poll() is not None,
                seconds,
                f"{self.name} prints its ready line",
            )
            assert self.process.poll() is None, f"{self.name} ended with status {self.process.returncode}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- log of {self.name}\n{self.log()}") from None

    def wait_exit(self, seconds: float = STOP_SECONDS) -> int:
        """Its exit status. Raises: AssertionError with the log."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds:g} s\n{self.log()}") from None

    def end(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def start_daemon_process(name: str, home: Path, **env: str) -> DaemonProcess:
    """``python -m services.NAME`` for the node at ``home``; does not wait for it."""
    log_path = home / f"{name}.test.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"services.{name}"],
            cwd=home,
            env=daemon_environment(home, **env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return DaemonProcess(name, process, log_path)


@contextmanager
def running_daemon(name: str, home: Path, **env: str) -> Iterator[DaemonProcess]:
    """A daemon that has printed ``NAME ready``; its log is shown when the test fails, and it is ended by pid."""
    daemon = start_daemon_process(name, home, **env)
    try:
        daemon.wait_ready()
        yield daemon
    except BaseException:
        print(f"--- log of {name}\n{daemon.log()}")
        raise
    finally:
        daemon.end()
