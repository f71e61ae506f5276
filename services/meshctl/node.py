"""The node a command is about: its state folder, its supervisord, its daemons on the bus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import time
import xmlrpc.client
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.meshctl.log_tail import last_error
from shared.errors import DaemonUnreachable, MeshError, RequestRefused, StateError
from shared.ids import DAEMONS
from shared.io.supervisor import Supervisor
from shared.paths import IPC_PATH_LIMIT_BYTES, REPOSITORY, NodePaths

if TYPE_CHECKING:
    from shared.codec import Message
    from shared.config import NodeConfig
    from shared.messages.daemon import DaemonInfo
    from shared.node_status import NodeStatus, ProcessRow

T = TypeVar("T")

SURVEY_SECONDS = 2.0
"""How long a daemon whose socket is open may take to say how it is."""
SUPERVISOR_SECONDS = 40.0
"""Stopping a process through supervisord answers when it has stopped; launcherd may take 20 s."""
FULL_LOG_DISK_BYTES = 64 * 1024
"""Below this a log's last lines are cut off or missing."""
SUPERVISOR_LOG_BYTES = 512 * 1024


class NodeDown(MeshError):
    """The command needs a running node."""

    code = "node_down"


@dataclass(frozen=True)
class Supervised:
    """A supervisord that answers."""

    supervisor: Supervisor
    pid: int
    log_folder: Path

    def environ(self) -> dict[str, str]:
        """What its daemons were started with; empty where the system does not tell."""
        import psutil

        try:
            return psutil.Process(self.pid).environ()
        except (psutil.Error, OSError):
            return {}


@dataclass
class Survey:
    """What the daemons said; None for one that did not answer."""

    snapshots: dict[str, list[Message] | None] = field(default_factory=dict)
    infos: dict[str, DaemonInfo | None] = field(default_factory=dict)


