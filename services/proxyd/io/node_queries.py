"""What the management port asks the daemons, supervisord and the log files of this node."""

from __future__ import annotations

import asyncio
import os
import xmlrpc.client
from pathlib import Path
from typing import Any

from shared import codec
from shared.errors import DaemonUnreachable, MeshError, RequestRefused, SchemaError, StateError
from shared.ids import DAEMONS, PeerId
from shared.io.bus import BusClient
from shared.io.daemon_process import supervisor_from_environment
from shared.io.supervisor import Supervisor
from shared.messages.daemon import (
    ConfigReloaded,
    DaemonInfo,
    ExplainSubject,
    Explanation,
    GetDaemonInfo,
    GetSnapshot,
    GetStory,
    ReloadConfig,
    Snapshot,
    Story,
)
from shared.messages.mesh import MemberChanged
from shared.messages.tunnel import AdminAction, AdminReply, AdminRequest
from shared.node_status import NodeStatus, ProcessRow
from shared.paths import NodePaths
from shared.peer_names import find_peer, member_names, subjects_by_daemon
from shared.status_view import build_status, process_rows

SURVEY_SECONDS = 1.5
NODE_SECONDS = 15.0
"""tunneld gives up on another node after 10 s, with the better words."""
RELOAD_SECONDS = 10.0
LOG_TAIL_BYTES = 2 * 1024 * 1024
PROCESSES = (*DAEMONS, "keeper")


class UnknownDaemon(MeshError):
    """There is no process of that name."""

    code = "unknown_daemon"


class NodeQueries:
    """Clients of all five daemons, proxyd included: it answers itself over the same bus."""

    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths
        self._clients = {name: BusClient(name, paths) for name in DAEMONS}

    async def ask(self, daemon: str, message: codec.Message, *, deadline_seconds: float) -> codec.Message:
        """Raises: RequestRefused, DaemonUnreachable, UnknownDaemon."""
        client = self._clients.get(daemon)
        if client is None:
            raise UnknownDaemon(f"there is no daemon {daemon[:40]!r}; there are {', '.join(DAEMONS)}")
        return await client.request(message, deadline_seconds=deadline_seconds)

    async def ask_all(
        self, message: codec.Message, *, deadline_seconds: float = SURVEY_SECONDS
    ) -> dict[str, codec.Message | MeshError]:
        """The same question to every daemon: its answer, or why there is none."""

        async def one(name: str) -> codec.Message | MeshError:
            try:
                return await self.ask(name, message, deadline_seconds=deadline_seconds)
            except (DaemonUnreachable, RequestRefused) as error:
                return error

        answers = await asyncio.gather(*(one(name) for name in DAEMONS))
        return dict(zip(DAEMONS, answers, strict=True))

    async def status(self) -> NodeStatus:
        """Everything that can be known now; what does not answer is shown as silent."""
        snapshots, infos, rows = await asyncio.gather(
            self.ask_all(GetSnapshot()), self.ask_all(GetDaemonInfo()), asyncio.to_thread(_processes)
        )
        return build_status(
            {name: _messages(answer) for name, answer in snapshots.items()},
            {name: answer if isinstance(answer, DaemonInfo) else None for name, answer in infos.items()},
            rows,
        )

    async def explain(self, subject: str) -> dict[str, list[str]]:
        """Sentences by daemon, of those who know something about it."""
        told = subjects_by_daemon(subject, await self._names())
        answers = await asyncio.gather(*(self._explained(name, told.get(name, subject)) for name in DAEMONS))
        return {name: sentences for name, sentences in zip(DAEMONS, answers, strict=True) if sentences}

    async def _explained(self, daemon: str, subject: str) -> list[str]:
        try:
            answer = await self.ask(daemon, ExplainSubject(subject=subject), deadline_seconds=SURVEY_SECONDS)
        except (DaemonUnreachable, RequestRefused):
            return []
        return list(answer.sentences) if isinstance(answer, Explanation) else []

    async def snapshot(self, daemon: str) -> list[codec.Message]:
        """What a daemon has published. Raises: RequestRefused, DaemonUnreachable."""
        return _messages(await self.ask(daemon, GetSnapshot(), deadline_seconds=SURVEY_SECONDS)) or []

    # -- the mesh -----------------------------------------------------------------------------------------

    async def _names(self) -> dict[PeerId, str]:
        """Every node that gossipd lists; none while it does not answer."""
        try:
            members = await self.snapshot("gossipd")
        except (DaemonUnreachable, RequestRefused):
            return {}
        return member_names(item for item in members if isinstance(item, MemberChanged))

    async def other_node(self, name: str | None) -> PeerId | None:
        """Whom a person means; None for this node and without a name. Raises: RequestRefused, DaemonUnreachable."""
        if name is None:
            return None
        members = [item for item in await self.snapshot("gossipd") if isinstance(item, MemberChanged)]
        peer_id = find_peer(name, member_names(members))
        own = any(item.is_self and item.announcement.peer_id == peer_id for item in members)
        return None if own else peer_id

    async def ask_node(
        self, peer_id: PeerId, action: AdminAction, subject: str, *, lines: int = 100
    ) -> dict[str, list[str]]:
        """Another node's answer through the two tunnelds. Raises: RequestRefused with its words, DaemonUnreachable."""
        request = AdminRequest(peer=peer_id, action=action, subject=subject, lines=lines)
        reply = await self.ask("tunneld", request, deadline_seconds=NODE_SECONDS)
        return {"lines": list(reply.lines) if isinstance(reply, AdminReply) else []}

    async def configure(self, *, client: bool = False) -> None:
        """Give an idle node its ``mesh.toml``, so that it takes part. Raises: StateError."""
        text = CLIENT_FILE if client else ACTIVE_FILE
        if await asyncio.to_thread(_create, self._paths.config_file, text):
            await self.reload()

    async def story(self, daemon: str, limit: int) -> Story:
        """Raises: RequestRefused, DaemonUnreachable, UnknownDaemon."""
        answer = await self.ask(daemon, GetStory(limit=limit), deadline_seconds=SURVEY_SECONDS)
        assert isinstance(answer, Story)
        return answer

    async def reload(self) -> dict[str, dict[str, Any]]:
        """What each daemon made of the changed ``mesh.toml``."""
        answers = await self.ask_all(ReloadConfig(), deadline_seconds=RELOAD_SECONDS)
        result: dict[str, dict[str, Any]] = {}
        for name, answer in answers.items():
            if isinstance(answer, ConfigReloaded):
                result[name] = {"changed": list(answer.changed), "needs_restart": list(answer.needs_restart)}
            else:
                result[name] = {"error": answer.detail if isinstance(answer, MeshError) else "nonsense answer"}
        return result

    async def log_lines(self, daemon: str, lines: int) -> list[str]:
        """The newest lines of a process's log. Raises: UnknownDaemon, StateError."""
        checked = known_process(daemon)
        rows = {row.name: row for row in await asyncio.to_thread(_processes)}
        path = rows[checked].log_path if checked in rows else ""
        if not path:
            raise StateError(f"supervisord does not say where {checked} logs; see 'meshctl logs {checked}'")
        return await asyncio.to_thread(_tail, Path(path), lines)

    async def restart(self, daemon: str) -> None:
        """Stop and start one process through supervisord. Raises: UnknownDaemon, StateError."""
        checked = known_process(daemon)
        supervisor = supervisor_from_environment()
        if supervisor is None:
            raise StateError("this node is not run by supervisord; restart the daemon the way it was started")
        try:
            await asyncio.to_thread(_restart, supervisor, checked)
        except (OSError, xmlrpc.client.Error) as error:
            raise StateError(f"supervisord did not restart {checked}: {error}") from error

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


