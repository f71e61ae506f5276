"""What proxyd answers itself: errors in each API's shape, comments and errors inside a stream, the models list.

Source: DESIGN §8; TRAPS 34 (errors after the stream began: one framed ``data: {"error":…}`` and no ``[DONE]``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

from services.proxyd.routes import ErrorStyle
from shared.ids import PeerId
from shared.messages.models import MeshModel

JSON_TYPE = b"application/json; charset=utf-8"
STREAM_TYPE = b"text/event-stream"

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Failure(Exception):
    """A request that ends with an error of ours. ``message`` says what, why and what to do next."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.headers = headers


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def error_object(failure: Failure, style: ErrorStyle) -> dict[str, Any]:
    """The body of an error answer."""
    if style == "anthropic":
        kind = _ANTHROPIC_TYPES.get(failure.status)
        if kind is None:
            kind = "api_error" if failure.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": failure.message, "code": failure.code}}
    kind = _OPENAI_TYPES.get(failure.status)
    if kind is None:
        kind = "server_error" if failure.status >= 500 else "invalid_request_error"
    return {"error": {"message": failure.message, "type": kind, "code": failure.code, "param": failure.param}}


def error_headers(failure: Failure) -> list[tuple[bytes, bytes]]:
    """Content-Type, Retry-After where there is one, and the failure's own."""
    headers = [(b"content-type", JSON_TYPE), *failure.headers]
    if failure.retry_after_seconds is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after_seconds))))
    return headers


def stream_error(failure: Failure, style: ErrorStyle, sent_tail: bytes) -> bytes:
    """The last event of a stream that failed. ``sent_tail`` is how the bytes already sent end: a cut event is
    closed first, so that the error is an event of its own."""
    event = b"data: " + to_json(error_object(failure, style)) + b"\n\n"
    if style == "anthropic":
        event = b"event: error\n" + event
    if not sent_tail or sent_tail.endswith((b"\n\n", b"\r\n\r\n")):
        return event
    return b"\n\n" + event


def stream_comment(text: str) -> bytes:
    """An SSE comment: keeps the connection alive and tells people why; clients ignore it."""
    return b": " + " ".join(text.split()).encode("utf-8", "replace") + b"\n\n"


def model_entry(model: MeshModel, node_name: Callable[[PeerId], str]) -> dict[str, Any]:
    """One model in OpenAI's form, with what else people ask of a mesh."""
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "meshd",
        "type": model.type,
        "status": model.status,
        "reason": model.reason,
        "size_bytes": model.file_size_bytes,
        "need_bytes": model.need_bytes,
        "context_tokens": model.context_tokens,
        "parameters": model.parameters,
        "quantization": model.quantization,
        "architecture": model.architecture,
        "builtin": model.builtin,
        "nodes": [node_name(peer) for peer in model.nodes_on_disk],
        "hosts": [node_name(peer) for peer in model.hosts],
    }


def models_list(
    models: Iterable[MeshModel],
    node_name: Callable[[PeerId], str],
    more: Callable[[MeshModel], dict[str, Any]] = lambda _model: {},
) -> dict[str, Any]:
    """``more`` is what else is known of a model."""
    return {"object": "list", "data": [model_entry(model, node_name) | more(model) for model in models]}
