"""One inference request from its body to the last byte of its answer.

=========  ==================================================================================================
receive    the body is read whole (it names the model, and a retry needs it), up to ``max_body_bytes``
resolve    what the model name means now; what can never be answered fails here
turn       a free credit of this node's engine at once; else wait for a place here or on another node, while the model
           is placed, loaded or busy
attempt    the request goes to the engine; until a byte of the answer was sent, a failing engine costs only
           another attempt, on another host where there is one
forward    bytes as they come; their ends are kept for statistics
=========  ==================================================================================================

A client that goes away cancels whatever is under way: the place in the queue, or the connection to the engine. To
learn of it takes a task; a request that ends within ``WATCH_AFTER_SECONDS`` does without.

Source: DESIGN §8; TRAPS 26, 30, 34.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from services.proxyd.headers import IncomingHeaders, engine_request, is_event_stream, returned_headers
from services.proxyd.io.data_plane import (
    STALL_SECONDS,
    DataPlane,
    Receive,
    Scope,
    Send,
    SilenceWatch,
    Turn,
    mesh_headers,
    target_of,
)
from services.proxyd.io.remote import RemoteLease
from services.proxyd.io.upstream import NotReached, UpstreamFailed, UpstreamResponse
from services.proxyd.io.waiting import TurnWait
from services.proxyd.mesh_view import NotReady, Ready, Unsettled
from services.proxyd.replies import (
    STREAM_TYPE,
    Failure,
    error_headers,
    error_object,
    stream_comment,
    stream_error,
    to_json,
)
from services.proxyd.request_head import BadRequest, parse_head, session_key
from services.proxyd.requests_log import RequestRecord
from services.proxyd.routes import InferenceRoute
from services.proxyd.usage import BodyEnds, Usage, read_usage
from shared.ids import ModelName
from shared.io.lease_client import Lease

ATTEMPTS = 3
RETRY_SECONDS = (0.1, 0.5)
"""Between attempts on one node: launcherd sees an engine's exit within milliseconds, and then the lease waits for the
engine that comes next."""
WATCH_AFTER_SECONDS = 0.05
WHOLE_BYTES = 64 * 1024
"""An answer that is no stream is held until it is complete or so large: cut before that, it is tried again."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """See the module. ``run`` never raises for anything a client or an engine does."""

    __slots__ = (
        "_body",
        "_body_at",
        "_gone",
        "_head_sent",
        "_incoming",
        "_plane",
        "_receive",
        "_response",
        "_route",
        "_scope",
        "_send",
        "_sent_at",
        "_silence",
        "_streams",
        "_task",
        "_turn",
        "_watcher",
        "finished",
        "record",
    )

    def __init__(
        self,
        plane: DataPlane,
        route: InferenceRoute,
        scope: Scope,
        receive: Receive,
        send: Send,
        incoming: IncomingHeaders,
        record: RequestRecord,
    ) -> None:
        self._plane = plane
        self._route = route
        self._scope = scope
        self._receive = receive
        self._send = send
        self._incoming = incoming
        self.record = record
        self.finished = False
        self._gone = False
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._body = b""
        self._body_at = record.started
        self._head_sent = False
        self._streams = False
        self._turn: Turn | None = None
        self._response: UpstreamResponse | None = None
        self._sent_at = 0.0
        self._silence = SilenceWatch()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        record = self.record
        try:
            self._body = await self._read_body()
            self._body_at = time.monotonic()
            record.request_bytes = len(self._body)
            head = parse_head(self._body, self._incoming.content_type)
            record.streaming = head.stream
            record.model = head.model
            await self._answer(head.model)
        except ClientGone:
            record.outcome = "client_gone"
        except BadRequest as error:
            await self._fail(Failure(400, error.code, error.message, param=error.param))
        except Failure as failure:
            await self._fail(failure)
        except asyncio.CancelledError:
            if not self._gone:
                record.outcome = "error"
                record.reason = "proxyd was stopped"
                raise
            if self._task is not None:
                self._task.uncancel()
            record.outcome = "client_gone"
        finally:
            self.finished = True
            record.total_seconds = time.monotonic() - record.started
            if self._watcher is not None:
                self._watcher.cancel()

    # -- the client ---------------------------------------------------------------------------------------

    async def _read_body(self) -> bytes:
        limit = self._plane.config.max_body_bytes
        if (self._incoming.content_length or 0) > limit:
            raise self._too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            if not message.get("more_body", False):
                if not parts:
                    return bytes(part)
                parts.append(part)
                return b"".join(parts)
            size += len(part)
            if size > limit:
                raise self._too_large(limit)
            parts.append(part)

    @staticmethod
    def _too_large(limit: int) -> Failure:
        return Failure(
            413,
            "body_too_large",
            f"the request body is over this node's limit of {limit} bytes; send less, or raise api.max_body_bytes in "
            "mesh.toml",
        )

    def sweep(self, now: float) -> None:
        """Called a few times a second while the request runs."""
        if self._watcher is None and self._body and now - self._body_at > WATCH_AFTER_SECONDS:
            self.watch()
        turn, response = self._turn, self._response
        if turn is None or (response is not None and response.buffered_bytes):
            return
        heard_at = self._sent_at if response is None else response.heard_at
        if isinstance(turn, Lease):
            self._silence.look(self._plane.leases, turn, heard_at, now)
        elif response is not None and now - heard_at >= STALL_SECONDS:
            # Its own node has the engine probed, or the way there is broken: meanwhile others go elsewhere.
            self._plane.cool_downs.silent(turn.peer_id, turn.model, now=now)

    def watch(self) -> None:
        """Notice from now on that the client goes away."""
        if self._watcher is None and not self.finished:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="client watch")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.finished and self._task is not None:
            self._gone = True
            self._task.cancel()

    # -- resolving and waiting ----------------------------------------------------------------------------

    async def _answer(self, name: ModelName | None) -> None:
        """Attempts until one succeeds. Raises: Failure."""
        record = self.record
        while record.attempts < ATTEMPTS:
            turn = await self._find_turn(name)
            record.reason = ""
            record.attempts += 1
            self._turn = turn
            self._note_node(turn)
            try:
                if await self._attempt(turn):
                    return
            finally:
                self._turn = None
                self._plane.release(turn)
            if record.attempts < ATTEMPTS:
                self.watch()
                if not self._another_stands_by(name):
                    await asyncio.sleep(RETRY_SECONDS[record.attempts - 1])
        raise Failure(
            503,
            "engine_failed",
            f"the engine of {record.model} failed {ATTEMPTS} times on this request ({record.reason}); "
            f"'meshctl logs launcherd' and 'meshctl why {record.model}' tell more",
            retry_after_seconds=10,
        )

    def _note_node(self, turn: Turn) -> None:
        plane = self._plane
        if isinstance(turn, RemoteLease):
            self.record.elsewhere = True
            self.record.node = plane.view.node_name(turn.peer_id)
        else:
            self.record.elsewhere = False
            self.record.node = plane.node_name

    def _another_stands_by(self, name: ModelName | None) -> bool:
        """Whether a host is ready that did not just fail."""
        wanted = self._plane.view.resolve(name, self._route.type)
        if not isinstance(wanted, Ready):
            return False
        doubtful = self._plane.doubtful(wanted)
        return any(host.peer_id not in doubtful for host in wanted.hosts)

    async def _find_turn(self, name: ModelName | None) -> Turn:
        """At once where this node has a free credit, else after waiting. Raises: Failure."""
        plane = self._plane
        wanted = plane.view.resolve(name, self._route.type)
        if not isinstance(wanted, Ready | NotReady | Unsettled):
            raise plane.failure(wanted, self._route)
        if isinstance(wanted, Ready) and self._is_local(wanted):
            self.record.model = wanted.model
            lease = plane.leases.try_acquire(plane.view.local_name(wanted.model))
            if lease is not None:
                return lease
        return await self._wait(name)

    def _is_local(self, wanted: Ready) -> bool:
        """Whether this node's own engine is the one to ask."""
        if not wanted.local:
            return False
        if len(wanted.hosts) == 1:
            return True
        chosen = self._plane.choose(wanted, self._session())
        return chosen is not None and chosen.peer_id == self._plane.view.self_id

    def _session(self) -> str | None:
        return session_key(self._body)

    async def _wait(self, name: ModelName | None) -> Turn:
        """A turn, after however long it takes. Raises: Failure."""
        self.watch()
        began = time.monotonic()
        record = self.record
        wait = TurnWait(self._plane, self._route, name, record, self._session)
        try:
            return await wait.run(self._say_waiting if record.streaming else None)
        finally:
            record.queue_seconds += time.monotonic() - began

    async def _say_waiting(self, reason: str) -> None:
        """The client of a stream learns why it waits; from here on errors are events."""
        if not self._head_sent:
            headers = [(b"content-type", STREAM_TYPE), (b"cache-control", b"no-cache"), *self._own_headers()]
            await self._start(200, headers)
            self._streams = True
        comment = stream_comment(f"waiting: {reason}")
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    # -- the engine ---------------------------------------------------------------------------------------

    async def _attempt(self, turn: Turn) -> bool:
        """Whether the request is answered; False when another attempt may do better."""
        try:
            response = self._response = await self._ask(turn)
        except NotReached as error:
            self._engine_failed(turn, error)
            return False
        try:
            return await self._forward(response, turn)
        finally:
            self._response = None
            response.close()

    async def _ask(self, turn: Turn) -> UpstreamResponse:
        """Send the request. Raises: NotReached."""
        plane = self._plane
        target, forwarded, size = target_of(self._route, self._scope), self._incoming.forwarded, len(self._body)
        self._sent_at = time.monotonic()
        if isinstance(turn, Lease):
            address, authority = plane.address(turn.base_url)
            head = engine_request(target, authority, turn.api_key, forwarded, size)
            return await plane.pool.request(address, head, self._body)
        # The far tunneld writes the head anew, with the key of its engine.
        head = engine_request(target, b"mesh", "", forwarded, size)
        return await plane.tunnels.request(turn, head, self._body)

    def _engine_failed(self, turn: Turn, error: UpstreamFailed) -> None:
        plane = self._plane
        now = time.monotonic()
        if isinstance(turn, Lease):
            self.record.reason = f"the engine {error.detail}"
            plane.cool_downs.failed(plane.view.self_id, self._model(turn), now=now)
            plane.leases.suspect(turn, error.detail, broken=True)
        else:
            self.record.reason = f"the engine on {self.record.node} {error.detail}"
            plane.cool_downs.failed(turn.peer_id, self._model(turn), now=now)

    async def _forward(self, response: UpstreamResponse, turn: Turn) -> bool:
        is_stream = is_event_stream(response.headers)
        try:
            data = await self._first_bytes(response, is_stream)
        except UpstreamFailed as error:
            self._engine_failed(turn, error)
            return False
        heard_at = response.heard_at
        record = self.record
        record.status = response.status
        now = time.monotonic()
        record.first_byte_seconds = now - self._body_at
        record.overhead_seconds = self._sent_at - record.started - record.queue_seconds + now - heard_at
        if not self._streams:
            await self._start(response.status, [*returned_headers(response.headers), *self._own_headers()])
        elif not is_stream or response.status != 200:
            raise await self._engine_error(response, data)
        send = self._send
        if response.complete and not response.buffered_bytes:
            record.response_bytes = len(data)
            await send({"type": "http.response.body", "body": data, "more_body": False})
            self._answered(turn, response, read_usage(data, data))
            return True
        ends = BodyEnds()
        try:
            while True:
                if data:
                    ends.add(data)
                    record.response_bytes += len(data)
                if response.complete and not response.buffered_bytes:
                    await send({"type": "http.response.body", "body": data, "more_body": False})
                    break
                await send({"type": "http.response.body", "body": data, "more_body": True})
                await response.more()
                data = response.take()
        except UpstreamFailed as error:
            # Going on elsewhere with the text so far would begin here.
            self._engine_failed(turn, error)
            await self._cut(is_stream, ends)
        else:
            self._answered(turn, response, ends.usage())
        return True

    def _answered(self, turn: Turn, response: UpstreamResponse, usage: Usage) -> None:
        self.record.answered(response.status, usage)
        peer_id = turn.peer_id if isinstance(turn, RemoteLease) else self._plane.view.self_id
        self._plane.cool_downs.succeeded(peer_id, self._model(turn))

    def _model(self, turn: Turn) -> ModelName:
        """The mesh's name of the model; a lease's own is what its launcherd calls it."""
        return self.record.model or turn.model

    @staticmethod
    async def _first_bytes(response: UpstreamResponse, is_stream: bool) -> bytes:
        """What the answer begins with: the first bytes of a stream, the whole of a small answer."""
        data = response.take()
        if is_stream:
            while not data and not response.complete:
                await response.more()
                data = response.take()
            return data
        if response.complete:
            return data
        parts = [data]
        size = len(data)
        while not response.complete and size <= WHOLE_BYTES:
            await response.more()
            part = response.take()
            size += len(part)
            parts.append(part)
        parts.append(response.take())
        return b"".join(parts)

    async def _cut(self, is_stream: bool, ends: BodyEnds) -> None:
        """The engine died after bytes were sent. Never ends as if complete."""
        record = self.record
        record.outcome = "engine_failed"
        if is_stream:
            failure = Failure(
                502, "engine_failed", f"the answer is incomplete: {record.reason} before it was finished; send it again"
            )
            event = stream_error(failure, self._route.style, ends.last[-4:])
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        # Else the answer stays unfinished: the server closes the connection short of the promised length, or
        # without the last chunk, and the client sees that it was cut.

    @staticmethod
    async def _engine_error(response: UpstreamResponse, data: bytes) -> Failure:
        """What the engine refused after this stream had begun with comments."""
        parts = [data]
        try:
            while not response.complete and sum(map(len, parts)) <= WHOLE_BYTES:
                await response.more()
                parts.append(response.take())
        except UpstreamFailed:
            pass
        text = b"".join(parts)[:2000].decode("utf-8", "replace")
        return Failure(response.status, "engine_error", f"the engine answered {response.status}: {text}")

    # -- answering ----------------------------------------------------------------------------------------

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        return mesh_headers(self._plane, self.record, self._incoming, self._scope)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._head_sent = True
        self.record.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _fail(self, failure: Failure) -> None:
        record = self.record
        record.reason = failure.message
        record.outcome = "engine_failed" if failure.code == "engine_failed" else "refused"
        style = self._route.style
        if self._streams:
            body = stream_error(failure, style, b"")
        elif self._head_sent:
            return
        else:
            body = to_json(error_object(failure, style))
            length = (b"content-length", b"%d" % len(body))
            await self._start(failure.status, [*error_headers(failure), length, *self._own_headers()])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
