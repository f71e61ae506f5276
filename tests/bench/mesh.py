"""A real meshd node for the bench: its own state folder, free ports on loopback, started and stopped by `bin/meshctl`.

With the stand-in as its engine the path under test is client, proxyd, stand-in, with launcherd's leases, as with any
engine; what the bench then calls "direct" goes to that same stand-in process. With the embedded engine it goes to that
engine, with the key launcherd gave it, read from the process's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from tests.bench.children import BenchError, plain_environment

REPOSITORY = Path(__file__).resolve().parent.parent.parent
GUIDE_MODEL = REPOSITORY / "docs" / "guide" / "meshd-guide.gguf"
MESHCTL = REPOSITORY / "bin" / "meshctl"
_GUARD = 'cat >/dev/null; "$0" down; rm -rf "$1"'
"""A shell that waits for the end of its input, which is the end of the bench."""
COMMAND_LIMIT_SECONDS = 120.0
MODEL_LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.05
PARALLEL = 64
"""Requests the engine takes at once: as many as the widest measurement sends."""


EngineKind = Literal["stand-in", "real"]


class NoNode(Exception):
    """A node can't be started here; the text is the reason."""


def short_folder() -> Path:
    """A private folder whose path leaves room for unix sockets."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="mb-", dir=base if len(base) < 40 else "/tmp"))


def write_model(path: Path, kind: EngineKind) -> Path:
    """A GGUF for the node to serve.

    The real engine gets 28 MB of random weights where the packages that write them are installed: at some thousand
    tokens a second it is busy computing, as engines are, and not with its own HTTP. Else, and for the stand-in, which
    never opens it, it is the guide model. Raises: NoNode when neither can be had.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        from tests.engines.tiny_models import LARGE, SMALL, write_llm
    except ImportError as error:
        if not GUIDE_MODEL.exists():
            raise NoNode(f"no model: {GUIDE_MODEL.name} is not there and {error.name} is not installed") from error
        shutil.copyfile(GUIDE_MODEL, path)
        return path
    return write_llm(path, name=path.stem, size=LARGE if kind == "real" else SMALL)


def write_stand_in(path: Path) -> Path:
    """The stand-in as an executable that takes llama-server's command line."""
    stand_in = Path(__file__).with_name("upstream.py")
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(stand_in))} "$@"\n')
    path.chmod(0o755)
    return path


class Node:
    """One running node. `home` is its MESH_HOME; everything of it is gone after `stop`."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        kept = {n: v for n, v in plain_environment().items() if not n.startswith(("MESH_", "SUPERVISOR_", "LLAMA_"))}
        ports = {"MESH_API_PORT": "0", "MESH_CONSOLE_PORT": "0", "MESH_PORT": "0", "MESH_HOST": "127.0.0.1"}
        self.environment = {**kept, **ports, "MESH_HOME": str(home), **environment}
        self._guard: subprocess.Popen[bytes] | None = None

    def meshctl(self, *arguments: str) -> str:
        """Standard output of `bin/meshctl`. Raises: NoNode with what it said."""
        try:
            done = subprocess.run(
                [str(MESHCTL), *arguments],
                env=self.environment,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=COMMAND_LIMIT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoNode(f"bin/meshctl {arguments[0]}: {error}") from error
        if done.returncode:
            raise NoNode(f"bin/meshctl {arguments[0]}: {_last_words(done.stderr or done.stdout) or done.returncode}")
        return done.stdout

    def up(self) -> None:
        """Starts it and returns when it answers. Raises: NoNode, with nothing left running."""
        # Daemons outlive whoever ran meshctl: this shell stops them should the bench be killed.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(MESHCTL), str(self.home)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.meshctl("up", "--json")
        except NoNode:
            with contextlib.suppress(BenchError):
                self.stop()
            raise

    def status(self) -> dict[str, Any]:
        """What `meshctl status --json` says. Raises: NoNode."""
        text = self.meshctl("status", "--json")
        try:
            status: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise NoNode(f"bin/meshctl status --json printed no JSON: {text[:100]!r}") from error
        return status

    def api_port(self) -> int:
        """Port of the inference API. Raises: NoNode."""
        address = str(self.status().get("addresses", {}).get("api", ""))
        port = urlsplit(address).port
        if port is None:
            raise NoNode(f"the node tells no address of its API: {address!r}")
        return port

    def await_model(self, model: str) -> tuple[int, int]:
        """Pid and port of the engine that serves the model, once it is ready. Raises: NoNode."""
        give_up = time.monotonic() + MODEL_LIMIT_SECONDS
        words = "the node doesn't know it"
        while time.monotonic() < give_up:
            for entry in self.status().get("models", ()):
                here = entry.get("here")
                if entry["name"] == model and entry["status"] == "ready" and here and here["port"]:
                    return int(here["pid"]), int(here["port"])
                if entry["name"] == model:
                    words = f"{entry['status']}: {entry['reason']}"
            time.sleep(POLL_SECONDS)
        raise NoNode(f"{model} is not ready after {MODEL_LIMIT_SECONDS:g} s ({words})")

    def supervisor_pid(self) -> int:
        """Pid of the node's supervisord. Raises: NoNode."""
        try:
            return int((self.home / "run" / "supervisord.pid").read_text())
        except (OSError, ValueError) as error:
            raise NoNode(f"no pid of supervisord: {error}") from error

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The node's processes by the name of their daemon, `supervisord` included, engines left out."""
        supervisor = psutil.Process(self.supervisor_pid())
        groups: dict[str, list[psutil.Process]] = {"supervisord": [supervisor]}
        for process in supervisor.children():
            groups.setdefault(_daemon_name(process), []).append(process)
            for below in process.children(recursive=True):
                if "MESHD_ENGINE" not in _environment_of(below):
                    groups[_daemon_name(process)].append(below)
        return groups

    def stop(self) -> None:
        """Stops everything of the node. Raises: BenchError when meshctl can't."""
        try:
            self.meshctl("down", "--json")
        except NoNode as error:
            raise BenchError(str(error)) from error
        finally:
            if self._guard is not None:
                self._guard.kill()
                self._guard.communicate()


def _last_words(said: str) -> str:
    """The error in what meshctl printed: its last paragraph, on one line, without the progress before it."""
    text = " ".join(said.split())
    return text[text.rfind("Error:") :][:300] if "Error:" in text else text[-300:]


def _daemon_name(process: psutil.Process) -> str:
    """The daemon a process runs: the last part of its module or program name."""
    words: Sequence[str] = process.cmdline()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    return os.path.basename(words[-1]) if words else process.name()


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def engine_key(pid: int) -> str:
    """The API key launcherd gave an engine. Raises: NoNode when the process can't be asked."""
    try:
        return psutil.Process(pid).environ().get("LLAMA_API_KEY", "")
    except psutil.Error as error:
        raise NoNode(f"the engine's environment can't be read: {error}") from error


def serving_node(home: Path, model: str, kind: EngineKind) -> Node:
    """A configured, not yet started node that serves one model from the stand-in or the node's own engine choice.

    Raises: NoNode.
    """
    folder = home / "bench-models"
    write_model(folder / f"{model}.gguf", kind)
    engine = ["[engine]", f"parallel = {PARALLEL}", "threads = 1"]
    if kind == "stand-in":
        engine.append(f"path = {json.dumps(str(write_stand_in(home / 'llama-server')))}")
    models = ["[models]", f"serve = [{json.dumps(model)}]", f"folders = [{json.dumps(str(folder))}]"]
    (home / "mesh.toml").write_text("\n".join([*models, *engine, ""]))
    return Node(home)
