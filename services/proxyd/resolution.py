"""What a model name that leads to no engine means for the client.

Source: DESIGN §8: unknown model 404; no model: 400; the wrong type for the route: 400; nothing ready: 503.
"""

from __future__ import annotations

from services.proxyd.mesh_view import NoneReady, Unknown, Unnamed, WrongType
from services.proxyd.replies import Failure
from services.proxyd.routes import INFERENCE_ROUTES, InferenceRoute
from shared.errors import RequestRefused

LIST_HINT = "GET /v1/models lists them all"
_NO_MODEL_HERE = ("model_not_found", "model_file_missing")
RETRY_AFTER_SECONDS = 10.0


def failure_of(resolution: Unknown | WrongType | Unnamed | NoneReady, route: InferenceRoute) -> Failure:
    """The error that answers it."""
    match resolution:
        case Unknown(name=name, nearest=nearest):
            near = f" Nearest: {', '.join(nearest)}." if nearest else ""
            return Failure(
                404, "model_not_found", f"there is no model {name!r} in this mesh.{near} {LIST_HINT}", param="model"
            )
        case WrongType(model=model, type=kind):
            paths = [other.path for other in INFERENCE_ROUTES if other.type == kind]
            return Failure(
                400,
                "wrong_model_type",
                f"{model} is a model of type {kind} and cannot answer {route.path}, which takes models of type "
                f"{route.type}; use {' or '.join(paths)}",
                param="model",
            )
        case Unnamed(ready=ready):
            if ready:
                which = f"name one of the {len(ready)} that are ready: {', '.join(ready[:10])}"
            else:
                which = f"no model of type {route.type} is ready to stand in; name one. {LIST_HINT}"
            return Failure(400, "model_required", f"the request names no model; {which}", param="model")
        case NoneReady(reason=reason):
            return Failure(
                503,
                "not_ready",
                f"{reason}; name a model and it will be loaded. {LIST_HINT}",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )


def failure_of_refusal(model: str, error: RequestRefused) -> Failure:
    """What electiond's or launcherd's refusal means for the client: nothing will make this request run soon."""
    if error.code == "overloaded":
        return Failure(429, "overloaded", error.detail, retry_after_seconds=error.retry_after_seconds or 1.0)
    if error.code in _NO_MODEL_HERE:
        return Failure(404, error.code, f"{error.detail}. {LIST_HINT}", param="model")
    return Failure(
        503, error.code, f"{model} is not ready: {error.detail}",
        retry_after_seconds=error.retry_after_seconds or RETRY_AFTER_SECONDS,
    )  # fmt: skip


IDLE = Failure(
    503,
    "idle",
    "this node is idle: it has no mesh.toml. Run 'meshctl up' (or bin/quickstart) to set it up",
    retry_after_seconds=RETRY_AFTER_SECONDS,
)
