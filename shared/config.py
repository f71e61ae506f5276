"""``mesh.toml`` and ``MESH_*`` variables as frozen dataclasses, one per daemon, read once and passed down.

Numbers carry their unit in the name and their reason in the comment. An unknown key fails with the nearest known
one. Without ``mesh.toml`` the node is idle (:attr:`NodeConfig.configured` is false).
"""

from __future__ import annotations

import difflib
import ipaddress
import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from shared.errors import ConfigError
from shared.llamacpp_args import refusal, split_args
from shared.messages.models import MODEL_TYPES, ModelType
from shared.recipes import BUILTIN_RECIPES, RECIPE_KEYS, Recipe, changed_recipe

EMBEDDED_BACKEND = "embedded"
PATH_BACKEND = "path"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSection:
    """``[node]``"""

    name: str = ""
    """Shown to people; empty: the host name."""
    max_vram_bytes: int = 0
    """Upper limit on what models may use; 0: all the device has, less the reserve."""
    reserve_bytes: int = 512 * 1024**2
    """Left free on a GPU for the desktop and the driver."""
    cpu_share: float = 0.75
    """Without a GPU, models may use this share of the RAM."""
    client: bool = False
    """Only consumes: this node asks others and serves nothing itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    """``[models]``"""

    serve: tuple[str, ...] = ()
    """Models this node serves from the start (``--model``); empty: the mesh chooses."""
    folders: tuple[str, ...] = ("~/.models",)
    """Searched for ``.gguf`` files, with subfolders."""
    max_loaded_models: tuple[int, ...] = (1,)
    """One number for every type, or one each for llm embedding reranking audio image (the rest 1). -1: no limit."""
    idle_unload_minutes: float = 0.0
    """Unload a model unused for so long; 0: never."""
    download_stall_seconds: float = 60.0
    """A download's server may say nothing for so long; how long the whole takes does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    """``[engine]``"""

    path: str = ""
    """A ``llama-server``; empty: the one on PATH, else the embedded engine."""
    backend: str = ""
    """Which build of llama.cpp runs models: ``embedded``, ``path`` (the one of ``path``, else of the PATH) or a name of
    ``backends``; empty: ``path`` where there is one, else ``embedded``."""
    backends: Mapping[str, str] = field(default_factory=dict)
    """Further builds, name to program: ``vulkan = "/opt/llama-vulkan/llama-server"``."""
    threads: int = 0
    """Per engine; 0: the number of physical cores, less one if there are more than two."""
    parallel: int = 4
    """Requests an engine works on at once."""
    context_tokens: int = 0
    """Over all parallel requests; 0: the trained context times ``parallel``, at most 16,384."""
    gpu_layers: int = -1
    """-1: as many as fit."""
    extra_args: tuple[str, ...] = ()
    """For llama.cpp, in addition to what meshd sets."""
    readiness_seconds: float = 600.0
    """At least so long may a load take; 120 s per GB of model file if that is more."""
    hang_seconds: float = 15.0
    """Silence after which an engine that should speak counts as hung."""
    queue_limit: int = 256
    """Requests that may wait for one model; more get 429."""

    @property
    def backend_names(self) -> tuple[str, ...]:
        """What ``backend`` and ``llamacpp_backend`` may be."""
        return (EMBEDDED_BACKEND, PATH_BACKEND, *self.backends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSection:
    """``[api]``: the inference port."""

    host: str = "127.0.0.1"
    port: int = 9337
    allow_public_without_keys: bool = False
    """A bind that other machines can reach is refused without API keys unless this is true."""
    allowed_hosts: tuple[str, ...] = ()
    """Host header names accepted besides loopback names and this node's own addresses."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins that may use the inference port, e.g. ``https://chat.example``; ``*`` for all."""
    max_body_bytes: int = 64 * 1024**2
    request_wait_seconds: float = 600.0
    """How long a request may wait for its model."""
    silent_wait_seconds: float = 10.0
    """How long a streaming request's response headers are held back while it waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSection:
    """``[console]``: the management port."""

    host: str = "127.0.0.1"
    port: int = 3131


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSection:
    """``[mesh]``"""

    host: str = "0.0.0.0"
    port: int = 9340
    """UDP and TCP."""
    transport: Literal["auto", "quic", "tcp"] = "auto"
    """For bulk streams: ``auto`` takes TLS over TCP where it connects, else QUIC. ``tcp`` also carries control."""
    advertise: tuple[str, ...] = ()
    """Further places where others reach this node, HOST or HOST:PORT: a public name, a forwarded port."""
    accept_admin: bool = True
    """Whether nodes with an issuer's grant may read logs and load, unload and drain here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The whole file. Each daemon's shell takes the sections it needs."""

    node: NodeSection = NodeSection()
    models: ModelsSection = ModelsSection()
    engine: EngineSection = EngineSection()
    api: ApiSection = ApiSection()
    console: ConsoleSection = ConsoleSection()
    mesh: MeshSection = MeshSection()
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: dict(BUILTIN_RECIPES))
    """Every recipe of this node: those built in, as ``[recipes.NAME]`` changes them, and its own."""
    configured: bool = False
    """Whether ``mesh.toml`` exists; without it the node is idle."""

    def slot_limit(self, type: ModelType) -> int:
        """How many models of ``type`` may be loaded at once; -1 without limit."""
        return type_limit(self.models.max_loaded_models, type)

    def model_folders(self) -> tuple[Path, ...]:
        return tuple(Path(os.path.expanduser(folder)) for folder in self.models.folders)


def type_limit(limits: tuple[int, ...], type: ModelType) -> int:
    """One number counts for every type; several are for ``MODEL_TYPES`` in order, the rest 1."""
    if len(limits) == 1:
        return limits[0]
    index = MODEL_TYPES.index(type)
    return limits[index] if index < len(limits) else 1


SECTIONS: dict[str, type[Any]] = {
    "node": NodeSection,
    "models": ModelsSection,
    "engine": EngineSection,
    "api": ApiSection,
    "console": ConsoleSection,
    "mesh": MeshSection,
}

ENVIRONMENT: dict[str, tuple[str, str]] = {
    "MESH_API_PORT": ("api", "port"),
    "MESH_API_HOST": ("api", "host"),
    "MESH_CONSOLE_PORT": ("console", "port"),
    "MESH_PORT": ("mesh", "port"),
    "MESH_HOST": ("mesh", "host"),
    "MESH_MAX_LOADED_MODELS": ("models", "max_loaded_models"),
    "MESH_ENGINE": ("engine", "path"),
    "MESH_CTX_SIZE": ("engine", "context_tokens"),
    "MESH_LLAMACPP_ARGS": ("engine", "extra_args"),
    "MESH_LLAMACPP_BACKEND": ("engine", "backend"),
    "MESH_DOWNLOAD_STALL_SECONDS": ("models", "download_stall_seconds"),
}
"""Variables that override the file: name -> (section, key)."""

OVERRIDDEN_NAME = "command_line.json"
"""Beside ``mesh.toml``: the variables that the command line of ``meshctl up`` overrides for this start of the node."""


def load_config(path: Path, environ: Mapping[str, str]) -> NodeConfig:
    """Read ``mesh.toml`` (absent: idle) and the environment.

    Raises: ConfigError naming the file, the line or key, the reason and the nearest known key.
    """
    document: dict[str, Any] = {}
    configured = True
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        configured = False
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; fix its permissions or contents") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return build_config(document, heeded(path, environ), source=str(path), configured=configured)


def heeded(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the variables that the command line of ``meshctl up`` overrides; its values are in ``path``.

    Raises: ConfigError.
    """
    file = path.with_name(OVERRIDDEN_NAME)
    try:
        overridden = frozenset(json.loads(file.read_text(encoding="utf-8")))
        return {name: value for name, value in environ.items() if name not in overridden}
    except FileNotFoundError:
        return dict(environ)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot read {file}: {error}; remove it, or start the node anew with 'meshctl up'"
        ) from error


