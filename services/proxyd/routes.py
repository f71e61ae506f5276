"""The inference routes: what each path serves, deny by default.

Source: DESIGN §8; TRAPS 33 (GET on POST routes), FIELD "deny-by-default routes with a test that walks every route".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.inference_paths import INFERENCE_PATHS
from shared.messages.models import ModelType

ErrorStyle = Literal["openai", "anthropic"]
MODELS_PREFIX = "/v1/models/"


@dataclass(frozen=True, slots=True)
class InferenceRoute:
    """A POST route that an engine answers; its body names the model."""

    path: str
    type: ModelType
    style: ErrorStyle = "openai"


@dataclass(frozen=True, slots=True)
class LocalRoute:
    """A GET route that proxyd answers itself."""

    path: str
    answer: Literal["models", "model", "live", "health", "metrics"]


Route = InferenceRoute | LocalRoute

INFERENCE_ROUTES: tuple[InferenceRoute, ...] = tuple(
    InferenceRoute(path, type, "anthropic" if path.startswith("/v1/messages") else "openai")
    for path, type in INFERENCE_PATHS.items()
)
LOCAL_ROUTES: tuple[LocalRoute, ...] = (
    LocalRoute("/v1/models", "models"),
    LocalRoute(MODELS_PREFIX, "model"),
    LocalRoute("/live", "live"),
    LocalRoute("/health", "health"),
    LocalRoute("/metrics", "metrics"),
)
_ONE_MODEL = LOCAL_ROUTES[1]
_BY_PATH: dict[str, Route] = {route.path: route for route in INFERENCE_ROUTES}
_BY_PATH.update({route.path: route for route in LOCAL_ROUTES if route is not _ONE_MODEL})


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
        if not path.startswith(MODELS_PREFIX) or len(path) == len(MODELS_PREFIX):
            return NoSuchRoute()
        route = _ONE_MODEL
    if isinstance(route, InferenceRoute):
        return route if method == "POST" else WrongMethod("POST, OPTIONS")
    return route if method in ("GET", "HEAD") else WrongMethod("GET, HEAD, OPTIONS")
