"""What all requests of the inference port share, and what is known of those that run.

While requests run, one timer looks after all of them (clients gone, engines silent); an idle port costs nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from services.proxyd.headers import IncomingHeaders
from services.proxyd.interfaces import Headers, MetricsSink, Place
from services.proxyd.io.remote import RemoteLease, Tunnels
from services.proxyd.io.upstream import Address, UpstreamPool
from services.proxyd.last_seen import LastSeen
from services.proxyd.mesh_view import MeshView, NoneReady, Ready, Unknown, Unnamed, WrongType
from services.proxyd.replies import Failure
from services.proxyd.requests_log import RequestRecord, RequestsLog
from services.proxyd.resolution import RETRY_AFTER_SECONDS, failure_of, failure_of_refusal
from services.proxyd.routes import InferenceRoute
from services.proxyd.routing import CoolDowns, choose_host
from shared.config import ApiSection
from shared.errors import RequestRefused
from shared.ids import ModelName, PeerId, RequestId
from shared.io.lease_client import Lease, LeaseClient
from shared.messages.models import RouteHost

SWEEP_SECONDS = 0.1
STALL_SECONDS = 2.0
"""Silence after which launcherd is asked to probe the engine. Not an error by itself: prefill may take longer."""

_NOBODY_HAS_IT = ("model_not_found", "model_file_missing", "needs_capacity")
Turn = Lease | RemoteLease
"""The right to run one request on an engine, here or elsewhere."""
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class DataPlane:
    """Where requests can go, and with what."""

    view: MeshView
    leases: LeaseClient
    tunnels: Tunnels
    place: Place
    config: ApiSection
    node_name: str
    pool: UpstreamPool
    cors: Callable[[Headers], list[tuple[bytes, bytes]]]
    cool_downs: CoolDowns = field(default_factory=CoolDowns)
    last_seen: LastSeen = field(default_factory=LastSeen)
    node_header: bytes = b""
    _addresses: dict[str, tuple[Address, bytes]] = field(default_factory=dict)
    _id_prefix: str = field(default_factory=lambda: os.urandom(8).hex())
    _id_count: int = 0

    def __post_init__(self) -> None:
        self.node_header = _ascii(self.node_name)

    def header_of(self, node: str) -> bytes:
        """A node's name as a header's value."""
        return self.node_header if node == self.node_name else _ascii(node)

    def request_id(self, given: bytes) -> RequestId:
        """The client's own id, or a new one: this process's random prefix and a count."""
        if given:
            return RequestId(given.decode("ascii"))
        self._id_count += 1
        return RequestId(f"{self._id_prefix}{self._id_count:08x}")

    def choose(self, wanted: Ready, session: str | None, excluded: Collection[PeerId] = ()) -> RouteHost | None:
        """The host to ask for a request of this conversation; None when all are excluded."""
        in_use = self.tunnels.in_use
        hosts: Sequence[RouteHost] = wanted.hosts
        if in_use:
            hosts = [
                replace(host, load=max(host.load, in_use[host.peer_id, wanted.model] / max(1, host.parallel)))
                for host in hosts
            ]
        return choose_host(
            wanted.model,
            session,
            hosts,
            self_id=self.view.self_id,
            excluded=excluded,
            doubtful=self.doubtful(wanted),
        )

    def doubtful(self, wanted: Ready) -> Collection[PeerId]:
        """Hosts to ask only when there is no other."""
        return self.cool_downs.cooling(wanted.model, now=time.monotonic()) | wanted.suspects

    def failure(self, meant: Unknown | WrongType | Unnamed | NoneReady, route: InferenceRoute) -> Failure:
        """The error for a name that leads to no engine."""
        if isinstance(meant, Unknown):
            gone = self._gone(ModelName(meant.name))
            if gone is not None:
                return gone
        return failure_of(meant, route)

    def refusal(self, model: ModelName | None, error: RequestRefused) -> Failure:
        """The error for a request that electiond or a launcherd refused."""
        gone = self._gone(model) if model is not None and error.code in _NOBODY_HAS_IT else None
        return gone or failure_of_refusal(model or "the model", error)

    def _gone(self, model: ModelName) -> Failure | None:
        words = self.last_seen.words(model, now=time.monotonic())
        if words is None:
            return None
        return Failure(
            503,
            "hosts_gone",
            f"no node that is connected serves {model}: {words}. 'meshctl peers' tells who is connected",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )

    def release(self, turn: Turn) -> None:
        """The request has ended. Releasing twice is harmless."""
        if isinstance(turn, Lease):
            self.leases.release(turn)
        else:
            turn.close()

    def address(self, base_url: str) -> tuple[Address, bytes]:
        """(host, port) and the Host header of ``http://HOST:PORT``."""
        known = self._addresses.get(base_url)
        if known is None:
            if len(self._addresses) > 1000:
                self._addresses.clear()
            authority = base_url.removeprefix("http://")
            host, _, port = authority.rpartition(":")
            known = self._addresses[base_url] = ((host.strip("[]"), int(port)), authority.encode("ascii"))
        return known


