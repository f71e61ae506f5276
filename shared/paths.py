"""Where a node keeps its state. One frozen object built from ``MESH_HOME``; nobody else joins these paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import StateError

IPC_PATH_LIMIT_BYTES = 100
"""Linux allows 107 bytes for a unix socket path, macOS 103."""
LONGEST_SOCKET = "supervisor.sock.4194304"
"""supervisord binds its socket under a name with its pid first and links it to the final one."""
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class NodePaths:
    """All paths of one node. ``home`` is absolute."""

    home: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> NodePaths:
        """``MESH_HOME`` or ``~/.mesh``. Raises: StateError when it is not an absolute path."""
        text = environ.get("MESH_HOME") or "~/.mesh"
        home = Path(os.path.expanduser(text))
        if not home.is_absolute():
            raise StateError(f"MESH_HOME={text} is not an absolute path; set it to one like $HOME/.mesh")
        return cls(home)

    @property
    def config_file(self) -> Path:
        return self.home / "mesh.toml"

    @property
    def bus(self) -> Path:
        """0700 directory of the ZeroMQ and unix sockets."""
        return self.home / "run"

    @property
    def state(self) -> Path:
        """Small files the daemons keep between starts."""
        return self.home / "state"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def engines(self) -> Path:
        """Records and logs of engine processes."""
        return self.home / "engines"

    @property
    def downloads(self) -> Path:
        """Model files that meshd fetched."""
        return self.home / "models"

    @property
    def keys_file(self) -> Path:
        return self.home / "api_keys.json"

    @property
    def console_token_file(self) -> Path:
        """0600; whoever can read it may change things through the management port."""
        return self.home / "console_token"

    @property
    def supervisor_conf(self) -> Path:
        """The configuration ``meshctl up`` renders for this node."""
        return self.home / "supervisord.conf"

    @property
    def keeper_socket(self) -> Path:
        return self.bus / "keeper.sock"

    @property
    def data_socket(self) -> Path:
        """Where proxyd and launcherd reach tunneld's data plane."""
        return self.bus / "tunneld.data"

    @property
    def guide_folder(self) -> Path:
        return REPOSITORY / "docs" / "guide"

    def publisher(self, daemon: str) -> str:
        return self._ipc(f"{daemon}.pub")

    def requests(self, daemon: str) -> str:
        return self._ipc(f"{daemon}.req")

    def lock_file(self, daemon: str) -> Path:
        return self.bus / f"{daemon}.lock"

    def _ipc(self, name: str) -> str:
        return f"ipc://{checked_socket_path(self.bus / name)}"

    def prepare(self) -> None:
        """Create the directories, private ones 0700. Raises: StateError."""
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self.bus, self.state, self.engines):
                folder.mkdir(mode=0o700, exist_ok=True)
                folder.chmod(0o700)
            probe = self.state / f".probe-{os.getpid()}"
            probe.write_bytes(b"meshd" * 200)
            probe.unlink()
        except OSError as error:
            raise StateError(
                f"cannot use {self.home} for the node's state: {error.strerror or error}. "
                "Free some space or fix its permissions, or set MESH_HOME to another folder"
            ) from error
        checked_socket_path(self.bus / LONGEST_SOCKET)


def checked_socket_path(path: Path) -> Path:
    """``path`` if a unix socket can live there. Raises: StateError."""
    size = len(os.fsencode(path))
    if size > IPC_PATH_LIMIT_BYTES:
        raise StateError(
            f"socket path {path} is {size} bytes long, the limit is {IPC_PATH_LIMIT_BYTES}; "
            "set MESH_HOME to a shorter path"
        )
    return path
