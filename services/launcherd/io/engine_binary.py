"""Finds the engine to use: the configured one, else `llama-server` on the PATH, else the embedded one.

Source: ENGINES; issue text "A `llama-server` given in config or found on PATH is used instead".
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata, util

from services.launcherd.command_line import Engine
from shared.errors import EngineMissing

PROGRAM = "llama-server"
EMBEDDED = "embedded"
ASK_SECONDS = 20.0
"""A build with GPU support may look for devices before it says its version."""
HOW_TO_GET_IT = (
    "install the embedded engine with `pip install xllamacpp` in meshd's environment, or put llama.cpp's "
    "`llama-server` on the PATH (a release from its site, `brew install llama.cpp`, or your own build), or name it "
    'in mesh.toml: [engine] path = "/path/to/llama-server"'
)

_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


def find_engine(configured: str = "", environ: Mapping[str, str] | None = None) -> Engine:
    """The engine to start models with. Blocking: runs the binary to ask its version and flags.

    `configured` is a path, or `embedded` to leave a `llama-server` on the PATH alone. Raises: EngineMissing with
    what to do.
    """
    environ = os.environ if environ is None else environ
    if configured and configured != EMBEDDED:
        path = os.path.abspath(os.path.expanduser(configured))
        if not os.path.isfile(path):
            raise EngineMissing(f"the configured engine {path} does not exist; {HOW_TO_GET_IT}")
        if not os.access(path, os.X_OK):
            raise EngineMissing(f"the configured engine {path} is not executable; chmod +x it, or {HOW_TO_GET_IT}")
        return _ask(path, environ)
    reason = ""
    if configured != EMBEDDED:
        installed = shutil.which(PROGRAM, path=environ.get("PATH", ""))
        if installed is not None:
            try:
                return _ask(os.path.abspath(installed), environ)
            except EngineMissing as error:
                reason = f"{error.detail}; "
    if util.find_spec("xllamacpp") is not None:
        return embedded_engine()
    raise EngineMissing(f"{reason}no inference engine is installed: {HOW_TO_GET_IT}")


def embedded_engine() -> Engine:
    """The engine of the xllamacpp wheel, run by this Python."""
    try:
        version = metadata.version("xllamacpp")
    except metadata.PackageNotFoundError:
        version = "unknown version"
    # -P: nothing in the directory it runs in may stand in for a module.
    program = (sys.executable, "-P", "-m", "services.launcherd.engine_server")
    return Engine(kind=EMBEDDED, program=program, version=f"xllamacpp {version}")


def _ask(path: str, environ: Mapping[str, str]) -> Engine:
    version = _output(path, "--version", environ)
    if version is None:
        raise EngineMissing(f"the engine {path} does not run ({path} --version failed)")
    listing = _output(path, "--help", environ)
    flags = frozenset(_FLAG.findall(listing)) if listing else frozenset()
    line = next((line for line in version.splitlines() if line.startswith("version")), "version unknown")
    return Engine(
        kind=PROGRAM,
        program=(path,),
        version=f"{os.path.basename(path)} {line.removeprefix('version').strip(': ')}",
        flags=flags if "--port" in flags else None,
    )


def _output(path: str, flag: str, environ: Mapping[str, str]) -> str | None:
    """What the program says to a flag, on either stream; None if it fails."""
    try:
        done = subprocess.run(
            [path, flag],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