ACTIVE_FILE = "# This node takes part in a mesh. 'meshctl config show' lists every setting.\n"
CLIENT_FILE = ACTIVE_FILE + "\n[node]\nclient = true\n"


def _create(path: Path, text: str) -> bool:
    """Whether the file was missing and is there now, whole. Raises: StateError."""
    if path.exists():
        return False
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        # A link fails where a file is: what meshctl wrote meanwhile stays.
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
    finally:
        draft.unlink(missing_ok=True)
    return True


def known_process(name: str) -> str:
    """``name`` as this program spells it, never the caller's string. Raises: UnknownDaemon."""
    for known in PROCESSES:
        if name == known:
            return known
    raise UnknownDaemon(f"there is no process {name[:40]!r}; there are {', '.join(PROCESSES)}")


def _processes() -> list[ProcessRow]:
    supervisor = supervisor_from_environment()
    if supervisor is None:
        return []
    try:
        return process_rows(supervisor.processes())
    except (OSError, xmlrpc.client.Error):
        return []


def _restart(supervisor: Supervisor, name: str) -> None:
    try:
        supervisor.call("stopProcess", name, True)
    except xmlrpc.client.Fault as fault:
        if "NOT_RUNNING" not in str(fault.faultString):
            raise
    supervisor.call("startProcess", name, False)


def _tail(path: Path, lines: int) -> list[str]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            data = file.read()
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror or error}") from error
    return data.decode("utf-8", "replace").splitlines()[-lines:]


def _messages(answer: codec.Message | MeshError) -> list[codec.Message] | None:
    if not isinstance(answer, Snapshot):
        return None
    messages = []
    for item in answer.items:
        try:
            messages.append(codec.decode(item))
        except SchemaError:
            continue  # A newer daemon's message that this version does not know yet.
    return messages
