"""The inference port on a real HTTP server and a real bus, in a thread of the test's process.

Engines are given by their address. The launcherd here keeps no engines: it is a bus server that speaks the lease
protocol for models the test declares ready, so that a test can also make it refuse, recall, revoke or fall silent.
With ``own_launcherd`` false there is none: the test runs the real daemon for the same home, and its word is mirrored.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from services.proxyd.interfaces import Headers, Port, Refusal
from services.proxyd.io.http_protocol import InferenceProtocol
from services.proxyd.io.http_service import HttpService
from services.proxyd.io.inference_api import InferenceApp
from services.proxyd.local_view import LocalView
from services.proxyd.mesh_view import MeshView
from services.proxyd.requests_log import RequestRecord, RequestsLog
from shared.codec import Message
from shared.config import ApiSection
from shared.errors import DaemonUnreachable, RequestRefused
from shared.ids import BootId, HolderId, ModelName, PeerId, RequestId, SlotId
from shared.io.bus import BusClient, BusServer, Mirror
from shared.io.drive import Tasks
from shared.io.lease_client import LeaseClient
from shared.messages.daemon import Done, StoryEntry
from shared.messages.leases import (
    AcquireLease,
    CreditsConfirmed,
    EngineSuspected,
    LeaseGranted,
    ReportCredits,
    ReturnCredits,
    WithdrawAcquire,
)
from shared.messages.mesh import TunnelChanged
from shared.messages.models import (
    CatalogChanged,
    CatalogStatus,
    InventoryChanged,
    LocalModel,
    MeshModel,
    ModelPlaced,
    ModelType,
    SlotChanged,
    SlotState,
)
from shared.paths import NodePaths

SELF = PeerId("12D3KooWself")
NODE_NAME = "testnode"
T = TypeVar("T")


@dataclass
class GrantingLauncherd:
    """Speaks for launcherd. ``refusals`` and ``held_back`` are set by tests."""

    engines: dict[ModelName, tuple[str, str]] = field(default_factory=dict)
    """Model -> (base url, API key)."""
    parallel: int = 4
    refusals: dict[ModelName, RequestRefused] = field(default_factory=dict)
    given: dict[SlotId, int] = field(default_factory=dict)
    waiting: list[tuple[AcquireLease, asyncio.Future[Message]]] = field(default_factory=list)
    acquires: list[AcquireLease] = field(default_factory=list)
    withdrawn: list[RequestId] = field(default_factory=list)
    reports: list[ReportCredits] = field(default_factory=list)
    suspicions: list[EngineSuspected] = field(default_factory=list)
    revoked: tuple[SlotId, ...] = ()
    other: Callable[[Message], Awaitable[Message]] | None = None
    """Answers what is not about leases."""

    def state_line(self) -> str:
        return "test"

    def snapshot(self) -> list[Message]:
        return []

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return ()

    @staticmethod
    def slot_of(model: ModelName) -> SlotId:
        return SlotId(f"slot-{model}")

    async def handle(self, request: Message, _deadline: float) -> Message:
        match request:
            case AcquireLease():
                self.acquires.append(request)
                if request.model in self.refusals:
                    raise self.refusals[request.model]
                future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
                self.waiting.append((request, future))
                self.serve()
                return await future
            case WithdrawAcquire(request_id=request_id):
                self.withdrawn.append(request_id)
                for asked, future in list(self.waiting):
                    if asked.request_id == request_id:
                        self.waiting.remove((asked, future))
                        future.set_exception(RequestRefused("withdrawn", "withdrawn"))
                return Done()
            case ReturnCredits(slot_id=slot_id, count=count):
                self.given[slot_id] -= count
                assert self.given[slot_id] >= 0
                self.serve()
                return Done()
            case ReportCredits():
                self.reports.append(request)
                return CreditsConfirmed(revoked=self.revoked)
            case EngineSuspected():
                self.suspicions.append(request)
                return Done()
        if self.other is not None:
            return await self.other(request)
        raise AssertionError(request)

    def serve(self) -> None:
        for asked, future in list(self.waiting):
            engine = self.engines.get(asked.model)
            slot_id = self.slot_of(asked.model)
            free = self.parallel - self.given.get(slot_id, 0)
            if engine is None or free <= 0:
                continue
            self.waiting.remove((asked, future))
            self.given[slot_id] = self.parallel
            future.set_result(
                LeaseGranted(
                    model=asked.model,
                    slot_id=slot_id,
                    base_url=engine[0],
                    api_key=engine[1],
                    credits=free,
                    parallel=self.parallel,
                )
            )

    def in_use(self) -> int:
        """As last reported."""
        return sum(use.in_use for use in self.reports[-1].uses) if self.reports else 0


class OpenAccess:
    """Lets everybody in; refuses one Host, so that a test sees who is asked."""

    def check(self, headers: Headers, port: Port) -> Refusal | None:
        if (b"host", b"evil.example") in headers:
            return Refusal(status=403, code="host_not_allowed", message="not a name of this node")
        return None

    def check_change(self, client_host: str, headers: Headers) -> Refusal | None:
        assert client_host == "127.0.0.1"
        if (b"x-from", b"elsewhere") in headers:
            return Refusal(status=401, code="token_required", message="not from this machine")
        return None

    def preflight(self, headers: Headers, port: Port) -> list[tuple[bytes, bytes]] | None:
        return [(b"access-control-allow-origin", b"https://chat.example")]

    def response_headers(self, headers: Headers, port: Port) -> list[tuple[bytes, bytes]]:
        has_origin = any(name == b"origin" for name, _ in headers)
        return [(b"access-control-allow-origin", b"https://chat.example")] if has_origin else []


class RecordingMetrics:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.running = 0

    def observe(self, record: RequestRecord) -> None:
        self.records.append(record)

    def active(self, delta: int) -> None:
        self.running += delta

    def render(self) -> tuple[bytes, bytes]:
        return b"text/plain; version=0.0.4", b"meshd_requests 1\n"


class Plane:
    """A running inference port. Attributes may be read from the test's thread; change things with :meth:`call`."""

    port: int
    app: InferenceApp
    leases: LeaseClient

    def __init__(
        self,
        paths: NodePaths,
        config: ApiSection,
        queue_limit: int,
        launcherd: GrantingLauncherd,
        own_launcherd: bool = True,
    ) -> None:
        self.paths = paths
        self.config = config
        self.queue_limit = queue_limit
        self.launcherd = launcherd
        self.own_launcherd = own_launcherd
        self.unserved: list[ModelName] = []
        self.view = MeshView()
        self.local = LocalView(self.view.mesh_name, self.view.local_name)
        self.log = RequestsLog()
        self.metrics = RecordingMetrics()
        self.is_idle = False
        self.placements: list[ModelName] = []
        self.avoided: list[tuple[PeerId, ...]] = []
        self.place_on: list[PeerId] = []
        """Where models are placed, the first that is not avoided; here when there is none."""
        self.place_error: RequestRefused | DaemonUnreachable | None = None
        self.place_hangs = False
        self.catalog: dict[str, MeshModel] = {}
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._started: Future[None] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="plane")

    # -- what the test does

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run in the plane's loop."""

        async def run() -> T:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def declare(
        self, model: str, type: ModelType = "llm", size: int = 1000, status: CatalogStatus = "unloaded"
    ) -> None:
        """A model of the catalog."""
        self.catalog[model] = MeshModel(
            name=ModelName(model), type=type, status=status, reason=f"{model} is {status}", file_size_bytes=size,
            nodes_on_disk=(SELF,),
        )  # fmt: skip
        self.call(self.view.apply, CatalogChanged(models=tuple(self.catalog.values())))

    def slot(self, model: str, state: SlotState, reason: str = "", type: ModelType = "llm") -> None:
        """launcherd's word on the model's slot."""
        message = SlotChanged(
            slot_id=GrantingLauncherd.slot_of(ModelName(model)), model=ModelName(model), type=type, state=state,
            reason=reason or f"{model} is {state}", origin="request", parallel=self.launcherd.parallel,
        )  # fmt: skip
        self.call(self._publish_slot, message)

    def _publish_slot(self, message: SlotChanged) -> None:
        self.view.apply(message)
        self.local.apply(message, now=time.time())
        self.leases.on_message(message)

    def serve_model(self, model: str, engine_port: int, type: ModelType = "llm", key: str = "engine-key") -> None:
        """A ready model on an engine that listens on ``engine_port``."""
        self.declare(model, type)
        self.slot(model, "ready", type=type)
        self.launcherd.engines[ModelName(model)] = (f"http://127.0.0.1:{engine_port}", key)
        self.call(self.launcherd.serve)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 10
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def chat(self, model: str | None = "m", **fields: Any) -> tuple[int, dict[str, str], bytes]:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        if model is not None:
            body["model"] = model
        return self.request("POST", "/v1/chat/completions", body)

    # -- running

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        tasks = Tasks()
        server = None
        if self.own_launcherd:
            server = BusServer("launcherd", self.paths, self.launcherd, self.launcherd.handle, tasks)
            server.start()
        client = self._client = BusClient("launcherd", self.paths)
        self.leases = LeaseClient(
            client, tasks, HolderId("holder-1"),
            queue_limit=self.queue_limit, wait_seconds=self.config.request_wait_seconds,
        )  # fmt: skip
        self.view.apply(TunnelChanged(peer_id=SELF, port=1, addresses=()))
        self.view.apply(CatalogChanged(models=()))
        mirror = None
        if self.own_launcherd:
            self.view.apply(InventoryChanged(models=()))
        else:
            mirror = Mirror("launcherd", self.paths, self._snapshot, self._publication, self._new_boot)
            mirror.start(tasks)
        self.app = InferenceApp(
            view=self.view,
            local=self.local,
            ask_launcherd=self._ask_launcherd,
            leases=self.leases,
            place=self._place,
            access=OpenAccess(),
            config=self.config,
            node_name=NODE_NAME,
            requests_log=self.log,
            metrics=self.metrics,
            idle=lambda: self.is_idle,
            data_socket=self.paths.data_socket,
            unserved=self.unserved.append,
        )
        service = HttpService("api", self.app, InferenceProtocol)
        import socket

        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listener.getsockname()[1]
        await service.listen("api", listener)
        self._started.set_result(None)
        await self._stop.wait()
        await service.close(0.2)
        self.app.close()
        await tasks.cancel()
        client.close()
        for part in (server, mirror):
            if part is not None:
                part.close()
        # Cancelled readers of closed sockets must finish inside their loop.
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _snapshot(self, messages: list[Message]) -> None:
        self.view.replace("launcherd", messages)
        self.local.replace(messages, now=time.time())
        self.leases.on_snapshot(messages)

    def _publication(self, message: Message) -> None:
        self.view.apply(message)
        self.local.apply(message, now=time.time())
        self.leases.on_message(message)

    async def _ask_launcherd(self, message: Message, seconds: float) -> Message:
        return await self._client.request(message, deadline_seconds=seconds)

    def _new_boot(self, _boot: BootId) -> None:
        self.leases.on_new_boot()

    async def _place(self, model: ModelName, avoid: tuple[PeerId, ...]) -> ModelPlaced:
        self.placements.append(model)
        self.avoided.append(avoid)
        if self.place_hangs:
            await asyncio.Event().wait()
        if self.place_error is not None:
            raise self.place_error
        for peer_id in self.place_on:
            if peer_id not in avoid:
                return ModelPlaced(model=model, peer_id=peer_id, reason="it is on its disk")
        if self.place_on or SELF in avoid:
            raise RequestRefused("needs_capacity", "no other node can load it")
        return ModelPlaced(model=model, peer_id=SELF, reason="it is on this node's disk")

    def start(self) -> None:
        self._thread.start()
        self._started.result(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()


def local_model(name: str, type: ModelType = "llm", size: int = 1000) -> LocalModel:
    return LocalModel(name=ModelName(name), type=type, path=f"/models/{name}.gguf", file_size_bytes=size)


@contextmanager
def running_plane(
    home: Path, *, queue_limit: int = 64, parallel: int = 4, own_launcherd: bool = True, **config: Any
) -> Iterator[Plane]:
    """An inference port with no models yet."""
    paths = NodePaths(home)
    paths.prepare()
    plane = Plane(paths, ApiSection(port=0, **config), queue_limit, GrantingLauncherd(parallel=parallel), own_launcherd)
    plane.start()
    try:
        yield plane
    finally:
        plane.stop()
