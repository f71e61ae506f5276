"""``proxyd`` as supervisord sees it: a stub of 8 MB that starts the worker, so that supervisord may stop and start
it at will while the worker finishes its streams. Standard library only.

===========================  ==============================================================================
what happens                 what the stub does
===========================  ==============================================================================
``supervisorctl restart``    exits at once; the worker goes on accepting until the next one serves
the node goes down           gives the worker 3 s to end its requests, waits for it, exits
SIGKILL of the stub          nothing: the worker sees its end of the socket pair close, and goes on as above
the worker dies              starts another at once, with a growing pause when it dies young
the worker can't start       exits with its status, so that supervisord counts the failed start
===========================  ==============================================================================
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time

from shared.errors import MeshError
from shared.io import log
from shared.io.daemon_process import start_process, stop_kind

NAME = "proxyd"
STUB_VARIABLE = "MESH_PROXYD_STUB"
"""Number of the worker's end of the socket pair."""
SERVING = b"serving\n"
STOP_SECONDS = 5.0
"""The worker closes its requests within 3 s of SIGTERM; then it is killed."""
YOUNG_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 5.0


class Worker:
    """One worker process and the socket pair that ties it to this stub."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.served = False
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.link = ours
        # A session of its own: supervisord's killasgroup must not reach a worker that still has streams.
        self.process = subprocess.Popen(
            [sys.executable, *_own_flags(), "-m", "services.proxyd.worker"],
            env={**os.environ, STUB_VARIABLE: str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def read(self) -> bool:
        """Take what the worker says. False once it has closed its end."""
        try:
            data = self.link.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.served = self.served or SERVING in data
        return bool(data)

    def end(self, grace_seconds: float) -> int:
        """SIGTERM, wait, SIGKILL. The exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            return self.process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            log.warning("worker_killed", pid=self.process.pid, reason=f"did not end within {grace_seconds:g} s")
            self.process.kill()
            return self.process.wait()


def _own_flags() -> list[str]:
    """The isolation that the shim asked for: no current directory and no user packages on the import path."""
    flags = ["-P"] if sys.flags.safe_path else []
    return [*flags, "-s"] if sys.flags.no_user_site else flags


class Stub:
    """Keeps one worker running until SIGTERM."""

    def __init__(self) -> None:
        self._signals, wakeup = socket.socketpair()
        self._signals.setblocking(False)
        wakeup.setblocking(False)
        self._wakeup = wakeup
        signal.set_wakeup_fd(wakeup.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self) -> int:
        """The exit status."""
        pause, served_before = 0.0, False
        while True:
            worker = Worker()
            status = self._watch(worker)
            if status is None:
                return 0
            if not worker.served and not served_before:
                return status if status > 0 else 1
            served_before = True
            young = time.monotonic() - worker.started < YOUNG_SECONDS
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2 + 0.25) if young else 0.0
            log.warning("worker_died", pid=worker.process.pid, status=status, pause_seconds=pause)
            if pause and self._terminated_within(pause):
                return 0

    def _watch(self, worker: Worker) -> int | None:
        """Until the worker ends (its exit status) or this stub is to end (None)."""
        while True:
            readable, _, _ = select.select([worker.link, self._signals], [], [])
            if self._signals in readable:
                self._stop(worker)
                return None
            if worker.link in readable and not worker.read():
                worker.link.close()
                # Its end closed: it has exited, or is about to.
                return worker.end(STOP_SECONDS)

    def _stop(self, worker: Worker) -> None:
        kind = stop_kind()
        log.info("stopping", daemon=NAME, kind=kind, worker=worker.process.pid)
        if kind != "alone":
            worker.end(STOP_SECONDS)

    def _terminated_within(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._signals], [], [], seconds)
        return bool(readable)


def main() -> None:
    try:
        _paths, lock = start_process(NAME)
    except MeshError as error:
        log.error("cannot_start", daemon=NAME, code=error.code, reason=error.detail)
        raise SystemExit(1) from None
    status = Stub().run()
    del lock
    # Not sys.exit: a Popen object of a worker that lives on must not be waited for.
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
