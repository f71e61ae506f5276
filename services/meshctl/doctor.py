"""``doctor``: every condition the node depends on, looked at one by one, each with the line that mends it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator

import click
import psutil

from services.meshctl.checks import Check, Level, show
from services.meshctl.completion import complete_peer
from services.meshctl.config import warnings_about
from services.meshctl.leftovers import find_leftovers
from services.meshctl.machine import (
    bind_problem,
    describe,
    engine_found,
    gpus,
    port_owners,
    recipes_found,
    wanted_ports,
)
from services.meshctl.node import Node
from services.meshctl.output import print_json, size
from services.meshctl.up import LOW_DISK_BYTES
from shared.errors import MeshError
from shared.paths import IPC_PATH_LIMIT_BYTES, LONGEST_SOCKET, REPOSITORY
from shared.recipes import BUILTIN_RECIPES

LOW_MEMORY_BYTES = 1024**3
PACKAGES = {
    "zmq": "pyzmq",
    "msgpack": "msgpack",
    "pydantic": "pydantic",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "cryptography": "cryptography",
    "aioquic": "aioquic",
    "supervisor": "supervisor",
    "psutil": "psutil",
}


@click.command()
@click.option("--peer", metavar="PEER", shell_complete=complete_peer, help="Check the way to another node, and back.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(peer: str | None, as_json: bool) -> None:
    """Check this machine for everything a node needs; exit status 1 if something is missing.

    With --peer it checks instead why this node and another one do not meet. PEER is a token (@FILE, - for standard
    input), an address (HOST, HOST:PORT or a multiaddr), or a node's name or id as 'meshctl peers' shows it.

    Changes nothing.
    """
    if peer is not None:
        from services.meshctl.doctor_peer import examine_peer

        examine_peer(Node(), peer, as_json=as_json)
        return
    found = list(examine(Node()))
    failed = sum(check.level == "fail" for check in found)
    if as_json:
        print_json({"ok": not failed, "checks": [dataclasses.asdict(check) for check in found]})
    else:
        for check in found:
            show(check)
        warned = sum(check.level == "warn" for check in found)
        click.echo(f"{failed} missing, {warned} worth a look, {len(found) - failed - warned} fine.")
    if failed:
        raise SystemExit(1)


def examine(node: Node) -> Iterator[Check]:
    """One check after another; one that cannot be made is itself a failed check."""
    for look in (
        _python,
        _home,
        _config,
        _supervisord,
        _ports,
        _engine,
        _recipes,
        _gpu,
        _models,
        _memory,
        _disk,
        _left,
    ):
        try:
            yield from look(node)
        except MeshError as error:
            yield Check(name=look.__name__.strip("_"), level="fail", detail=error.detail)


def _python(_node: Node) -> Iterator[Check]:
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    version = ".".join(str(part) for part in sys.version_info[:3])
    if missing:
        yield Check(
            name="python",
            level="fail",
            detail=f"Python {version} lacks {', '.join(missing)}",
            fix=f"{REPOSITORY}/bin/quickstart, or: {sys.executable} -m pip install {' '.join(missing)}",
        )
    else:
        yield Check(name="python", level="ok", detail=f"Python {version}, all packages at {sys.prefix}")


def _home(node: Node) -> Iterator[Check]:
    home = node.paths.home
    longest = node.paths.bus / LONGEST_SOCKET
    size_bytes = len(os.fsencode(longest))
    if size_bytes > IPC_PATH_LIMIT_BYTES:
        yield Check(
            name="home",
            level="fail",
            detail=f"{home}: its sockets have paths of {size_bytes} bytes, the system allows {IPC_PATH_LIMIT_BYTES}",
            fix="set MESH_HOME to a shorter path",
        )
        return
    existing = home
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Check(
            name="home",
            level="fail",
            detail=f"{existing} is not writable for this user, and {home} must be",
            fix=f"chown -R $(id -u) {existing}, or set MESH_HOME to another folder",
        )
        return
    shared_with = [
        str(path)
        for path in (node.paths.bus, node.paths.state)
        if path.exists() and (path.stat().st_mode & 0o077 or path.stat().st_uid != os.getuid())
    ]
    if shared_with:
        yield Check(
            name="home",
            level="warn",
            detail=f"others can look into {', '.join(shared_with)}, or it belongs to another user",
            fix=f"chmod 700 {' '.join(shared_with)} (every start of a daemon does it too)",
        )
        return
    yield Check(name="home", level="ok", detail=f"{home}" + ("" if home.exists() else " (made at the first start)"))


def _config(node: Node) -> Iterator[Check]:
    try:
        config = node.config
    except MeshError as error:
        yield Check(name="config", level="fail", detail=error.detail, fix=f"edit {node.paths.config_file}")
        return
    if not config.configured:
        yield Check(
            name="config", level="ok", detail="no mesh.toml: the node is idle until 'meshctl up' or 'load' writes one"
        )
    else:
        yield Check(name="config", level="ok", detail=str(node.paths.config_file))
    _, no_engine = engine_found(config, node.environ)
    for warning in warnings_about(node, config):
        if warning != no_engine:
            yield Check(name="config", level="warn", detail=warning)


def _supervisord(node: Node) -> Iterator[Check]:
    if node.supervised is None:
        yield Check(name="node", level="warn", detail="this node is not running", fix="meshctl up")
        return
    view = node.status()
    bad = [daemon for daemon in view.daemons if daemon.state not in ("running", "starting")]
    if bad:
        what = ", ".join(f"{daemon.name} is {daemon.state} ({daemon.detail})" for daemon in bad)
        yield Check(name="node", level="fail", detail=what, fix=f"meshctl logs {bad[0].name}")
    else:
        yield Check(name="node", level="ok", detail=f"supervisord pid {node.supervised.pid}; {view.summary}")


def _ports(node: Node) -> Iterator[Check]:
    view = node.status() if node.supervised else None
    ours = {int(row.pid) for row in view.daemons if row.pid} if view else set()
    for port in wanted_ports(node.config):
        name = f"port {port.port}"
        used = getattr(view.ports, port.key.partition(".")[0], None) if view else None
        if used is not None and used != port.port:
            # Started with a port variable that this shell does not have: what runs is what counts.
            detail = f"{port.key} {port.protocol}: this node runs with port {used} instead, as it was started"
            yield Check(name=f"port {used}", level="ok", detail=detail)
            continue
        problem = bind_problem(port)
        if problem is None:
            state = "free" if node.supervised is None else "free, so the node does not use it (it may use another)"
            yield Check(name=name, level="ok", detail=f"{port.key} {port.protocol} on {port.host}: {state}")
            continue
        owners = port_owners(port)
        family = {owner.pid for owner in owners} | {owner.ppid() for owner in owners if owner.is_running()}
        if node.supervised is not None and family & (ours | {node.supervised.pid}):
            yield Check(name=name, level="ok", detail=f"{port.key} {port.protocol} on {port.host}: used by this node")
            continue
        who = "; ".join(describe(owner) for owner in owners) or "a process of another user, or one just ended"
        yield Check(
            name=name,
            level="fail",
            detail=f"{port.key} {port.protocol} on {port.host}: {problem.strerror} ({who})",
            fix=f"stop that, or: meshctl config set {port.key} N",
        )


def _engine(node: Node) -> Iterator[Check]:
    running = node.status().node.engine if node.supervised else ""
    if running:
        # What it was started with, which need not be on this shell's PATH.
        yield Check(name="engine", level="ok", detail=f"{running}, in use")
        return
    engine, missing = engine_found(node.config, node.environ)
    if missing:
        detail, _, fix = missing.partition("; ")
        yield Check(name="engine", level="fail", detail=detail, fix=fix)
        return
    version = ""
    if engine.startswith("embedded"):
        try:
            version = f" {importlib.metadata.version('xllamacpp')}"
        except importlib.metadata.PackageNotFoundError:
            version = ""
    yield Check(name="engine", level="ok", detail=engine + version)


def _recipes(node: Node) -> Iterator[Check]:
    """What else than the engine above can run models; only what the owner named himself may be missed."""
    recipes, builds = recipes_found(node.config, node.environ)
    own = {name for name in recipes if node.config.recipes[name] != BUILTIN_RECIPES.get(name)}
    usable = [
        *(name for name, there in recipes.items() if there),
        *(f"llamacpp {n}" for n, there in builds.items() if there),
    ]
    detail = f"can run too: {', '.join(usable)}" if usable else "llamacpp only; other recipes need their programs"
    for name in [name for name, there in recipes.items() if not there and name in own]:
        program, how = node.config.recipes[name].program, node.config.recipes[name].how_to_get
        yield Check(
            name="recipes",
            level="warn",
            detail=f"the program of the recipe {name}, {program}, is not there",
            fix=how or f"put it on the PATH, or name it in mesh.toml: [recipes.{name}] program",
        )
    for name in [name for name, there in builds.items() if not there]:
        yield Check(
            name="recipes",
            level="warn",
            detail=f"the build {name} of llama.cpp, {node.config.engine.backends[name]}, is not there",
            fix="correct or remove it in [engine.backends] of mesh.toml",
        )
    yield Check(name="recipes", level="ok", detail=detail)


def _gpu(_node: Node) -> Iterator[Check]:
    found = gpus()
    if found:
        yield Check(name="gpu", level="ok", detail="; ".join(found))
    elif os.path.exists("/dev/nvidia0") or os.path.exists("/proc/driver/nvidia/version"):
        yield Check(
            name="gpu",
            level="warn",
            detail="there is an NVIDIA device, but nvidia-smi does not answer",
            fix="install the driver's tools, or check that this user may open /dev/nvidia0",
        )
    else:
        yield Check(name="gpu", level="ok", detail="no NVIDIA GPU found; models run on the CPU")


def _models(node: Node) -> Iterator[Check]:
    for folder in node.config.model_folders():
        if not folder.is_dir():
            yield Check(
                name="models",
                level="warn",
                detail=f"{folder} does not exist",
                fix=f"mkdir -p {folder} and put .gguf files there, or: meshctl up --models-dir FOLDER",
            )
        elif not os.access(folder, os.R_OK | os.X_OK):
            yield Check(name="models", level="fail", detail=f"{folder} is not readable", fix=f"chmod u+rx {folder}")
        else:
            yield Check(name="models", level="ok", detail=f"{folder} is readable")
    if not any(node.paths.guide_folder.glob("*.gguf")):
        yield Check(
            name="models",
            level="warn",
            detail=f"the guide model is missing in {node.paths.guide_folder}",
            fix="get the repository's files again (git checkout docs/guide)",
        )


def _memory(node: Node) -> Iterator[Check]:
    memory = psutil.virtual_memory()
    share = int(memory.total * node.config.node.cpu_share)
    detail = f"{size(memory.total)}, {size(memory.available)} available; models on the CPU may use {size(share)}"
    if memory.available < LOW_MEMORY_BYTES:
        yield Check(name="memory", level="warn", detail=detail, fix="close something, or use small models")
    else:
        yield Check(name="memory", level="ok", detail=detail)


def _disk(node: Node) -> Iterator[Check]:
    seen: set[int] = set()
    for what, path in (("state", node.paths.home), ("logs", node.log_folder)):
        while not path.exists():
            path = path.parent
        if path.stat().st_dev in seen:
            continue
        seen.add(path.stat().st_dev)
        free = shutil.disk_usage(path).free
        level: Level = "ok" if free >= LOW_DISK_BYTES else "warn" if free >= 1024**2 else "fail"
        fix = "" if level == "ok" else f"free some space at {path}, or set MESH_HOME to another disk"
        yield Check(name="disk", level=level, detail=f"{size(free) or '0 bytes'} free for {what} at {path}", fix=fix)


def _left(node: Node) -> Iterator[Check]:
    if node.supervised is not None or not node.paths.bus.is_dir():
        return
    left = find_leftovers(node.paths, node.supervisor_confs)
    if left:
        names = ", ".join(f"{item.name} (pid {item.pid})" for item in left)
        yield Check(name="leftovers", level="warn", detail=f"{names} run without a supervisord", fix="meshctl down")
