"""The management port's routes. Imported only after inference serves: FastAPI costs 0.2 s and 12 MB.

Everything is JSON; nothing a peer or a user chose is ever put into HTML, a path or a command line. The gate in
front has checked Host, Origin and, for changes, the token.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field

from services.proxyd.io.mesh_api import MESH_ROUTES, NodeName, add_mesh_routes
from services.proxyd.io.node_queries import NodeQueries
from services.proxyd.metrics import Metrics
from services.proxyd.requests_log import RequestsLog
from shared import codec
from shared.errors import MeshError, RequestRefused
from shared.ids import ModelName
from shared.messages.downloads import CancelPull, DeleteModel, PullModel
from shared.messages.models import LoadModel, MeshModel, PinModel, UnloadModel
from shared.status_view import to_jsonable
from shared.version import VERSION

LOAD_SECONDS = 3600.0
STATUS_OF = {
    "model_not_found": 404,
    "unknown_daemon": 404,
    "key_not_found": 404,
    "not_loaded": 404,
    "not_downloading": 404,
    "file_not_found": 404,
    "quantization_not_found": 404,
    "option_refused": 400,
    "backend_unknown": 400,
    "recipe_unknown": 400,
    "bad_source": 400,
    "bad_labels": 400,
    "ambiguous": 400,
    "no_gguf": 400,
    "disk_full": 507,
    "config": 400,
    "schema": 400,
    "overloaded": 429,
    "idle": 503,
    "daemon_unreachable": 503,
    "deadline": 504,
    "no_such_invite": 404,
    "no_such_peer": 404,
    "bad_name": 400,
    "token_foreign": 400,
    "token_damaged": 400,
    "not_allowed": 403,
    "not_an_issuer": 403,
    "banned": 403,
    "starting": 503,
    "peer_unreachable": 503,
    "model_file_missing": 404,
    "model_too_large": 507,
}
"""HTTP status for an error's code; 409 for a refusal that is not listed."""

ROUTES = (
    ("GET", "/live", "this process answers"),
    ("GET", "/metrics", "numbers for Prometheus"),
    ("GET", "/openapi.json", "the description of this API"),
    ("GET", "/api/mesh/status", "everything about this node, as 'meshctl status --json'"),
    ("GET", "/api/mesh/models", "the mesh's catalog"),
    ("GET", "/api/mesh/requests", "requests in flight and the newest finished ones"),
    ("GET", "/api/mesh/why/{subject}", "why a model, node or request is as it is, in words"),
    ("GET", "/api/mesh/story/{daemon}", "what a daemon was told and did about it"),
    ("GET", "/api/mesh/logs/{daemon}?lines=200", "the newest lines of a daemon's log; of another node with &node=NAME"),
    ("POST", "/api/mesh/models/load", "load a model on this node (token)"),
    ("POST", "/api/mesh/models/unload", "unload one model, or all (token)"),
    ("POST", "/api/mesh/models/pin", "keep a model loaded, or let it go again (token)"),
    ("POST", "/api/mesh/models/pull", "download a model onto this node's disk (token)"),
    ("POST", "/api/mesh/models/pull/cancel", "stop a download; what is there is kept (token)"),
    ("POST", "/api/mesh/models/delete", "unload a model and delete its files, if meshd downloaded them (token)"),
    ("POST", "/api/mesh/config/reload", "read mesh.toml again (token)"),
    ("POST", "/api/mesh/daemons/{name}/restart", "restart one daemon (token)"),
    *MESH_ROUTES,
)


ModelText = Annotated[str, Field(min_length=1, max_length=400)]
SourceText = Annotated[str, Field(max_length=4096)]


class LoadBody(BaseModel):
    model: ModelText
    context_tokens: int = Field(default=0, ge=0)
    parallel: int = Field(default=0, ge=0, le=1024)
    engine_args: list[SourceText] | None = Field(default=None, max_length=256)
    """None: as configured, empty: none."""
    backend: str = Field(default="", max_length=200)
    """An installed build; empty: as configured."""
    pinned: bool | None = None
    """Pin or unpin it; None: leave that as it is."""
    wait: bool = True
    node: NodeName | None = None
    """Another node, by name or id: it loads with its own settings and is not waited for; needs an issuer's grant."""


class UnloadBody(BaseModel):
    model: str | None = Field(default=None, max_length=400)
    wait: bool = True
    node: NodeName | None = None
    """Another node, by name or id; needs an issuer's grant."""


class PinBody(BaseModel):
    model: ModelText
    pinned: bool = True


class PullBody(BaseModel):
    model: SourceText = Field(min_length=1)
    """A name of the registry, ``org/repo:quant``, or a URL; with ``checkpoint`` a new name for that."""
    checkpoint: SourceText = ""
    recipe: str = Field(default="", max_length=64)
    labels: list[Annotated[str, Field(max_length=64)]] = Field(default=[], max_length=32)
    mmproj: SourceText = ""
    wait: bool = False


class ModelBody(BaseModel):
    model: SourceText = Field(min_length=1)


