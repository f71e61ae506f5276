"""The supervisord configuration of a node, as text.

The repository's ``supervisord.conf`` is ``render(DEFAULT)``, kept by a test: the default node, every path relative to
``%(here)s`` and no variable needed. ``meshctl up`` renders the same text with absolute paths for any other
``MESH_HOME``.

Stop order is descending priority: proxyd, launcherd, electiond, gossipd, tunneld, keeper. So no new request arrives
while engines stop, the goodbye still finds a tunnel, and listening sockets close last. All start at once.
Source: DESIGN.md §2 "Starting"; supervisor's configuration documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import StateError
from shared.paths import LONGEST_SOCKET, REPOSITORY, NodePaths, checked_socket_path

STOP_ORDER = ("proxyd", "launcherd", "electiond", "gossipd", "tunneld")
STOP_WAIT_SECONDS = {"launcherd": 20}
"""launcherd stops every engine before it ends; the others have 10 s."""
LOG_BYTES = "5MB"
LOG_BACKUPS = 3
START_RETRIES = 30
"""Back-off grows by 1 s each time, so a daemon that cannot start is tried for about 8 minutes."""

BAKED_VARIABLES = (
    "MESH_API_PORT",
    "MESH_API_HOST",
    "MESH_CONSOLE_PORT",
    "MESH_PORT",
    "MESH_HOST",
    "MESH_MAX_LOADED_MODELS",
    "MESH_ENGINE",
    "MESHD_PYTHON",
)
"""Variables of the shell that ran ``meshctl up`` which a rendered configuration keeps for later restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLayout:
    """Where one node's supervisord finds and leaves things. Paths are absolute or begin with ``%(here)s``."""

    bin_folder: str
    conf: str
    socket: str
    pid_file: str
    log_folder: str
    """Must exist before supervisord starts: it refuses otherwise."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the daemons' environment."""


DEFAULT = SupervisorLayout(
    bin_folder="%(here)s/bin",
    conf="%(here)s/supervisord.conf",
    socket="%(here)s/.run/supervisor.sock",
    pid_file="%(here)s/.run/supervisord.pid",
    log_folder="%(here)s/.run",
)
"""The repository's own: ``~/.mesh`` does not exist on a fresh machine, ``.run/`` does."""


def layout_of(paths: NodePaths, environ: Mapping[str, str], repository: Path = REPOSITORY) -> SupervisorLayout:
    """The layout ``meshctl up`` renders for ``paths``. Raises: StateError for a path supervisord can't express."""
    checked_socket_path(paths.bus / LONGEST_SOCKET)
    environment = {"MESH_HOME": str(paths.home)}
    environment.update({name: environ[name] for name in BAKED_VARIABLES if environ.get(name)})
    return SupervisorLayout(
        bin_folder=_plain(str(repository / "bin")),
        conf=_plain(str(paths.supervisor_conf)),
        socket=_plain(str(paths.bus / "supervisor.sock")),
        pid_file=_plain(str(paths.bus / "supervisord.pid")),
        log_folder=_plain(str(paths.logs)),
        environment={name: _plain(value) for name, value in environment.items()},
    )


def _plain(value: str) -> str:
    """``value`` if supervisord's parser reads it back unchanged. Raises: StateError.

    ``%`` is refused too: supervisord expands some settings once and the environment twice.
    """
    if any(char in "\"'\\;#%" or not char.isprintable() for char in value):
        raise StateError(
            f"{value!r} has a character that supervisord's configuration cannot hold "
            "(quotes, backslash, percent, ; or #); use a plain path"
        )
    return value


def render(layout: SupervisorLayout) -> str:
    """The text of the configuration file."""
    environment = {
        **layout.environment,
        "MESH_SUPERVISOR_CONF": layout.conf,
        "MESH_LOG_DIR": layout.log_folder,
    }
    pairs = ",".join(f'{name}="{value}"' for name, value in environment.items())
    header = f"""\
; One meshd node: five daemons, and the keeper that holds their listening ports.
; Start: supervisord -c {layout.conf.replace("%(here)s/", "")}    Stop: supervisorctl -c … shutdown, or meshctl down
; Written by shared/supervisor_conf.py; settings of the node belong in mesh.toml.

[unix_http_server]
file={layout.socket}
chmod=0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{layout.socket}

[supervisord]
logfile={layout.log_folder}/supervisord.log
logfile_maxbytes={LOG_BYTES}
logfile_backups={LOG_BACKUPS}
pidfile={layout.pid_file}
childlogdir={layout.log_folder}
environment={pairs}

[eventlistener:keeper]
command="{layout.bin_folder}/keeper"
events=SUPERVISOR_STATE_CHANGE,PROCESS_STATE
buffer_size=200
priority=-1
autorestart=true
startsecs=1
startretries={START_RETRIES}
stopsignal=TERM
stopwaitsecs=10
stdout_logfile=NONE
stderr_logfile={layout.log_folder}/keeper.log
stderr_logfile_maxbytes={LOG_BYTES}
stderr_logfile_backups={LOG_BACKUPS}
"""
    return header + "".join(_program(layout, name) for name in reversed(STOP_ORDER))


def _program(layout: SupervisorLayout, name: str) -> str:
    priority = 100 * (len(STOP_ORDER) - STOP_ORDER.index(name))
    return f"""
[program:{name}]
command="{layout.bin_folder}/{name}"
priority={priority}
autostart=true
autorestart=true
startsecs=1
startretries={START_RETRIES}
stopsignal=TERM
stopwaitsecs={STOP_WAIT_SECONDS.get(name, 10)}
stopasgroup=false
killasgroup=false
redirect_stderr=true
stdout_logfile={layout.log_folder}/{name}.log
stdout_logfile_maxbytes={LOG_BYTES}
stdout_logfile_backups={LOG_BACKUPS}
"""
