"""``up``: write ``mesh.toml``, look for what would go wrong, start supervisord, wait until the node answers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from services.meshctl.config_file import Changes, override_variables, update_config
from services.meshctl.http_client import answers
from services.meshctl.leftovers import locked_daemons
from services.meshctl.machine import bind_problem, describe, engine_found, port_owners, wanted_ports
from services.meshctl.node import Node, checked_home, listens, make_folder, wait_until
from services.meshctl.option_values import checked_args, checked_limits
from services.meshctl.output import Waiting, age, clean, print_json, progress, size
from services.meshctl.pull import can_be_pulled, pull_model
from services.meshctl.reload import Reloaded, reload_daemons, say_reloaded
from shared.config import ENVIRONMENT, NodeConfig, heeded, parse_limits
from shared.errors import MeshError, StateError
from shared.io.keys_file import load_keys
from shared.llamacpp_args import split_args
from shared.messages.downloads import PullModel
from shared.messages.models import RescanModels
from shared.node_status import DaemonStatus, NodeStatus
from shared.paths import IPC_PATH_LIMIT_BYTES, LONGEST_SOCKET, REPOSITORY
from shared.status_view import to_jsonable
from shared.supervisor_conf import layout_of, render

READY_SECONDS = 60.0
"""Five Python processes on a busy small machine; 2 s is usual."""
ORPHAN_SECONDS = 15.0
"""Daemons notice that their supervisord was killed, and finish what they were doing."""
FAILED_STARTS = 3
RESCAN_SECONDS = 300.0
DEFAULT_MODELS_FOLDER = Path("~/.models")
CLIENT_WITH_MODEL = "--client serves nothing, --model serves one: give one of them"
LOW_DISK_BYTES = 200 * 1024**2
"""Logs may grow to 20 MB per daemon."""
FULL_DISK_BYTES = 1024**2
"""State and the first lines of six logs need about 0.2 MB; a daemon without room for its key or lock can't start."""


class StartFailed(MeshError):
    """The node did not come up."""

    code = "start_failed"