def build_config(
    document: Mapping[str, Any], environ: Mapping[str, str], *, source: str, configured: bool
) -> NodeConfig:
    """Pure part of :func:`load_config`. Raises: ConfigError."""
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, section in document.items():
        if name == "recipes":
            continue
        if name not in SECTIONS:
            raise ConfigError(f"{source}: unknown section [{name}]{_nearest(name, (*SECTIONS, 'recipes'))}")
        if not isinstance(section, dict):
            raise ConfigError(f"{source}: [{name}] must be a section, not a value; write [{name}] on its own line")
        known = [entry.name for entry in fields(SECTIONS[name])]
        for key, value in section.items():
            if key not in known:
                raise ConfigError(f"{source}: unknown key {name}.{key}{_nearest(key, known)}")
            values[name][key] = value
    said_by: dict[str, str] = {}
    for variable, (name, key) in ENVIRONMENT.items():
        text = environ.get(variable)
        if text:
            values[name][key] = split_args(text, source=variable) if key == "extra_args" else text
            said_by[f"{name}.{key}"] = variable
    limits = values["models"].get("max_loaded_models")
    if limits is not None:
        where = said_by.get("models.max_loaded_models", source)
        values["models"]["max_loaded_models"] = parse_limits(limits, source=where)
    sections = {name: _validated(name, cls, values[name], source, said_by) for name, cls in SECTIONS.items()}
    recipes = _recipes(document.get("recipes", {}), source)
    config = NodeConfig(**sections, recipes=recipes, configured=configured)
    _check(config, source, said_by)
    return config