def build_management_api(
    queries: NodeQueries,
    models: Callable[[], list[MeshModel]],
    requests: RequestsLog,
    metrics: Metrics,
    now: Callable[[], float],
) -> FastAPI:
    """The routes over what the worker has. ``now`` is the event loop's clock."""
    # No /docs: its page loads scripts from a foreign host.
    app = FastAPI(title="meshd", version=VERSION, docs_url=None, redoc_url=None)

    @app.exception_handler(MeshError)
    async def mesh_error(_request: Request, error: MeshError) -> JSONResponse:
        headers = {}
        if isinstance(error, RequestRefused) and error.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, round(error.retry_after_seconds)))
        body = {"error": {"code": error.code, "message": error.detail}}
        return JSONResponse(body, STATUS_OF.get(error.code, 409), headers)

    @app.exception_handler(RequestValidationError)
    async def bad_request(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"error": {"code": "bad_request", "message": f"{where}: {first['msg']}"}}, 400)

    @app.get("/", response_class=HTMLResponse)
    async def index() -> str:
        rows = "\n".join(f"{method:5}{path:40}{what}" for method, path, what in ROUTES)
        return (
            "<!doctype html><meta charset=utf-8><title>meshd</title>"
            f"<pre>meshd {html.escape(VERSION)}: management port of this node\n\n{html.escape(rows)}\n\n"
            "Changes need the token in the node's file console_token:\n"
            '  curl -X POST -H "X-Mesh-Token: $(cat $MESH_HOME/console_token)" …\n'
            "The same from a shell: meshctl status, meshctl why, meshctl logs</pre>"
        )

    @app.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "ok", "version": VERSION}

    @app.get("/metrics")
    async def metrics_text() -> Response:
        content_type, body = metrics.render()
        return Response(body, headers={"content-type": content_type.decode()})

    @app.get("/api/mesh/status")
    async def status() -> Any:
        return to_jsonable(await queries.status())

    @app.get("/api/mesh/models")
    async def catalog() -> Any:
        return {"models": [_plain(model) for model in models()]}

    @app.get("/api/mesh/requests")
    async def recent(limit: Annotated[int, Query(ge=1, le=500)] = 50) -> Any:
        return {
            "active": [_record(record, now()) for record in requests.active()],
            "recent": [_record(record, now()) for record in requests.recent(limit)],
        }

    @app.get("/api/mesh/why/{subject:path}")
    async def why(subject: str) -> Any:
        return {"subject": subject[:400], "sentences": await queries.explain(subject[:400])}

    @app.get("/api/mesh/story/{daemon}")
    async def story(daemon: str, limit: Annotated[int, Query(ge=1, le=500)] = 100) -> Any:
        return codec.to_jsonable(await queries.story(daemon, limit))

    @app.get("/api/mesh/logs/{daemon}")
    async def logs(
        daemon: str,
        lines: Annotated[int, Query(ge=1, le=5000)] = 200,
        node: Annotated[str | None, Query(max_length=400)] = None,
    ) -> Any:
        peer_id = await queries.other_node(node)
        if peer_id is not None:
            return {"daemon": daemon[:40], **await queries.ask_node(peer_id, "logs", daemon[:40], lines=lines)}
        return {"daemon": daemon[:40], "lines": await queries.log_lines(daemon, lines)}

    async def of_launcherd(message: codec.Message) -> Any:
        return codec.to_jsonable(await queries.ask("launcherd", message, deadline_seconds=LOAD_SECONDS))

    @app.post("/api/mesh/models/load")
    async def load(body: LoadBody) -> Any:
        peer_id = await queries.other_node(body.node)
        if peer_id is not None:
            return await queries.ask_node(peer_id, "load", body.model)
        message = LoadModel(
            model=ModelName(body.model),
            context_tokens=body.context_tokens,
            parallel=body.parallel,
            extra_args=None if body.engine_args is None else tuple(body.engine_args),
            backend=body.backend,
            pinned=body.pinned,
            wait=body.wait,
        )
        return await of_launcherd(message)

    @app.post("/api/mesh/models/unload")
    async def unload(body: UnloadBody) -> Any:
        peer_id = await queries.other_node(body.node)
        if peer_id is not None:
            return await queries.ask_node(peer_id, "unload", body.model or "")
        model = ModelName(body.model) if body.model else None
        return await of_launcherd(UnloadModel(model=model, wait=body.wait))

    @app.post("/api/mesh/models/pin")
    async def pin(body: PinBody) -> Any:
        return await of_launcherd(PinModel(model=ModelName(body.model), pinned=body.pinned))

    @app.post("/api/mesh/models/pull")
    async def pull(body: PullBody) -> Any:
        message = PullModel(
            model=body.model, checkpoint=body.checkpoint, recipe=body.recipe, labels=tuple(body.labels),
            mmproj=body.mmproj, wait=body.wait,
        )  # fmt: skip
        return await of_launcherd(message)

    @app.post("/api/mesh/models/pull/cancel")
    async def cancel_pull(body: ModelBody) -> Any:
        return await of_launcherd(CancelPull(model=body.model))

    @app.post("/api/mesh/models/delete")
    async def delete(body: ModelBody) -> Any:
        return await of_launcherd(DeleteModel(model=ModelName(body.model)))

    @app.post("/api/mesh/config/reload")
    async def reload() -> Any:
        return {"daemons": await queries.reload()}

    @app.post("/api/mesh/daemons/{name}/restart")
    async def restart(name: str) -> Any:
        await queries.restart(name)
        return {"restarted": name}

    add_mesh_routes(app, queries)
    return app


def _plain(model: MeshModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in MeshModel.__dataclass_fields__}


def _record(record: Any, now: float) -> dict[str, Any]:
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__ if name != "started"}
    return {**fields, "age_seconds": round(now - record.started, 3)}
