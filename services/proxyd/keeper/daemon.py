"""The keeper's shell: sockets, supervisord's events, signals. Standard library only, 8 MB, one thread, no asyncio.

Its stdout belongs to supervisord's event protocol, so it logs to stderr. It reads no configuration: the worker that
joins has just read it, and says what it wants.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from services.proxyd.io.keeper_link import Link, LinkClosed
from services.proxyd.keeper import custody, events
from services.proxyd.keeper.custody import Custody, Effect, Offer, Stimulus, WantedListener
from shared.errors import MeshError
from shared.io import log
from shared.io.daemon_process import start_process, stop_kind
from shared.io.keys_file import KeysFile, write_private
from shared.paths import NodePaths, checked_socket_path

NAME = "keeper"
BACKLOG = 2048
"""Connections that may wait while no worker runs; the kernel may cap it (net.core.somaxconn)."""
STOP_SECONDS = 6.0
"""Workers close their requests within 3 s when the node goes down; whoever is left then is killed."""


def main() -> None:
    """Run until SIGTERM. Exit status 1 with a line in the log when it cannot start."""
    log.use_stream(sys.stderr)
    try:
        paths, lock = start_process(NAME)
        keeper = Keeper(paths)
    except MeshError as error:
        log.error("cannot_start", daemon=NAME, code=error.code, reason=error.detail)
        raise SystemExit(1) from None
    keeper.run()
    del lock


def _remembered(paths: NodePaths) -> dict[str, int]:
    try:
        ports = json.loads((paths.state / "ports.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(ports, dict):
        return {}
    return {name: port for name, port in ports.items() if isinstance(port, int) and 0 < port <= 65535}


def _wanted_of(message: dict[str, Any]) -> tuple[WantedListener, ...]:
    return tuple(
        WantedListener(
            name=str(entry["name"]),
            host=str(entry["host"]),
            port=int(entry["port"]),
            needs_key=bool(entry["needs_key"]),
        )
        for entry in message.get("wanted", ())
    )


class Keeper:
    """Performs what :class:`Custody` decides."""

    def __init__(self, paths: NodePaths) -> None:
        """Raises: StateError when the keeper's own socket can't be made."""
        self._paths = paths
        self._core = Custody(_remembered(paths))
        self._keys = KeysFile(paths.keys_file)
        self._sockets: dict[str, socket.socket] = {}
        self._links: dict[int, Link] = {}
        self._pids: dict[int, int] = {}
        self._logs: dict[int, int] = {}
        """Each worker's standard output."""
        self._offered: dict[str, int] = {}
        self._joined = 0
        self._stopping_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._door = self._open_door(checked_socket_path(paths.keeper_socket))
        self._selector.register(self._door, selectors.EVENT_READ, self._accept)
        self._signals, wakeup = socket.socketpair()
        self._signals.setblocking(False)
        wakeup.setblocking(False)
        self._wakeup = wakeup
        signal.set_wakeup_fd(wakeup.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._selector.register(self._signals, selectors.EVENT_READ, self._terminated)
        self._reader = events.EventReader()
        if os.environ.get("SUPERVISOR_SERVER_URL"):
            self._introduce()
            os.write(1, events.READY)
            self._selector.register(0, selectors.EVENT_READ, self._event)

    def run(self) -> None:
        """Until SIGTERM; raises SystemExit."""
        log.info("ready", daemon=NAME, pid=os.getpid())
        while True:
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            now = time.monotonic()
            if self._stopping_until is not None and (not self._links or now >= self._stopping_until):
                self._kill_the_rest()
                raise SystemExit(0)
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= now and self._stopping_until is None:
                if self._core.waits_for_key:
                    self._do(custody.KeysSeen(exist=self._keys.ring(now).required))
                self._do(custody.Tick())

    def _timeout(self) -> float | None:
        due = self._stopping_until if self._stopping_until is not None else self._core.next_deadline()
        return None if due is None else max(0.0, due - time.monotonic())

    # -- stimuli -------------------------------------------------------------------------------------------

    def _do(self, stimulus: Stimulus) -> None:
        pending = [stimulus]
        while pending:
            for effect in self._core.handle(pending.pop(0), now=time.monotonic()):
                outcome = self._perform(effect)
                if outcome is not None:
                    pending.append(outcome)

    def _accept(self) -> None:
        try:
            connection, _ = self._door.accept()
        except OSError:
            return
        self._joined += 1
        worker, link = self._joined, Link(connection)
        self._links[worker] = link
        self._selector.register(link, selectors.EVENT_READ, lambda: self._receive(worker))

    def _receive(self, worker: int) -> None:
        link = self._links.get(worker)
        if link is None:
            return
        try:
            for message in link.receive():
                if message.get("type") == "hello":
                    self._hello(worker, link, message)
                elif message.get("type") == "serving":
                    self._do(custody.WorkerServing(worker))
                elif message.get("type") == "wanted":
                    self._do(custody.KeysSeen(exist=self._keys.ring(time.monotonic()).required))
                    self._do(custody.WorkerWants(worker, _wanted_of(message)))
        except (LinkClosed, KeyError, TypeError, ValueError) as error:
            self._lost(worker, str(error))

    def _hello(self, worker: int, link: Link, message: dict[str, Any]) -> None:
        offers = tuple(Offer(str(offer["name"]), str(offer["host"]), int(offer["port"])) for offer in message["offers"])
        *descriptors, log_descriptor = link.take_descriptors(len(offers) + 1)
        self._do(custody.KeysSeen(exist=self._keys.ring(time.monotonic()).required))
        self._offered = {offer.name: number for offer, number in zip(offers, descriptors, strict=True)}
        self._pids[worker] = int(message["pid"])
        self._logs[worker] = log_descriptor
        self._do(
            custody.WorkerJoined(
                worker,
                float(message["started_seconds"]),
                bool(message.get("serving")),
                offers,
                _wanted_of(message),
            )
        )
        for number in self._offered.values():
            os.close(number)
        self._offered = {}

    def _lost(self, worker: int, why: str) -> None:
        link = self._links.pop(worker, None)
        if link is None:
            return
        self._forget(worker, link, why)
        self._do(custody.WorkerLeft(worker))

    def _forget(self, worker: int, link: Link, why: str) -> None:
        self._selector.unregister(link)
        link.close()
        if worker in self._logs:
            os.close(self._logs.pop(worker))
        log.info("worker_left", pid=self._pids.pop(worker, 0), reason=why)

    def _terminated(self) -> None:
        try:
            self._signals.recv(64)
        except BlockingIOError:
            return
        kind = stop_kind()
        log.info("stopping", daemon=NAME, kind=kind)
        if kind == "alone":
            # Workers hold the sockets; the next keeper gets them from there.
            raise SystemExit(0)
        self._node_stops()

    def _node_stops(self) -> None:
        if self._stopping_until is None:
            self._do(custody.NodeStopping())
        self._stopping_until = time.monotonic() + STOP_SECONDS

    def _event(self) -> None:
        data = os.read(0, 65536)
        if not data:
            log.warning("supervisord_gone", reason="its event pipe closed")
            self._selector.unregister(0)
            self._node_stops()
            return
        for event in self._reader.feed(data):
            notice = events.notice_of(event)
            if notice is not None:
                write = {"warning": log.warning, "error": log.error}.get(notice.level, log.info)
                write(notice.event, daemon=notice.daemon, reason=notice.reason)
            if events.is_node_stopping(event):
                # Also reaches workers that only finish old streams. Our own SIGTERM comes last.
                self._do(custody.NodeStopping())
            os.write(1, events.HANDLED + events.READY)

    # -- effects -------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> Stimulus | None:
        match effect:
            case custody.BindPort(name=name, host=host, port=port):
                return self._bind(name, host, port)
            case custody.KeepOffer(name=name):
                self._sockets[name] = socket.socket(fileno=self._offered.pop(name))
            case custody.DropSocket(name=name):
                self._sockets.pop(name).close()
            case custody.SendListeners(worker=worker):
                listeners = [
                    {"name": name, "host": state.wanted.host, "port": state.port, "reason": state.reason}
                    for name, state in self._core.listeners.items()
                ]
                numbers = [self._sockets[name].fileno() for name, state in self._core.listeners.items() if state.port]
                return self._tell(
                    worker,
                    {"type": "listeners", "listeners": listeners, "others": self._core.others_serve(worker)},
                    numbers,
                )
            case custody.TellRelease(worker=worker, name=name):
                return self._tell(worker, {"type": "release", "name": name})
            case custody.TellDrain(worker=worker, successor=successor):
                numbers = [self._logs[successor]] if successor in self._logs else []
                return self._tell(worker, {"type": "drain", "log": bool(numbers)}, numbers)
            case custody.TellStop(worker=worker):
                return self._tell(worker, {"type": "stop"})
            case custody.RememberPorts(ports=ports):
                self._remember(dict(ports))
            case custody.Report(name=name, host=host, port=port, reason=reason):
                if reason:
                    log.error("not_listening", listener=name, host=host, port=port, reason=reason)
                else:
                    log.info("listening", listener=name, host=host, port=port)
        return None

    def _bind(self, name: str, host: str, port: int) -> Stimulus:
        address = "127.0.0.1" if host == "localhost" else host
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            return custody.BindFailed(name, port, in_use, getattr(error, "strerror", None) or str(error))
        listener.setblocking(False)
        self._sockets[name] = listener
        return custody.Bound(name, listener.getsockname()[1])

    def _tell(self, worker: int, message: dict[str, Any], numbers: list[int] | None = None) -> Stimulus | None:
        link = self._links.get(worker)
        if link is None:
            return None
        try:
            link.send(message, numbers)
        except LinkClosed as error:
            del self._links[worker]
            self._forget(worker, link, str(error))
            return custody.WorkerLeft(worker)
        return None

    def _remember(self, ports: dict[str, int]) -> None:
        try:
            write_private(self._paths.state / "ports.json", json.dumps(ports).encode())
        except MeshError as error:
            log.warning("ports_not_kept", reason=error.detail)

    def _kill_the_rest(self) -> None:
        for worker in list(self._links):
            pid = self._pids.get(worker, 0)
            if pid <= 1:
                continue
            # Its connection is still open, so the pid is still its own.
            log.warning("worker_killed", pid=pid, reason=f"did not end within {STOP_SECONDS:g} s of the node's stop")
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError as error:
                log.warning("worker_not_killed", pid=pid, reason=str(error))

    # -- start ---------------------------------------------------------------------------------------------

    def _open_door(self, path: Path) -> socket.socket:
        path.unlink(missing_ok=True)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.bind(str(path))
        path.chmod(0o600)
        door.listen(64)
        door.setblocking(False)
        return door

    def _introduce(self) -> None:
        """Tell meshctl which supervisord runs this node, and where its logs are."""
        folder = os.environ.get("MESH_LOG_DIR", "")
        note = {
            "url": os.environ["SUPERVISOR_SERVER_URL"],
            "pid": os.getppid(),
            "conf": os.environ.get("MESH_SUPERVISOR_CONF", ""),
            "log_dir": folder,
        }
        try:
            write_private(self._paths.bus / "supervisor.json", json.dumps(note).encode())
            if folder and Path(folder) != self._paths.logs and not os.path.lexists(self._paths.logs):
                self._paths.logs.symlink_to(folder)
        except (MeshError, OSError) as error:
            log.warning("supervisor_not_noted", reason=str(error))
