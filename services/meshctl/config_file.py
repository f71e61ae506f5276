"""Changing ``mesh.toml`` without losing anything its owner wrote: comments, order and unknown formatting stay."""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import tomlkit
from tomlkit.exceptions import TOMLKitError

from shared.config import (
    ENVIRONMENT,
    OVERRIDDEN_NAME,
    SECTIONS,
    NodeConfig,
    build_config,
    heeded,
    load_config,
    parse_limits,
)
from shared.errors import ConfigError, StateError
from shared.llamacpp_args import split_args

Changes = Mapping[tuple[str, str], Any]
"""(section, key) -> value."""

TEMPLATE = """\
# This machine's meshd node. 'meshctl config show' lists every setting, 'meshctl config check' checks this file,
# 'meshctl config reload' applies it without unloading models.

[models]
folders = ["~/.models"]
"""


def update_config(path: Path, environ: Mapping[str, str], changes: Changes) -> tuple[str, ...]:
    """Write ``changes`` into the file, which is made if there is none; the dotted keys that differ from before.

    The result is checked first: nothing is written that the daemons would refuse.
    Raises: ConfigError, StateError.
    """
    with _locked(path):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}; fix its permissions or contents") from error
        new, changed = edited(text or TEMPLATE, changes, source=str(path))
        build_config(tomllib.loads(new), environ, source=str(path), configured=True)
        if changed or not text:
            _replace(path, new)
    return changed


def edited(text: str, changes: Changes, *, source: str) -> tuple[str, tuple[str, ...]]:
    """``text`` with ``changes``, and the dotted keys whose value is another now. Raises: ConfigError."""
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}; fix it first, nothing was changed") from error
    changed = []
    for (section, key), value in changes.items():
        plain = list(value) if isinstance(value, tuple) else value
        if section not in document:
            document[section] = tomlkit.table()
        table = document[section]
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {section} must be a section; write [{section}] on its own line")
        if key not in table or table[key] != plain:
            table[key] = plain
            changed.append(f"{section}.{key}")
    return tomlkit.dumps(document), tuple(changed)


def parse_setting(dotted: str, text: str) -> tuple[tuple[str, str], Any]:
    """``api.port``, ``9437`` as (section, key) and a TOML value of that setting's type. Raises: ConfigError."""
    section, key = split_setting(dotted)
    if (section, key) == ("engine", "extra_args") and not text.lstrip().startswith("["):
        return (section, key), list(split_args(text, source="config set"))
    if (section, key) == ("models", "max_loaded_models"):
        limits = parse_limits(text, source="config set")
        return (section, key), limits[0] if len(limits) == 1 else list(limits)
    wanted = get_type_hints(SECTIONS[section])[key]
    try:
        if wanted is bool:
            return (section, key), {"true": True, "false": False}[text.lower()]
        if wanted in (int, float):
            return (section, key), wanted(text)
        if wanted is str:
            return (section, key), text
        if text.lstrip().startswith(("[", "{")):
            return (section, key), tomllib.loads(f"value = {text}")["value"]
        return (section, key), [part.strip() for part in text.split(",") if part.strip()]
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}.get(wanted, 'a list like ["a", "b"]')
        raise ConfigError(f"{dotted} is {kind}, not {text!r}") from None


def split_setting(dotted: str) -> tuple[str, str]:
    """``section.key`` of a known setting. Raises: ConfigError with the nearest one."""
    known = [f"{section}.{key}" for section, cls in SECTIONS.items() for key in get_type_hints(cls)]
    if dotted in known:
        section, _, key = dotted.partition(".")
        return section, key
    import difflib

    by_key = [name for name in known if name.partition(".")[2] == dotted]
    close = by_key or difflib.get_close_matches(dotted, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "'meshctl config show' lists every setting"
    raise ConfigError(f"unknown setting {dotted!r}; {hint}")


def sources(path: Path, environ: Mapping[str, str]) -> tuple[NodeConfig, dict[str, str]]:
    """The effective configuration, and for each dotted key where its value comes from. Raises: ConfigError."""
    config = load_config(path, environ)
    written = tomllib.loads(path.read_text(encoding="utf-8")) if config.configured else {}
    said = heeded(path, environ)
    variables = {where: name for name, where in ENVIRONMENT.items() if said.get(name)}
    return config, {
        f"{section}.{key}": variables.get((section, key))
        or (path.name if key in written.get(section, {}) else "default")
        for section, cls in SECTIONS.items()
        for key in get_type_hints(cls)
    }


def override_variables(path: Path, changes: Changes, *, starts: bool) -> tuple[str, ...]:
    """From now on ``changes``, which the command line said, count more than the variables for them.

    Where the node ``starts`` that is all that was said, else it is added to what was. Returns these variables.
    Raises: ConfigError, StateError.
    """
    said = tuple(variable for variable, where in ENVIRONMENT.items() if where in changes)
    file = path.with_name(OVERRIDDEN_NAME)
    with _locked(path):
        try:
            before = set() if starts else set(ENVIRONMENT) - heeded(path, dict.fromkeys(ENVIRONMENT, "")).keys()
            if before | set(said):
                _replace(file, json.dumps(sorted(before | set(said))) + "\n")
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(file, error) from error
    return said


class _locked:
    """Two meshctl at once must not lose each other's change."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f".{path.name}.lock")

    def __enter__(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _cannot_write(self._path.parent, error) from error
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _replace(path: Path, text: str) -> None:
    """All or nothing: a full disk leaves the old file."""
    # A link to a file kept elsewhere (dotfiles) stays a link.
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        with open(temporary, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write {path}: {error.strerror or error}; free some space or fix its permissions. Nothing was changed"
    )