class Node:
    """One node, found through ``MESH_HOME``. Cheap to make: nothing is asked before it is needed."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Raises: StateError when ``MESH_HOME`` is no absolute path."""
        self.environ = os.environ if environ is None else environ
        self.paths = NodePaths.from_environment(self.environ)

    @property
    def is_default(self) -> bool:
        """Whether this is the node the repository's own ``supervisord.conf`` runs."""
        return self.paths.home == Path(os.path.expanduser("~/.mesh"))

    @property
    def supervisor_confs(self) -> tuple[Path, ...]:
        """The configurations this node may have been started with."""
        rendered = (self.paths.supervisor_conf,)
        return (*rendered, REPOSITORY / "supervisord.conf") if self.is_default else rendered

    @cached_property
    def config(self) -> NodeConfig:
        """Raises: ConfigError."""
        from shared.config import load_config

        return load_config(self.paths.config_file, self.environ)

    # -- supervisord --------------------------------------------------------------------------------------

    def find_supervisord(self) -> Supervised | None:
        """The supervisord that runs this node now, or None."""
        said = _supervisor_record(self.paths)
        for url, log_folder in (
            (str(said.get("url") or ""), Path(str(said.get("log_dir") or self.paths.logs))),
            (f"unix://{self.paths.bus / 'supervisor.sock'}", self.paths.logs),
            *([(f"unix://{REPOSITORY / '.run' / 'supervisor.sock'}", REPOSITORY / ".run")] if self.is_default else []),
        ):
            found = self._supervisord_at(url, log_folder)
            if found is not None:
                return found
        return None

    def _supervisord_at(self, url: str, log_folder: Path) -> Supervised | None:
        path = url.removeprefix("unix://")
        if not url.startswith("unix://") or not listens(Path(path)):
            return None
        supervisor = Supervisor(url, timeout_seconds=SUPERVISOR_SECONDS)
        try:
            pid = int(supervisor.call("getPID"))
        except (OSError, xmlrpc.client.Error):
            return None
        # A socket in the repository may belong to a supervisord that was started with another MESH_HOME.
        if self._home_of(pid) not in (None, self.paths.home):
            return None
        return Supervised(supervisor, pid, log_folder)

    def _home_of(self, pid: int) -> Path | None:
        """The ``MESH_HOME`` that supervisord's children get; None when it can't be known."""
        import psutil

        try:
            process = psutil.Process(pid)
            environ, command = process.environ(), process.cmdline()
        except (psutil.Error, OSError):
            return None
        conf = next((Path(part) for part in command if part.endswith("/supervisord.conf")), None)
        if conf is not None and (written := _home_in(conf)) is not None:
            return written
        text = environ.get("MESH_HOME")
        if text is None and environ.get("HOME", "") != self.environ.get("HOME", ""):
            return None
        return Path(os.path.expanduser(text or "~/.mesh"))

    @cached_property
    def supervised(self) -> Supervised | None:
        return self.find_supervisord()

    def running(self) -> Supervised:
        """Raises: NodeDown."""
        if self.supervised is None:
            raise NodeDown(f"this node is not running (MESH_HOME={self.paths.home}); start it with 'meshctl up'")
        return self.supervised

    @property
    def log_folder(self) -> Path:
        """Where supervisord keeps the daemons' logs, running or not."""
        if self.supervised is not None:
            return self.supervised.log_folder
        said = _supervisor_record(self.paths).get("log_dir")
        if isinstance(said, str) and Path(said).is_dir():
            return Path(said)
        return REPOSITORY / ".run" if self.is_default and not self.paths.logs.is_dir() else self.paths.logs

    # -- the bus ------------------------------------------------------------------------------------------

    def ask(self, daemon: str, message: Message, *, deadline_seconds: float = 5.0) -> Message:
        """One request, one reply. Raises: RequestRefused, DaemonUnreachable, NodeDown."""
        return run(self._ask(daemon, message, deadline_seconds))

    async def _ask(self, daemon: str, message: Message, deadline_seconds: float) -> Message:
        from shared.io.bus import BusClient

        self.running()
        client = BusClient(daemon, self.paths)
        try:
            return await client.request(message, deadline_seconds=deadline_seconds)
        finally:
            client.close()

    def ask_all(
        self, message: Message, daemons: Iterable[str] = DAEMONS, *, deadline_seconds: float = SURVEY_SECONDS
    ) -> dict[str, Message | MeshError]:
        """The same request to several daemons at once: reply, or why there is none."""

        async def one(daemon: str) -> Message | MeshError:
            if not listens(_request_path(self.paths, daemon)):
                return DaemonUnreachable(f"{daemon} is not running; see 'meshctl status'")
            try:
                return await self._ask(daemon, message, deadline_seconds)
            except (DaemonUnreachable, RequestRefused) as error:
                return error

        async def everyone() -> dict[str, Message | MeshError]:
            names = list(daemons)
            return dict(zip(names, await asyncio.gather(*(one(name) for name in names)), strict=True))

        return run(everyone())

    def survey(self, daemons: Iterable[str] = DAEMONS) -> Survey:
        """Ask every daemon for its info and its published state, all at once."""
        return run(survey(self.paths, daemons))

    def is_down(self) -> bool:
        """Whether neither supervisord nor any daemon of this node is there. Costs next to nothing."""
        return self.supervised is None and not any(listens(_request_path(self.paths, name)) for name in DAEMONS)

    def status(self) -> NodeStatus:
        """Whatever can be known now, also of a node that is down."""
        from shared.status_view import build_status, process_rows

        found = self.supervised
        rows: list[ProcessRow] = []
        if found is not None:
            try:
                rows = process_rows(found.supervisor.processes(), restart_counts(found.supervisor))
                rows = [_with_own_words(row) for row in rows]
            except (OSError, xmlrpc.client.Error):
                self.__dict__.pop("supervised", None)
        asked = self.survey()
        return build_status(asked.snapshots, asked.infos, rows)


