"""Finds the programs that run models: the builds of llama.cpp, and the program of each other recipe.

The build that runs what names none: the configured one, else `llama-server` on the PATH, else the embedded one.

Source: ENGINES; docs/spec/options.md, docs/spec/recipes.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, util

from services.launcherd.command_line import EMBEDDED, Engine, EngineOptions
from shared.config import EMBEDDED_BACKEND, PATH_BACKEND, EngineSection, NodeConfig
from shared.errors import EngineMissing
from shared.recipes import LLAMACPP, Recipe

PROGRAM = "llama-server"
ASK_SECONDS = 20.0
"""A build with GPU support may look for devices before it says its version."""
HOW_TO_GET_IT = (
    "install the embedded engine with `pip install xllamacpp` in meshd's environment, or put llama.cpp's "
    "`llama-server` on the PATH (a release from its site, `brew install llama.cpp`, or your own build), or name it "
    'in mesh.toml: [engine] path = "/path/to/llama-server"'
)

_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


@dataclass(slots=True, kw_only=True)
class Installed:
    """What was found on this machine. A build is asked for its version and flags once, when it is needed first."""

    backend: str = ""
    """The build that runs what names none; empty: there is none."""
    reason: str = ""
    """Why there is none, and how to get one."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    """Recipe to program, llamacpp left out."""
    missing_recipes: dict[str, str] = field(default_factory=dict)
    builds: dict[str, str] = field(default_factory=dict)
    """Build of llama.cpp to program; `EMBEDDED` has none."""
    missing_backends: dict[str, str] = field(default_factory=dict)
    seen: frozenset[tuple[str, str]] = frozenset()
    """Every program there was, whether it works or not: another set is worth another look."""
    environ: Mapping[str, str] = field(default_factory=dict)
    _asked: dict[str, Engine] = field(default_factory=dict)

    def default(self) -> Engine | None:
        """The engine that runs what names none. Blocking, but for what was asked already."""
        return self._build(self.backend) if self.backend else None

    def engine(self, options: EngineOptions) -> Engine:
        """The engine for `options`. Blocking. Raises: EngineMissing with what to do."""
        if options.recipe != LLAMACPP:
            program = self.programs.get(options.recipe)
            if program is None:
                raise EngineMissing(self.missing_recipes.get(options.recipe) or f"no recipe {options.recipe} here")
            # It may have been removed since it was seen.
            _recipe_program(replace(self.recipes[options.recipe], program=program), self.environ)
            return Engine(kind=options.recipe, program=(program,), version=os.path.basename(program))
        name = options.backend or self.backend
        if name not in self.builds:
            raise EngineMissing(self.missing_backends.get(name) or self.reason or f"no build {name} here")
        return self._build(name)

    def _build(self, name: str) -> Engine:
        engine = self._asked.get(name)
        if engine is None:
            engine = embedded_engine() if name == EMBEDDED_BACKEND else _ask(self.builds[name], self.environ)
            self._asked[name] = engine
        return engine


def find_installed(config: NodeConfig, environ: Mapping[str, str] | None = None) -> Installed:
    """Everything that can run a model here. Blocking: the default build is run, to see that it works."""
    environ = os.environ if environ is None else environ
    installed = look_for_programs(config, environ)
    wanted = config.engine.backend or (EMBEDDED_BACKEND if config.engine.path == EMBEDDED else "")
    candidates = [wanted] if wanted else [PATH_BACKEND] if config.engine.path else [PATH_BACKEND, EMBEDDED_BACKEND]
    reasons = []
    for name in candidates:
        if name in installed.builds:
            try:
                installed._build(name)
            except EngineMissing as error:
                reasons.append(error.detail)
                installed.missing_backends[name] = error.detail
                del installed.builds[name]
                continue
            installed.backend = name
            return installed
        if len(candidates) == 1:
            reasons.append(installed.missing_backends[name])
    reasons += [] if len(candidates) == 1 else [f"no inference engine is installed: {HOW_TO_GET_IT}"]
    installed.reason = "; ".join(reasons)
    return installed


def look_for_programs(config: NodeConfig, environ: Mapping[str, str]) -> Installed:
    """What is there, without running any of it."""
    installed = Installed(environ=environ, recipes=config.recipes)
    for name in config.engine.backend_names:
        try:
            installed.builds[name] = _build_program(name, config.engine, environ)
        except EngineMissing as error:
            installed.missing_backends[name] = error.detail
    for recipe in config.recipes.values():
        if recipe.name == LLAMACPP:
            continue
        try:
            installed.programs[recipe.name] = _recipe_program(recipe, environ)
        except EngineMissing as error:
            installed.missing_recipes[recipe.name] = error.detail
    installed.seen = frozenset({*installed.builds.items(), *installed.programs.items()})
    return installed


def _build_program(name: str, section: EngineSection, environ: Mapping[str, str]) -> str:
    if name == EMBEDDED_BACKEND:
        if util.find_spec("xllamacpp") is None:
            raise EngineMissing(f"the embedded engine is not installed: {HOW_TO_GET_IT}")
        return ""
    if name != PATH_BACKEND:
        return _program(section.backends[name], environ, f"build {name} of llama.cpp")
    if section.path and section.path != EMBEDDED:
        return _program(section.path, environ, "configured engine", how=HOW_TO_GET_IT)
    installed = shutil.which(PROGRAM, path=environ.get("PATH", ""))
    if installed is None:
        raise EngineMissing(f"no {PROGRAM} is on the PATH: {HOW_TO_GET_IT}")
    return os.path.abspath(installed)


def _recipe_program(recipe: Recipe, environ: Mapping[str, str]) -> str:
    """Raises: EngineMissing with how to get it."""
    try:
        return _program(recipe.program, environ, f"program of the recipe {recipe.name}")
    except EngineMissing as error:
        how = f"; install it: {recipe.how_to_get}" if recipe.how_to_get else ""
        raise EngineMissing(
            f'{error.detail}{how}; or name it in mesh.toml: [recipes.{recipe.name}] program = "/path/to/it"'
        ) from None


def _program(given: str, environ: Mapping[str, str], what: str, how: str = "") -> str:
    """The absolute path of a program that was given as a path, or as a name on the PATH. Raises: EngineMissing."""
    end = f", or {how}" if how else ""
    if os.sep not in given and not given.startswith("~"):
        found = shutil.which(given, path=environ.get("PATH", ""))
        if found is not None:
            return os.path.abspath(found)
        if not how:
            raise EngineMissing(f"the {what}, {given}, is not on the PATH")
    path = os.path.abspath(os.path.expanduser(given))
    if not os.path.isfile(path):
        raise EngineMissing(f"the {what} {path} does not exist" + (f"; {how}" if how else ""))
    if not os.access(path, os.X_OK):
        raise EngineMissing(f"the {what} {path} is not executable; chmod +x it{end}")
    return path


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