def _recipes(document: Any, source: str) -> dict[str, Recipe]:
    """The built-in recipes with those of ``[recipes.NAME]`` put over them. Raises: ConfigError."""
    if not isinstance(document, dict) or not all(isinstance(values, dict) for values in document.values()):
        raise ConfigError(f"{source}: a recipe is a section; write [recipes.NAME] on its own line")
    recipes = dict(BUILTIN_RECIPES)
    for name, values in document.items():
        for key in values:
            if key not in RECIPE_KEYS:
                raise ConfigError(f"{source}: unknown key recipes.{name}.{key}{_nearest(key, RECIPE_KEYS)}")
        recipes[name] = changed_recipe(name, _checked(f"recipes.{name}", Recipe, values, source, {}), source=source)
    return recipes


def parse_limits(value: Any, *, source: str) -> tuple[int, ...]:
    """``5``, ``"5 2 4"``, ``"5,2,4"`` or a list to limits. Raises: ConfigError for 0, less than -1, too many."""
    parts = value if isinstance(value, list | tuple) else str(value).replace(",", " ").split()
    try:
        limits = tuple(int(str(part)) for part in parts)
    except ValueError:
        limits = ()
    if not limits or len(limits) > len(MODEL_TYPES) or any(limit == 0 or limit < -1 for limit in limits):
        raise ConfigError(
            f"{source}: models.max_loaded_models = {value!r}: give one number, or up to {len(MODEL_TYPES)} "
            f"({' '.join(MODEL_TYPES)}); each is -1 (no limit) or at least 1"
        )
    return limits


def _validated(name: str, cls: type[Any], values: dict[str, Any], source: str, said_by: Mapping[str, str]) -> Any:
    return cls(**_checked(name, cls, values, source, said_by))


def _checked(
    name: str, cls: type[Any], values: dict[str, Any], source: str, said_by: Mapping[str, str]
) -> dict[str, Any]:
    hints = get_type_hints(cls)
    checked: dict[str, Any] = {}
    for key, value in values.items():
        try:
            if isinstance(value, bool) is not (hints[key] is bool):
                raise ValueError("true or false" if hints[key] is bool else "not true or false")
            checked[key] = TypeAdapter(hints[key]).validate_python(value)
            if isinstance(checked[key], int | float) and not LOWEST.get(key, 0) <= checked[key] < math.inf:
                raise ValueError(f"a number of at least {LOWEST.get(key, 0)}")
        except (ValidationError, ValueError) as error:
            why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"{_where(source, said_by, name, key)} = {value!r}: {why}") from None
    return checked