@click.command()
@click.option(
    "--model",
    "-m",
    "models",
    multiple=True,
    metavar="M",
    help="Serve this model from the start; one that is not on disk is pulled first. Repeatable.",
)
@click.option(
    "--models-dir",
    "folders",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Search this folder for .gguf files too; repeatable.",
)
@click.option(
    "--max-loaded-models",
    metavar="N…",
    callback=checked_limits,
    help="One number, or one per type: llm embedding reranking audio image.",
)
@click.option("--ctx-size", type=click.IntRange(min=0), metavar="N", help="Context of a model, over all its requests.")
@click.option(
    "--llamacpp-args",
    metavar="ARGS",
    callback=checked_args,
    help="Further options for llama.cpp, in one quoted text.",
)
@click.option("--llamacpp-backend", metavar="NAME", help="Build of llama.cpp: embedded, path, or one of mesh.toml.")
@click.option(
    "--client/--no-client",
    "client",
    default=None,
    help="Only use models of other nodes: serve nothing. --no-client takes it back.",
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground, as containers and systemd want it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def up(
    models: tuple[str, ...],
    folders: tuple[str, ...],
    max_loaded_models: str | None,
    ctx_size: int | None,
    llamacpp_args: str | None,
    llamacpp_backend: str | None,
    client: bool | None,
    foreground: bool,
    as_json: bool,
) -> None:
    """Start this node and wait until it answers.

    What the options say is written into mesh.toml. On a running node they are applied without a restart. They count
    more than MESH_* variables, for as long as this start of the node lasts.
    """
    node = Node()
    if client and models:
        raise click.UsageError(CLIENT_WITH_MODEL)
    changes = {
        **changes_of(node, models, folders, max_loaded_models, client),
        **engine_changes(ctx_size, llamacpp_args, llamacpp_backend),
    }
    if foreground:
        if node.supervised is not None:
            raise StateError("this node is running already; stop it with 'meshctl down' first")
        prepare(node, changes)
        if models:
            progress("A model that is not on disk is not pulled with --foreground; 'meshctl pull MODEL' does")
        _exec_supervisord(node)
    already, reloaded = bring_up(node, changes)
    fetched = fetch_missing(node, models)
    reloaded = fetched or reloaded
    view = node.status()
    if as_json:
        print_json(
            {
                "endpoint": endpoint(view),
                "already_running": already,
                "changed": reloaded.changed if reloaded else [],
                "needs_restart": reloaded.restart if reloaded else {},
                "status": to_jsonable(view),
            }
        )
        return
    if already:
        progress("This node is up already.")
    if reloaded is not None:
        say_reloaded(reloaded)
    for line in first_lines(node, view):
        click.echo(line)


def changes_of(
    node: Node,
    models: Sequence[str],
    folders: Sequence[str],
    max_loaded_models: str | None = None,
    client: bool | None = None,
) -> Changes:
    """What the options mean for ``mesh.toml``. A model given as a file is served from its folder."""
    names, more = [], [str(folder) for folder in folders]
    for model in models:
        if model.endswith(".gguf") and ":" not in model:
            path = Path(os.path.expanduser(model)).resolve()
            if not path.is_file():
                raise StateError(f"there is no file {path}; give the name of a model, or the path of a .gguf file")
            more.append(str(path.parent))
            names.append(re.sub(r"-00001-of-\d{5}$", "", path.stem))
        else:
            names.append(model)
    changes: dict[tuple[str, str], Any] = {}
    if names:
        changes["models", "serve"] = list(dict.fromkeys(names))
    if more:
        known = list(node.config.models.folders)
        covered = [folder.resolve() for folder in node.config.model_folders()]
        known += [
            folder for folder in dict.fromkeys(more) if not any(Path(folder).is_relative_to(path) for path in covered)
        ]
        changes["models", "folders"] = known
    if max_loaded_models is not None:
        limits = parse_limits(max_loaded_models, source="--max-loaded-models")
        changes["models", "max_loaded_models"] = limits[0] if len(limits) == 1 else list(limits)
    if client is not None:
        changes["node", "client"] = client
    return changes


def fetch_missing(node: Node, models: Sequence[str]) -> Reloaded | None:
    """Pull what was named to be served and is not on this node's disk; ``mesh.toml`` gets the names it has here.

    Raises: MeshError that says why one could not be had. The node runs then, and serves the rest.
    """
    names: dict[str, str] = {}
    if models and not _on_disk(node).issuperset(node.config.models.serve):
        # A file may have come a moment ago.
        node.ask("launcherd", RescanModels(), deadline_seconds=RESCAN_SECONDS)
    for model in models:
        if model not in _on_disk(node) and can_be_pulled(node, model):
            names[model] = pull_model(node, PullModel(model=model)).subject
    if not names:
        return None
    serve = [names.get(name, name) for name in node.config.models.serve]
    changes: Changes = {("models", "serve"): list(dict.fromkeys(serve))}
    written = update_config(node.paths.config_file, node.environ, changes)
    node.__dict__.pop("config", None)
    return reload_daemons(node) if written else None


def _on_disk(node: Node) -> set[str]:
    return {known.name for known in node.status().models if known.on_disk_here}


def engine_changes(ctx_size: int | None, args: str | None, backend: str | None) -> Changes:
    """What the options for llama.cpp mean for ``mesh.toml``. Raises: ConfigError."""
    given = {
        "context_tokens": ctx_size,
        "extra_args": None if args is None else list(split_args(args, source="--llamacpp-args")),
        "backend": backend,
    }
    return {("engine", key): value for key, value in given.items() if value is not None}


def bring_up(node: Node, changes: Changes) -> tuple[bool, Reloaded | None]:
    """A running, configured node with ``changes`` applied: (was it running, what the reload changed).

    Raises: MeshError that says why it is not.
    """
    if node.supervised is not None:
        fresh = not node.paths.config_file.exists()
        variables = [name for name, where in ENVIRONMENT.items() if where in changes]
        environ = heeded(node.paths.config_file, _without(node.environ, variables))
        written = update_config(node.paths.config_file, environ, changes)
        override_variables(node.paths.config_file, changes, starts=False)
        node.__dict__.pop("config", None)
        outvoted = _say_overridden(variables, {**node.supervised.environ(), **node.environ})
        reloaded = reload_daemons(node) if fresh or written or outvoted else None
        await_answer(node)
        return True, reloaded
    prepare(node, changes)
    _start_supervisord(node)
    await_answer(node)
    return False, None


def prepare(node: Node, changes: Changes) -> None:
    """Everything that can be known to go wrong before a process is started. Raises: MeshError."""
    checked_home(node.paths)
    variables = [name for name, where in ENVIRONMENT.items() if where in changes]
    update_config(node.paths.config_file, _without(node.environ, variables), changes)
    override_variables(node.paths.config_file, changes, starts=True)
    node.__dict__.pop("config", None)
    _say_overridden(variables, node.environ)
    config = node.config
    for path in config.model_folders():
        if path == DEFAULT_MODELS_FOLDER.expanduser():
            # The one folder that every text tells people to put models into.
            with contextlib.suppress(OSError):
                path.mkdir(exist_ok=True)
        if path.exists() and not os.access(path, os.R_OK | os.X_OK):
            progress(f"Warning: cannot read the models folder {path}; fix its permissions")
    _await_orphans(node)
    _check_ports(config)
    free = shutil.disk_usage(node.paths.home).free
    if free < FULL_DISK_BYTES:
        raise StateError(
            f"only {size(free) or '0 bytes'} are free for {node.paths.home}, too little for state and logs; free some "
            "space there, or set MESH_HOME to another disk"
        )
    if free < LOW_DISK_BYTES:
        progress(f"Warning: only {free // 1024**2} MB are free for {node.paths.home}; logs and state may need more")
    _, missing = engine_found(config, node.environ)
    if missing:
        progress(f"Warning: {missing}. The node starts, but cannot run models")


def _without(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def _say_overridden(variables: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Say which variables the command line overrides; whether there are any."""
    outvoted = [name for name in variables if environ.get(name)]
    for name in outvoted:
        progress(f"Note: {name} is set too; what the command line says counts for as long as this node runs")
    return bool(outvoted)


def _check_ports(config: NodeConfig) -> None:
    """Raises: StateError that names who has a port."""
    for port in wanted_ports(config):
        problem = bind_problem(port)
        if problem is None:
            continue
        owners = "; ".join(describe(owner) for owner in port_owners(port))
        by = f" by {owners}" if owners else ""
        taken = f"is taken{by}" if problem.errno in (98, 48) else f"cannot be used: {problem.strerror}"
        raise StateError(
            f"{port.protocol.upper()} port {port.port} on {port.host} ({port.key}) {taken}. Stop that, or use another "
            f"port: {port.variable}={_other(port.port)} meshctl up, or for good: "
            f"meshctl config set {port.key} {_other(port.port)}"
        )


def _other(port: int) -> int:
    return port + 100 if port + 100 < 65_536 else port - 100


def _await_orphans(node: Node) -> None:
    """A killed supervisord's daemons end by themselves within seconds."""
    waiting = Waiting()
    started = time.monotonic()

    def gone() -> bool | None:
        left = locked_daemons(node.paths)
        if left:
            waiting.show("Waiting for the daemons of an earlier supervisord to end …", time.monotonic() - started)
        return None if left else True

    done = wait_until(gone, ORPHAN_SECONDS, every_seconds=0.2)
    waiting.done()
    if done is None:
        names = ", ".join(f"{item.name} (pid {item.pid})" for item in locked_daemons(node.paths))
        raise StateError(
            f"{names} still run for {node.paths.home} without a supervisord of this node: another start of it, or "
            "daemons started by hand. 'meshctl down' ends them; or set MESH_HOME to another folder"
        )


# -- supervisord -----------------------------------------------------------------------------------------------


def choose_conf(node: Node) -> Path:
    """The repository's own file for the default node where that works, else one rendered into the state folder.

    With the repository's own file the logs are beside it, and ``keeper`` links ``logs`` to them.

    Raises: StateError.
    """
    folder = REPOSITORY / ".run"
    if (
        node.is_default
        and os.access(folder, os.W_OK)
        and len(os.fsencode(folder / LONGEST_SOCKET)) <= IPC_PATH_LIMIT_BYTES
        and not listens(folder / "supervisor.sock")
    ):
        return REPOSITORY / "supervisord.conf"
    text = render(layout_of(node.paths, node.environ))
    make_folder(node.paths.logs)
    try:
        node.paths.supervisor_conf.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StateError(f"cannot write {node.paths.supervisor_conf}: {error.strerror or error}") from error
    return node.paths.supervisor_conf


def _command(node: Node, *options: str) -> list[str]:
    return [sys.executable, "-P", "-m", "supervisor.supervisord", *options, "-c", str(choose_conf(node))]


def _environment(node: Node) -> dict[str, str]:
    environment = dict(node.environ)
    # A relative or ~ MESH_HOME must mean the same folder to the daemons.
    if environ_home := environment.get("MESH_HOME"):
        environment["MESH_HOME"] = os.path.expanduser(environ_home)
    return environment


def _exec_supervisord(node: Node) -> None:
    command = _command(node, "-n")
    progress(f"supervisord runs in the foreground; 'meshctl status' in another terminal shows the node ({command[-1]})")
    sys.stderr.flush()
    os.execve(command[0], command, _environment(node))


def _start_supervisord(node: Node) -> None:
    try:
        done = subprocess.run(
            _command(node),
            env=_environment(node),
            cwd=node.paths.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartFailed(f"supervisord could not be started: {error}; run 'meshctl doctor'") from error
    if done.returncode != 0:
        # Another 'meshctl up' may have been faster.
        if wait_until(node.find_supervisord, 2.0) is not None:
            return
        said = " ".join((done.stderr or done.stdout).split())
        raise StartFailed(f"supervisord refused to start: {said[:500]}; run 'meshctl doctor'")


def await_answer(node: Node, seconds: float = READY_SECONDS) -> None:
    """Wait until the five daemons and the API answer, showing what is waited for. Raises: StartFailed."""
    waiting = Waiting()
    started = time.monotonic()

    def ready() -> bool | None:
        node.__dict__.pop("supervised", None)
        view = node.status()
        hopeless = [
            daemon
            for daemon in view.daemons
            if daemon.state == "fatal" or (daemon.state == "backoff" and (daemon.restarts or 0) >= FAILED_STARTS - 1)
        ]
        if hopeless:
            raise StartFailed(_why(hopeless))
        up = all(daemon.state == "running" for daemon in view.daemons)
        if up and view.addresses.api and answers(f"{view.addresses.api}/live"):
            return True
        missing = ", ".join(daemon.name for daemon in view.daemons if daemon.state != "running")
        waiting.show(f"Starting {missing or 'the HTTP service'} …", time.monotonic() - started)
        return None

    try:
        done = wait_until(ready, seconds, every_seconds=0.1)
    finally:
        waiting.done()
    if done is None:
        view = node.status()
        late = [daemon for daemon in view.daemons if daemon.state != "running"]
        raise StartFailed(
            f"the node does not answer after {seconds:.0f} s: "
            + (_why(late) if late else "the HTTP service is not listening; see 'meshctl logs proxyd keeper'")
        )


def _why(daemons: list[DaemonStatus]) -> str:
    parts = [f"{daemon.name}: {daemon.detail or daemon.state}" for daemon in daemons]
    return "; ".join(parts) + (
        f". supervisord keeps trying; see 'meshctl logs {daemons[0].name}', stop it all with 'meshctl down'"
    )


# -- what is printed -------------------------------------------------------------------------------------------


def endpoint(view: NodeStatus) -> str:
    return f"{view.addresses.api}/v1"


def first_lines(node: Node, view: NodeStatus) -> list[str]:
    """The endpoint with a curl that works now, then what is loading and for how long."""
    model = next((model.name for model in view.models if model.status == "ready" and model.type == "llm"), None)
    client = node.config.node.client
    model = model or next((model.name for model in view.models if model.builtin and not client), None)
    key = ' -H "Authorization: Bearer $MESH_API_KEY"' if load_keys(node.paths.keys_file).keys else ""
    if model is None:
        curl = f"curl{key} {endpoint(view)}/models"
    else:
        body = f'{{"model":"{model}","messages":[{{"role":"user","content":"hello"}}]}}'
        curl = f"curl{key} {endpoint(view)}/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    return [clean(f"{endpoint(view)}  try: {curl}"), clean(_client_line(view) if client else _loading_line(view))]


def _client_line(view: NodeStatus) -> str:
    others = sorted({host for model in view.models for host in model.hosts} - {view.node.name})
    where = f"models are answered by {', '.join(others)}" if others else "no other node serves a model yet"
    return f"This node is a client, it serves nothing itself; {where}"


def _loading_line(view: NodeStatus) -> str:
    loading = [
        f"{model.name}, {model.here.state} for {age(model.here.state_age_seconds) or '0s'} ({model.reason})"
        if model.here
        else f"{model.name} ({model.reason})"
        for model in view.models
        if model.status == "loading"
    ]
    if loading:
        return f"Loading {'; '.join(loading)}"
    if view.node.scanning:
        return "Reading the models folders; 'meshctl status' shows what was found"
    stuck = [
        f"{model.name}: {model.reason}"
        for model in view.models
        if model.status in ("needs_capacity", "failed") and (model.requested or model.here)
    ]
    if stuck:
        return f"Not loaded: {'; '.join(stuck)}"
    ready = [model.name for model in view.models if model.status == "ready"]
    if ready:
        return f"Ready: {', '.join(ready)}"
    count = sum(not model.builtin for model in view.models)
    own = f"{count} model{'s' if count != 1 else ''} of yours" if count else "the guide model"
    return f"Nothing is loading; a request loads its model by itself. On disk: {own}; see 'meshctl models list'"
