"""The routes of the inference port: what each path serves, deny by default.

Every inference route is served under each of ``PREFIXES``; the engine always sees the ``/v1`` path. What clients of
Lemonade Server know besides is served there too, but ``models``: under ``/v1`` that is the mesh's catalog.

Source: DESIGN §8; docs/spec/lemonade.md; TRAPS 33 (GET on POST routes), FIELD "deny-by-default routes with a test that
walks every route".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.inference_paths import INFERENCE_PATHS
from shared.messages.models import ModelType

ErrorStyle = Literal["openai", "anthropic"]
PREFIXES = ("/v1", "/api/v1", "/v0", "/api/v0")


@dataclass(frozen=True, slots=True)
class InferenceRoute:
    """A POST route that an engine answers; its body names the model."""

    path: str
    type: ModelType
    style: ErrorStyle = "openai"
    target: bytes = field(init=False, compare=False, repr=False)
    """The path as the engine gets it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", self.path.encode("ascii"))


@dataclass(frozen=True, slots=True)
class LocalRoute:
    """A GET route that proxyd answers itself."""

    path: str
    answer: Literal["models", "model", "live", "health", "metrics"]


Operation = Literal[
    "health", "stats", "system-info", "models", "model", "load", "unload", "pull", "delete", "set", "pin"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LemonadeRoute:
    """What clients of Lemonade Server know. ``path`` follows the prefix; that of ``model`` ends with a slash."""

    path: str
    method: Literal["GET", "POST"]
    operation: Operation
    changes_machine: bool = False
    """Files, or what everybody on this node may do: needs more than the right to infer."""


Route = InferenceRoute | LocalRoute | LemonadeRoute

INFERENCE_ROUTES: tuple[InferenceRoute, ...] = tuple(
    InferenceRoute(path, type, "anthropic" if path.startswith("/v1/messages") else "openai")
    for path, type in INFERENCE_PATHS.items()
)
LOCAL_ROUTES: tuple[LocalRoute, ...] = (
    LocalRoute("/v1/models", "models"),
    LocalRoute("/v1/models/", "model"),
    LocalRoute("/live", "live"),
    LocalRoute("/health", "health"),
    LocalRoute("/metrics", "metrics"),
)
LEMONADE_ROUTES: tuple[LemonadeRoute, ...] = (
    LemonadeRoute("/health", "GET", "health"),
    LemonadeRoute("/stats", "GET", "stats"),
    LemonadeRoute("/system-info", "GET", "system-info"),
    LemonadeRoute("/models", "GET", "models"),
    LemonadeRoute("/models/", "GET", "model"),
    LemonadeRoute("/load", "POST", "load"),
    LemonadeRoute("/unload", "POST", "unload"),
    LemonadeRoute("/pull", "POST", "pull", changes_machine=True),
    LemonadeRoute("/delete", "POST", "delete", changes_machine=True),
    LemonadeRoute("/internal/set", "POST", "set", changes_machine=True),
    LemonadeRoute("/internal/pin", "POST", "pin", changes_machine=True),
)


_ONE_MODEL = "/models/"


def _table() -> dict[str, Route]:
    table: dict[str, Route] = {}
    for prefix in PREFIXES:
        table.update({prefix + lemonade.path: lemonade for lemonade in LEMONADE_ROUTES})
        table.update({prefix + route.path.removeprefix("/v1"): route for route in INFERENCE_ROUTES})
    # Lemonade's own tools ask for these without a prefix.
    table.update({route.path: route for route in LEMONADE_ROUTES if route.path.startswith("/internal/")})
    table.update({route.path: route for route in LOCAL_ROUTES})
    return table


_TABLE = _table()
_BY_PATH = {path: route for path, route in _TABLE.items() if not path.endswith(_ONE_MODEL)}
_OF_ONE_MODEL = {path: route for path, route in _TABLE.items() if path.endswith(_ONE_MODEL)}
"""By what comes before the model's id, which may have slashes."""


@dataclass(frozen=True, slots=True)
class NoSuchRoute:
    """404."""


@dataclass(frozen=True, slots=True)
class WrongMethod:
    """405; ``allow`` is the value of the Allow header."""

    allow: str


def find_route(method: str, path: str) -> Route | NoSuchRoute | WrongMethod:
    """The route of a request. Nothing but the table is served. Preflights (OPTIONS) are not its business."""
    route = _BY_PATH.get(path)
    if route is None:
        before, slash, name = path.partition(_ONE_MODEL)
        one = _OF_ONE_MODEL.get(before + slash)
        if one is None or not name:
            return NoSuchRoute()
        route = one
    if isinstance(route, InferenceRoute) or (isinstance(route, LemonadeRoute) and route.method == "POST"):
        return route if method == "POST" else WrongMethod("POST, OPTIONS")
    return route if method in ("GET", "HEAD") else WrongMethod("GET, HEAD, OPTIONS")


def model_id(path: str) -> str:
    """What follows ``/models/`` in the path of one model."""
    return path.partition(_ONE_MODEL)[2]