LOWEST = {"download_stall_seconds": 0.1, "gpu_layers": -1, "parallel": 1, "queue_limit": 1, "max_body_bytes": 1}
"""Smallest value of a number; 0 for all others."""


def _where(source: str, said_by: Mapping[str, str], name: str, key: str) -> str:
    """The place a person has to look at: the variable that overrode the key, else the file."""
    variable = said_by.get(f"{name}.{key}")
    return f"{variable} (for {name}.{key})" if variable else f"{source}: {name}.{key}"


def _check(config: NodeConfig, source: str, said_by: Mapping[str, str]) -> None:
    ports = {"api": config.api.port, "console": config.console.port, "mesh": config.mesh.port}
    for name, port in ports.items():
        if port > 65535:
            where = _where(source, said_by, name, "port")
            raise ConfigError(f"{where} = {port}: a port is 0 (any free one) to 65535")
    for one, other in itertools.combinations(ports, 2):
        if ports[one] == ports[other] != 0:
            raise ConfigError(f"{source}: {one}.port and {other}.port are both {ports[one]}; they must differ")
    for name, host in (("api", config.api.host), ("console", config.console.host), ("mesh", config.mesh.host)):
        if host != "localhost":
            try:
                ipaddress.ip_address(host)
            except ValueError:
                where = _where(source, said_by, name, "host")
                raise ConfigError(f"{where} = {host!r}: give an IP address, e.g. 127.0.0.1") from None
    for place in config.mesh.advertise:
        if advertised(place) is None:
            raise ConfigError(
                f"{source}: mesh.advertise: {place!r} is no place to reach this node; write HOST or HOST:PORT, "
                "IPv6 as [ADDRESS]:PORT"
            )
    engine = config.engine
    for name, program in engine.backends.items():
        if name in (EMBEDDED_BACKEND, PATH_BACKEND) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ConfigError(
                f"{source}: engine.backends.{name}: a build is named with letters, digits, '.', '_' and '-', and not "
                f"{EMBEDDED_BACKEND} or {PATH_BACKEND}, which mean something already"
            )
        if not program:
            raise ConfigError(f"{source}: engine.backends.{name} is empty; give the path of a llama-server")
    if engine.backend and engine.backend not in engine.backend_names:
        where = _where(source, said_by, "engine", "backend")
        raise ConfigError(f"{where} = {engine.backend!r}: known are {', '.join(engine.backend_names)}")
    if why := refusal(engine.extra_args):
        raise ConfigError(f"{_where(source, said_by, 'engine', 'extra_args')}: {why}")
    if not 0.05 <= config.node.cpu_share <= 1:
        raise ConfigError(f"{source}: node.cpu_share = {config.node.cpu_share}: between 0.05 and 1")


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def advertised(place: str) -> tuple[str, int | None] | None:
    """``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT`` as (host, port or None for the node's own); None for anything else."""
    matched = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]{1,253}))(?::([0-9]{1,5}))?", place)
    if matched is None:
        return None
    port = int(matched[3]) if matched[3] else None
    if port is not None and not 0 < port <= 65535:
        return None
    if matched[1]:
        try:
            ipaddress.IPv6Address(matched[1])
        except ValueError:
            return None
    return matched[1] or matched[2], port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a bind to ``host``."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def changed_keys(old: NodeConfig, new: NodeConfig) -> tuple[str, ...]:
    """Dotted keys that differ, for ``config reload``."""
    changed = []
    for name, cls in SECTIONS.items():
        before, after = getattr(old, name), getattr(new, name)
        changed += [
            f"{name}.{entry.name}" for entry in fields(cls) if getattr(before, entry.name) != getattr(after, entry.name)
        ]
    names = sorted({*old.recipes, *new.recipes})
    changed += [f"recipes.{name}" for name in names if old.recipes.get(name) != new.recipes.get(name)]
    return tuple(changed)