def _with_own_words(row: ProcessRow) -> ProcessRow:
    """supervisord only knows that a process ended; why is in the process's log."""
    if row.state not in ("backoff", "fatal", "exited", "starting") or not row.log_path:
        return row
    log = Path(row.log_path)
    with contextlib.suppress(OSError):
        if row.state != "starting" and shutil.disk_usage(log.parent).free < FULL_LOG_DISK_BYTES:
            # What the process said, if anything, is cut off or missing in its log.
            return replace(row, reason=f"the disk of {log.parent} is full; free some space there")
    return replace(row, reason=last_error(log) or row.reason)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def survey(paths: NodePaths, daemons: Iterable[str] = DAEMONS) -> Survey:
    """What each daemon says about itself; None for those that do not answer."""
    said = Survey()
    awake = []
    for name in daemons:
        said.snapshots[name] = said.infos[name] = None
        if listens(_request_path(paths, name)):
            awake.append(name)
    if awake:
        await _ask_each(paths, awake, said)
    return said


async def _ask_each(paths: NodePaths, daemons: Iterable[str], said: Survey) -> None:
    from shared import codec
    from shared.errors import SchemaError
    from shared.io.bus import BusClient
    from shared.messages.daemon import DaemonInfo, GetDaemonInfo, GetSnapshot, Snapshot

    async def one(name: str) -> None:
        client = BusClient(name, paths)
        try:
            info, snapshot = await asyncio.gather(
                client.request(GetDaemonInfo(), deadline_seconds=SURVEY_SECONDS),
                client.request(GetSnapshot(), deadline_seconds=SURVEY_SECONDS),
            )
        except (DaemonUnreachable, RequestRefused):
            return
        finally:
            client.close()
        if isinstance(info, DaemonInfo) and isinstance(snapshot, Snapshot):
            said.infos[name] = info
            messages = said.snapshots[name] = []
            for item in snapshot.items:
                try:
                    messages.append(codec.decode(item))
                except SchemaError:
                    continue  # A newer daemon's message that this meshctl does not know yet.

    await asyncio.gather(*(one(name) for name in daemons))


def listens(path: Path) -> bool:
    """Whether a process accepts connections on this unix socket. A dead daemon's socket file stays behind."""
    if len(os.fsencode(path)) > IPC_PATH_LIMIT_BYTES:
        return False
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(1.0)
    try:
        probe.connect(str(path))
    except OSError:
        return False
    finally:
        probe.close()
    return True


def _request_path(paths: NodePaths, daemon: str) -> Path:
    return paths.bus / f"{daemon}.req"


def _supervisor_record(paths: NodePaths) -> dict[str, Any]:
    """What the keeper wrote about this node's supervisord; empty when there is nothing readable."""
    try:
        value = json.loads((paths.bus / "supervisor.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _home_in(conf: Path) -> Path | None:
    """The ``MESH_HOME`` that a rendered configuration sets; the repository's own sets none."""
    try:
        found = re.search(r'MESH_HOME="([^"]*)"', conf.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return Path(found.group(1)) if found else None


def restart_counts(supervisor: Supervisor) -> dict[str, int] | None:
    """Starts of each process after its first, from supervisord's own log; None when the log was rotated since."""
    text = str(supervisor.call("readLog", -SUPERVISOR_LOG_BYTES, 0))
    _before, started, lines = text.rpartition("supervisord started with pid")
    if not started:
        return None
    counts: dict[str, int] = {}
    for line in lines.splitlines():
        _, spawned, rest = line.partition("spawned: '")
        if spawned:
            name = rest.partition("'")[0]
            counts[name] = counts.get(name, 0) + 1
    return {name: count - 1 for name, count in counts.items()}


def wait_until(condition: Callable[[], T | None], seconds: float, *, every_seconds: float = 0.05) -> T | None:
    """The first result that is not None, or None after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result is not None or time.monotonic() > deadline:
            return result
        time.sleep(every_seconds)


def checked_home(paths: NodePaths) -> None:
    """Create the state folders. Raises: StateError."""
    paths.prepare()
    make_folder(paths.downloads)


def make_folder(folder: Path) -> None:
    """Raises: StateError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot create {folder}: {error.strerror or error}; fix its permissions") from error
