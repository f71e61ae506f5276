"""The inference port as a plain ASGI app: routes, access, errors, and one :class:`Exchange` per request.

No framework in the byte path.

Source: DESIGN §8.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.proxyd.headers import read_headers
from services.proxyd.interfaces import AccessCheck, AskLauncherd, Headers, Idle, MetricsSink, Place
from services.proxyd.io.data_plane import DataPlane, Receive, RunningRequests, Scope, Send
from services.proxyd.io.exchange import ClientGone, Exchange
from services.proxyd.io.lemonade_api import LemonadeApi
from services.proxyd.io.remote import Tunnels
from services.proxyd.io.upstream import UpstreamPool
from services.proxyd.lemonade import model_facts
from services.proxyd.local_view import LocalView
from services.proxyd.mesh_view import MeshView, Unknown
from services.proxyd.replies import (
    JSON_TYPE,
    Failure,
    error_headers,
    error_object,
    model_entry,
    models_list,
    to_json,
)
from services.proxyd.requests_log import RequestRecord, RequestsLog
from services.proxyd.resolution import IDLE, LIST_HINT, failure_of
from services.proxyd.routes import (
    INFERENCE_ROUTES,
    ErrorStyle,
    InferenceRoute,
    LemonadeRoute,
    LocalRoute,
    NoSuchRoute,
    WrongMethod,
    find_route,
    model_id,
)
from shared.config import ApiSection
from shared.ids import ModelName
from shared.io.lease_client import LeaseClient
from shared.messages.models import MeshModel
from shared.version import VERSION


class InferenceApp:
    """Serves the inference port. ``close`` it after the last request."""

    def __init__(
        self,
        *,
        view: MeshView,
        local: LocalView,
        ask_launcherd: AskLauncherd,
        leases: LeaseClient,
        place: Place,
        access: AccessCheck,
        config: ApiSection,
        node_name: str,
        requests_log: RequestsLog,
        metrics: MetricsSink,
        idle: Idle,
        data_socket: Path,
        unserved: Callable[[ModelName], None] = lambda _model: None,
    ) -> None:
        """``unserved`` is told of each request for an existing model that ended without any engine having had it:
        launcherd counts the others (DESIGN §5, demand)."""
        self._view = view
        self._local_view = local
        self._access = access
        self._log = requests_log
        self._metrics = metrics
        self._idle = idle
        self._lemonade = LemonadeApi(
            local=local, mesh=view, requests_log=requests_log, access=access, ask=ask_launcherd, idle=idle
        )
        self._pool = UpstreamPool()
        self._plane = DataPlane(
            view=view,
            leases=leases,
            tunnels=Tunnels(data_socket, self._pool),
            place=place,
            config=config,
            node_name=node_name,
            pool=self._pool,
            cors=lambda headers: access.response_headers(headers, "inference"),
        )
        self._running = RunningRequests(requests_log, metrics, view, unserved)

    @property
    def config(self) -> ApiSection:
        return self._plane.config

    @config.setter
    def config(self, config: ApiSection) -> None:
        """Takes effect with the next request."""
        self._plane.config = config

    @property
    def active_count(self) -> int:
        return len(self._running)

    def note_hosts(self) -> None:
        """The routes have changed: who serves what is remembered for when it does no more."""
        self._plane.last_seen.note(self._view.hosts_elsewhere(), now=time.monotonic())

    def close(self) -> None:
        self._pool.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await _lifespan(receive, send)
            return
        method: str = scope["method"]
        headers: Headers = scope["headers"]
        route = find_route(method, scope["path"])
        style: ErrorStyle = route.style if isinstance(route, InferenceRoute) else "openai"
        if method == "OPTIONS":
            await self._preflight(headers, send)
            return
        refusal = self._access.check(headers, "inference")
        if refusal is not None:
            failure = Failure(refusal.status, refusal.code, refusal.message, headers=refusal.headers)
            await self._error(failure, style, headers, send)
            return
        if isinstance(route, InferenceRoute):
            await self._infer(route, scope, receive, send)
        elif isinstance(route, LocalRoute):
            await self._local(route, scope, send)
        elif isinstance(route, LemonadeRoute):
            await self._lemonade_answer(route, scope, receive, send)
        else:
            await self._error(_no_route(route, method, scope["path"]), style, headers, send)

    # -- inference ----------------------------------------------------------------------------------------

    async def _infer(self, route: InferenceRoute, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        incoming = read_headers(scope["headers"])
        record = RequestRecord(
            request_id=self._plane.request_id(incoming.request_id),
            route=route.path,
            started=started,
            node=self._plane.node_name,
        )
        if self._idle():
            await self._error(IDLE, route.style, scope["headers"], send, record.request_id)
            return
        exchange = Exchange(self._plane, route, scope, receive, send, incoming, record)
        self._running.begin(exchange)
        try:
            await exchange.run()
        finally:
            self._running.end(exchange)

    # -- what proxyd answers itself -----------------------------------------------------------------------

    async def _local(self, route: LocalRoute, scope: Scope, send: Send) -> None:
        view = self._view
        headers: Headers = scope["headers"]
        match route.answer:
            case "models":
                await self._json(200, models_list(view.models(), view.node_name, self._facts), headers, send)
            case "model":
                name = model_id(scope["path"])
                model = view.model(name)
                if model is None:
                    nearest = view.resolve(name, "llm", settled=True)
                    known = nearest if isinstance(nearest, Unknown) else Unknown(name, ())
                    await self._error(failure_of(known, INFERENCE_ROUTES[0]), "openai", headers, send)
                    return
                await self._json(200, model_entry(model, view.node_name) | self._facts(model), headers, send)
            case "live":
                await self._json(200, {"status": "ok"}, headers, send)
            case "health":
                await self._json(200, self._health(), headers, send)
            case "metrics":
                content_type, body = self._metrics.render()
                await self._reply(200, [(b"content-type", content_type)], body, headers, send)

    def _facts(self, model: MeshModel) -> dict[str, Any]:
        """What is known besides of a model that is on this node's disk."""
        here = self._local_view
        local = here.inventory.get(self._view.local_name(model.name))
        return {} if local is None else model_facts(here, local, here.registry.get(local.name))

    async def _lemonade_answer(self, route: LemonadeRoute, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Headers = scope["headers"]
        try:
            value = await self._lemonade.answer(route, scope, receive, send)
        except Failure as failure:
            await self._error(failure, "openai", headers, send)
        except ClientGone:
            return
        else:
            if value is not None:
                await self._json(200, value, headers, send)

    def _health(self) -> dict[str, Any]:
        models = self._view.models()
        idle = self._idle()
        return {
            "status": "ok",
            "state": "idle" if idle else "serving" if any(model.status == "ready" for model in models) else "waiting",
            "reason": IDLE.message if idle else "",
            "node": self._plane.node_name,
            "version": VERSION,
            "ready": [model.name for model in models if model.status == "ready"],
            "loading": [model.name for model in models if model.status == "loading"],
            "requests_active": len(self._running),
            "requests_total": self._log.requests_total,
        }

    async def _preflight(self, headers: Headers, send: Send) -> None:
        answer = self._access.preflight(headers, "inference")
        if answer is None:
            failure = Failure(
                403,
                "origin_not_allowed",
                "web pages of this origin may not use this node; add it to api.allowed_origins in mesh.toml",
            )
            await self._error(failure, "openai", headers, send)
            return
        await send({"type": "http.response.start", "status": 204, "headers": answer})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _json(self, status: int, value: Any, headers: Headers, send: Send) -> None:
        await self._reply(status, [(b"content-type", JSON_TYPE)], to_json(value), headers, send)

    async def _error(
        self, failure: Failure, style: ErrorStyle, headers: Headers, send: Send, request_id: str | None = None
    ) -> None:
        own = error_headers(failure)
        own.append((b"x-request-id", (request_id or self._plane.request_id(read_headers(headers).request_id)).encode()))
        await self._reply(failure.status, own, to_json(error_object(failure, style)), headers, send)

    async def _reply(
        self, status: int, own: list[tuple[bytes, bytes]], body: bytes, headers: Headers, send: Send
    ) -> None:
        cors = self._access.response_headers(headers, "inference")
        all_headers = [*own, (b"content-length", b"%d" % len(body)), *cors]
        await send({"type": "http.response.start", "status": status, "headers": all_headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _no_route(route: NoSuchRoute | WrongMethod, method: str, path: str) -> Failure:
    if isinstance(route, WrongMethod):
        return Failure(
            405,
            "method_not_allowed",
            f"{path[:200]} does not take {method}; use {route.allow}",
            headers=((b"allow", route.allow.encode("ascii")),),
        )
    paths = ", ".join(known.path for known in INFERENCE_ROUTES)
    return Failure(404, "not_found", f"nothing is served at {path[:200]}; inference is at {paths}. {LIST_HINT}")


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            await send({"type": "lifespan.shutdown.complete"})
            return
