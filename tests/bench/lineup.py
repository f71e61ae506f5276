"""The systems of one run, all in front of the same engine process: direct, the peers, and proxyd on a real node."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.bench import mesh, peers
from tests.bench.children import BenchError, Child, LoadClient, cpu_seconds, free_port, wait_for_answer
from tests.bench.mesh import EngineKind

SYSTEMS = ("direct", "proxyd", *peers.NAMES)
"""In the order of a round: what is compared most stands next to each other."""
Say = Callable[[str], None]
ENGINE_START_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to the engine. `pids` run it (with all their descendants but `engine_pid`); empty for direct."""

    name: str
    port: int
    model: str
    headers: dict[str, str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()
    engine_pid: int = 0

    def processes(self) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for pid in self.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found |= {member.pid: member for member in (process, *process.children(recursive=True))}
        found.pop(self.engine_pid, None)
        return list(found.values())

    def cpu_seconds(self) -> float:
        """User and system time its processes have used so far."""
        return cpu_seconds([process.pid for process in self.processes()])


@dataclass(kw_only=True)
class Lineup:
    """What is running. `missing` tells why a wanted system is not among `systems`."""

    systems: list[System]
    missing: dict[str, str]
    versions: dict[str, str]
    load: LoadClient
    engine_pid: int
    engine_port: int

    def named(self, name: str) -> System | None:
        return next((system for system in self.systems if system.name == name), None)

    def in_order(self, round_number: int) -> list[System]:
        """The systems in the order of this round: every other round goes backwards, so that drift cancels out."""
        return self.systems[::-1] if round_number % 2 else self.systems

    def measure(self, system: System, **command: Any) -> dict[str, Any]:
        """One command of the load client through the system."""
        return self.load.measure(port=system.port, model=system.model, headers=system.headers, **command)

    @contextlib.contextmanager
    def separate_cores(self) -> Iterator[bool]:
        """Client and engine share one core, every proxy has the other; False where the system can't do that.

        With one request at a time the scheduler sometimes keeps a whole chain on one core and sometimes wakes
        another core at each hop, which costs ten times what a proxy computes. Pinned, every hop to a proxy and back
        crosses cores: the dearer case, the same for all, and the same in every run.
        """
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(cores) < 2:
            yield False
            return
        near = [self.load.pid, self.engine_pid]
        far = [process.pid for system in self.systems for process in system.processes()]
        try:
            for pids, core in ((near, cores[0]), (far, cores[1])):
                _pin(pids, {core})
            yield True
        finally:
            _pin([*near, *far], set(cores))


def _pin(pids: Sequence[int], cores: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, cores)


@dataclass(kw_only=True)
class _Engine:
    """The engine process everything goes to."""

    pid: int
    port: int
    model: str
    key: str


@contextlib.contextmanager
def lineup(kind: EngineKind, wanted: Sequence[str], say: Say) -> Iterator[Lineup]:
    """Starts the engine (inside a node where proxyd is wanted and a node can be had) and the wanted systems.

    Raises: BenchError when not even the engine starts.
    """
    with contextlib.ExitStack() as stack:
        work = mesh.short_folder()
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        missing: dict[str, str] = {}
        systems: list[System] = []
        engine: _Engine | None = None
        if "proxyd" in wanted:
            try:
                engine, proxyd = _start_node(kind, work / "n", stack, say)
                systems.append(proxyd)
            except mesh.NoNode as error:
                missing["proxyd"] = str(error)
                say(f"proxyd: {error}")
        if engine is None:
            engine = _start_engine(kind, work, stack, say)
        headers = {"Authorization": f"Bearer {engine.key}"} if engine.key else {}
        versions = _start_peers(engine, wanted, work, stack, systems, missing, headers, say)
        systems.append(System(name="direct", port=engine.port, model=engine.model, headers=headers))
        systems.sort(key=lambda system: SYSTEMS.index(system.name))
        load = LoadClient(work / "load.log")
        stack.callback(load.stop)
        yield Lineup(
            systems=systems,
            missing=missing,
            versions=versions,
            load=load,
            engine_pid=engine.pid,
            engine_port=engine.port,
        )


def _start_node(kind: EngineKind, home: Path, stack: contextlib.ExitStack, say: Say) -> tuple[_Engine, System]:
    """A node that serves one model, and proxyd on it as a system. Raises: NoNode."""
    say(f"starting a node with {_words(kind)}")
    home.mkdir(mode=0o700)
    model = "stand-in" if kind == "stand-in" else "bench"
    node = mesh.serving_node(home, model, kind)
    node.up()
    try:
        pid, port = node.await_model(model)
        engine = _Engine(pid=pid, port=port, model=model, key=mesh.engine_key(pid) if kind == "real" else "")
        system = System(
            name="proxyd", port=node.api_port(), model=model, pids=(node.supervisor_pid(),), engine_pid=pid
        )
    except BaseException:
        node.stop()
        raise
    stack.callback(node.stop)
    return engine, system


def _start_engine(kind: EngineKind, work: Path, stack: contextlib.ExitStack, say: Say) -> _Engine:
    """The engine on its own, where there is no node around it. Raises: BenchError."""
    say(f"starting {_words(kind)}")
    port = free_port()
    try:
        model = mesh.write_model(work / ("stand-in.gguf" if kind == "stand-in" else "bench.gguf"), kind)
    except mesh.NoNode as error:
        raise BenchError(str(error)) from error
    options = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--parallel", str(mesh.PARALLEL)]
    if kind == "stand-in":
        command = [sys.executable, str(Path(__file__).with_name("upstream.py")), *options]
    else:
        more = ["--ctx-size", str(256 * mesh.PARALLEL), "--threads", "1", "--threads-batch", "1"]
        command = [sys.executable, "-m", "services.launcherd.engine_server", *options, *more]
    child = Child(kind, command, log=work / "engine.log", cwd=mesh.REPOSITORY)
    stack.callback(child.stop)
    wait_for_answer(child, port, "/health", limit_seconds=ENGINE_START_SECONDS)
    return _Engine(pid=child.pid, port=port, model=model.stem, key="")


def _words(kind: EngineKind) -> str:
    return "the stand-in engine" if kind == "stand-in" else "the real engine"


def _start_peers(
    engine: _Engine,
    wanted: Sequence[str],
    work: Path,
    stack: contextlib.ExitStack,
    systems: list[System],
    missing: dict[str, str],
    headers: dict[str, str],
    say: Say,
) -> dict[str, str]:
    """Starts all wanted peers, then waits for each; their versions by name."""
    upstream = peers.Upstream(engine.port, engine.model, engine.key)
    started: list[peers.Peer] = []
    for name in peers.NAMES:
        if name not in wanted:
            continue
        say(f"starting {name}")
        try:
            peer = peers.start(name, upstream, work / name)
        except peers.Unavailable as error:
            missing[name] = str(error)
            say(f"{name}: {error}")
            continue
        stack.callback(peer.child.stop)
        started.append(peer)
    versions: dict[str, str] = {}
    for peer in started:
        try:
            peers.await_ready(peer)
        except peers.Unavailable as error:
            missing[peer.name] = str(error)
            say(f"{peer.name}: {error}")
            continue
        versions[peer.name] = peer.version
        systems.append(
            System(name=peer.name, port=peer.port, model=engine.model, headers=headers, pids=(peer.child.pid,))
        )
    return versions
