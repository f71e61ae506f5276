"""What this machine has and who uses it: ports, processes, memory, disk, engines. Blocking, read-only."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

from shared.config import EMBEDDED_BACKEND, NodeConfig
from shared.recipes import LLAMACPP

Protocol = Literal["tcp", "udp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port the node wants. ``key`` is its setting, ``variable`` overrides it for one start."""

    key: str
    variable: str
    host: str
    port: int
    protocol: Protocol


def wanted_ports(config: NodeConfig) -> tuple[Port, ...]:
    """Every port with a fixed number; 0 means any free one and can't be taken."""
    ports = (
        Port(key="api.port", variable="MESH_API_PORT", host=config.api.host, port=config.api.port, protocol="tcp"),
        Port(
            key="console.port",
            variable="MESH_CONSOLE_PORT",
            host=config.console.host,
            port=config.console.port,
            protocol="tcp",
        ),
        Port(key="mesh.port", variable="MESH_PORT", host=config.mesh.host, port=config.mesh.port, protocol="udp"),
        Port(key="mesh.port", variable="MESH_PORT", host=config.mesh.host, port=config.mesh.port, protocol="tcp"),
    )
    return tuple(port for port in ports if port.port)


def bind_problem(port: Port) -> OSError | None:
    """Why this machine does not give the port, or None."""
    host = "127.0.0.1" if port.host == "localhost" else port.host
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    kind = socket.SOCK_STREAM if port.protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(family, kind) as probe:
        if port.protocol == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port.port))
            if port.protocol == "tcp":
                probe.listen(1)
        except OSError as error:
            return error
    return None


def port_owners(port: Port) -> list[psutil.Process]:
    """The processes that have it. Empty where the system does not tell (other users' processes)."""
    try:
        connections = psutil.net_connections(kind="inet")
    except (psutil.Error, OSError):
        return []
    holding = [
        (connection.type, connection.pid)
        for connection in connections
        if connection.laddr
        and connection.laddr.port == port.port
        and connection.pid
        and connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    ]
    kind = socket.SOCK_STREAM if port.protocol == "tcp" else socket.SOCK_DGRAM
    # A TCP socket that is bound and does not listen is in no list; whoever has the number for UDP has it too.
    pids = {pid for type_, pid in holding if type_ == kind} or {pid for _, pid in holding}
    found = []
    for pid in sorted(pids):
        try:
            found.append(psutil.Process(pid))
        except psutil.Error:
            continue
    return found


def describe(process: psutil.Process) -> str:
    """``nginx (pid 12)``; of a meshd process also whose node it belongs to."""
    try:
        words = process.cmdline()
        name = process.name()
    except psutil.Error:
        return f"pid {process.pid}"
    module = next((word for word in words if word.startswith("services.")), "")
    if module:
        try:
            home = process.environ().get("MESH_HOME") or "~/.mesh"
        except (psutil.Error, OSError):
            home = "unknown"
        return f"another meshd node: {module.split('.')[1]}, pid {process.pid}, MESH_HOME={home}"
    return f"{name}, pid {process.pid}"


def engine_found(config: NodeConfig, environ: Mapping[str, str]) -> tuple[str, str]:
    """(which engine would be used, why none can). One of them is empty. The binary is not run."""
    named = config.engine.backend
    configured = config.engine.backends.get(named) or (EMBEDDED_BACKEND if named == EMBEDDED_BACKEND else "")
    configured = configured or config.engine.path
    how = (
        "install the embedded one with 'pip install xllamacpp' in meshd's environment, or put llama.cpp's "
        "llama-server on PATH, or name it: meshctl config set engine.path /path/to/llama-server"
    )
    if configured and configured != EMBEDDED_BACKEND:
        path = program_path(configured, environ)
        if not os.path.isfile(path):
            return "", f"the configured engine {path} does not exist; {how}"
        if not os.access(path, os.X_OK):
            return "", f"the configured engine {path} is not executable; chmod +x it, or {how}"
        return path, ""
    installed = None if configured == EMBEDDED_BACKEND else shutil.which("llama-server", path=environ.get("PATH", ""))
    if installed:
        return installed, ""
    if importlib.util.find_spec("xllamacpp") is not None:
        return "embedded (xllamacpp)", ""
    return "", f"no inference engine is installed; {how}"


def program_path(given: str, environ: Mapping[str, str]) -> str:
    """Where a program is that was given as a path, or as a name on the PATH."""
    found = shutil.which(given, path=environ.get("PATH", "")) if os.sep not in given else None
    return os.path.abspath(found or os.path.expanduser(given))


def recipes_found(config: NodeConfig, environ: Mapping[str, str]) -> tuple[dict[str, bool], dict[str, bool]]:
    """Recipes besides llamacpp, and named builds of llama.cpp: whether their program is there. Nothing is run."""

    def there(program: str) -> bool:
        return os.access(program_path(program, environ), os.X_OK)

    return (
        {name: there(recipe.program) for name, recipe in config.recipes.items() if name != LLAMACPP},
        {name: there(program) for name, program in config.engine.backends.items()},
    )


def gpus() -> list[str]:
    """``NAME, MEMORY`` of each NVIDIA GPU; empty without one or without its driver's tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
