"""In front of the management API: who may enter, and headers that keep browsers from doing anything clever."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from services.proxyd.access import Access
from services.proxyd.interfaces import Refusal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SAFE_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]
BODY_LIMIT_BYTES = 1024 * 1024


class ManagementGate:
    """Plain ASGI around ``app``. Until :meth:`open` it answers 503: FastAPI is imported after inference serves."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._app: App | None = None

    def open(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        extra = [*SAFE_HEADERS, *self._access.response_headers(headers, "management")]

        async def send_safely(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        if scope["method"] == "OPTIONS":
            answer = self._access.preflight(headers, "management")
            if answer is None:
                await _refuse(send_safely, FOREIGN)
            else:
                await send({"type": "http.response.start", "status": 204, "headers": answer})
                await send({"type": "http.response.body", "body": b""})
            return
        client = scope.get("client")
        refusal = self._access.check_management(scope["method"], client[0] if client else "", headers)
        if refusal is None and _declared_bytes(headers) > BODY_LIMIT_BYTES:
            refusal = Refusal(status=413, code="too_large", message=f"a body has at most {BODY_LIMIT_BYTES} bytes here")
        if refusal is None and self._app is None:
            refusal = STARTING
        if refusal is not None or self._app is None:
            await _refuse(send_safely, refusal or STARTING)
            return
        await self._app(scope, _bounded(receive), send_safely)


FOREIGN = Refusal(
    status=403, code="origin_not_allowed", message="pages of other sites may not use this node's management port"
)
STARTING = Refusal(
    status=503,
    code="starting",
    message="the management API is starting; try again in a second",
    headers=((b"retry-after", b"1"),),
)


async def _refuse(send: Send, refusal: Refusal) -> None:
    body = json.dumps({"error": {"code": refusal.code, "message": refusal.message}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *refusal.headers,
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _declared_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _bounded(receive: Receive) -> Receive:
    """``receive`` that reports a disconnect instead of an endless chunked body."""
    seen = 0

    async def bounded() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= BODY_LIMIT_BYTES else {"type": "http.disconnect"}

    return bounded