def _ascii(name: str) -> bytes:
    return "".join(char if char.isprintable() else "?" for char in name).encode("ascii", "replace")


def target_of(route: InferenceRoute, scope: Scope) -> bytes:
    """The engine's path, whatever prefix the client used, and the query as it wrote it."""
    return route.target + b"?" + scope["query_string"] if scope["query_string"] else route.target


def mesh_headers(
    plane: DataPlane, record: RequestRecord, incoming: IncomingHeaders, scope: Scope
) -> list[tuple[bytes, bytes]]:
    """What every answer tells about its way, and CORS headers where they are due."""
    headers = [
        (b"x-request-id", record.request_id.encode("ascii")),
        (b"x-mesh-node", plane.header_of(record.node)),
        (b"x-mesh-queue-ms", b"%.1f" % (record.queue_seconds * 1000)),
        (b"x-mesh-overhead-ms", b"%.2f" % (record.overhead_seconds * 1000)),
        (b"x-mesh-attempts", b"%d" % record.attempts),
    ]
    if incoming.origin:
        headers += plane.cors(scope["headers"])
    return headers


class SilenceWatch:
    """Tells launcherd once of each spell of silence of an engine."""

    __slots__ = ("_told",)

    def __init__(self) -> None:
        self._told = False

    def look(self, leases: LeaseClient, lease: Lease, heard_at: float, now: float) -> None:
        if now - heard_at < STALL_SECONDS:
            self._told = False
        elif not self._told:
            self._told = True
            leases.suspect(lease, f"no byte for {now - heard_at:.1f} s", broken=False)


class Running(Protocol):
    """A request under way."""

    record: RequestRecord

    def sweep(self, now: float) -> None:
        """Called a few times a second."""
        ...


class RunningRequests:
    """All requests under way, from their first byte to their record.

    ``unserved`` is told of each request for an existing model that ended without any engine having had it.
    """

    def __init__(
        self, requests_log: RequestsLog, metrics: MetricsSink, view: MeshView, unserved: Callable[[ModelName], None]
    ) -> None:
        self._log = requests_log
        self._metrics = metrics
        self._view = view
        self._unserved = unserved
        self._running: set[Running] = set()
        self._armed = False

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request: Running) -> None:
        self._running.add(request)
        self._log.begin(request.record)
        self._metrics.active(1)
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def end(self, request: Running) -> None:
        self._running.discard(request)
        record = request.record
        self._metrics.active(-1)
        self._log.finish(record)
        self._metrics.observe(record)
        if not record.attempts and record.model is not None and record.status != 429:
            self._count_unserved(record.model)

    def _count_unserved(self, model: ModelName) -> None:
        if self._view.model(model) is not None:
            self._unserved(model)

    def _sweep(self) -> None:
        self._armed = bool(self._running)
        if self._armed:
            now = time.monotonic()
            for request in list(self._running):
                request.sweep(now)
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
