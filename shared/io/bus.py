"""The bus of one node: ZeroMQ over ``ipc://`` in the node's 0700 run directory.

Each daemon binds one publisher and one request socket (a ROUTER, so that a plain ``zmq.REQ`` client works).

==============  ====================================================================================
publication     frames ``[tag]``, ``msgpack [boot_id, seq, tag, fields]``
request         one frame ``msgpack [request_id, deadline_seconds, tag, fields]``
reply           one frame ``msgpack [request_id, tag, fields]``
==============  ====================================================================================

PUB/SUB loses messages (late joiner, restarted publisher, full queue), so a :class:`Mirror` subscribes, asks for a
snapshot, applies what is newer, and asks again on a gap or a new boot id; a heartbeat each second reveals a lost
last message. Requests are repeated until the deadline; the server answers a repeated id from memory.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import zmq
import zmq.asyncio

from shared import codec
from shared.errors import DaemonUnreachable, MeshError, RequestRefused, SchemaError, StillStarting, UnknownTag
from shared.ids import BootId
from shared.io import log
from shared.io.drive import Tasks
from shared.io.fresh_ids import new_boot_id, new_request_id
from shared.messages.daemon import (
    DaemonInfo,
    GetDaemonInfo,
    GetSnapshot,
    GetStory,
    Heartbeat,
    Refused,
    Snapshot,
    Story,
    StoryEntry,
)
from shared.paths import NodePaths
from shared.version import VERSION

HEARTBEAT_SECONDS = 1.0
FIRST_HEARTBEAT_SECONDS = 0.05
"""Doubles up to the above: after a restart, mirrors reconnect within 0.2 s and should not wait a second to notice."""
RESEND_SECONDS = 1.0
"""A request to a daemon that was just restarted is lost with its socket; one more send finds the new one."""
REPLY_MEMORY = 2048
"""Replies kept for repeated requests; a caller repeats within seconds."""
REPLY_MEMORY_BYTES = 16 * 1024 * 1024
MAX_DEADLINE_SECONDS = 24 * 3600.0
REFUSED_SECONDS = 1.0
"""Between two attempts when a daemon refuses its snapshot."""
STARTING_SECONDS = 0.05
"""The same when it is only just starting."""
QUEUE_MESSAGES = 10_000
"""High-water mark of each socket; PUB drops beyond it and mirrors resynchronise."""

Handler = Callable[[codec.Message, float], Awaitable[codec.Message]]
"""``(request, deadline_seconds) -> reply``. May raise MeshError, which becomes ``Refused``."""


class Facts(Protocol):
    """What the bus server answers by itself about its daemon."""

    def state_line(self) -> str: ...

    def snapshot(self) -> Iterable[codec.Message]:
        """The whole published state. Raises: StillStarting: mirrors keep what they have and ask again."""
        ...

    def story(self, limit: int) -> tuple[StoryEntry, ...]: ...


class BusServer:
    """A daemon's publisher and request socket. ``handler`` runs as a task of its own per request."""

    def __init__(self, name: str, paths: NodePaths, facts: Facts, handler: Handler, tasks: Tasks) -> None:
        self.name = name
        self.boot_id: BootId = new_boot_id()
        self.counters: dict[str, int] = {}
        self._facts = facts
        self._handler = handler
        self._tasks = tasks
        self._seq = 0
        self._started = time.monotonic()
        self._replies: OrderedDict[tuple[bytes, str], bytes | None] = OrderedDict()
        self._reply_bytes = 0
        self._refusal = log.LogOnce()
        self._publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.bind(paths.publisher(name))
        self._router = _async_context().socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 200)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self._router.bind(paths.requests(name))

    def start(self) -> None:
        self._tasks.start(self._serve(), f"{self.name} requests")
        self._tasks.start(self._heartbeat(), f"{self.name} heartbeat")

    def publish(self, message: codec.Message) -> None:
        """Send to every subscriber now. Never blocks: what a slow subscriber can't take, it resynchronises.

        A message that cannot be sent at all is logged and counted, and goes into no snapshot either.
        """
        tag, fields = codec.to_fields(message)
        try:
            payload = codec.pack([self.boot_id, self._seq + 1, tag, fields])
        except SchemaError as error:
            self._unsendable(tag, error)
            return
        self._seq += 1
        try:
            self._publisher.send_multipart([tag.encode(), payload], zmq.NOBLOCK)
        except zmq.Again:
            self.count("publications_dropped")

    def _unsendable(self, tag: str, error: SchemaError) -> None:
        self.count("unsendable")
        self._refusal(f"{tag} {error.detail}", "not_published", message=tag, reason=error.detail)

    def count(self, what: str, by: int = 1) -> None:
        self.counters[what] = self.counters.get(what, 0) + by

    async def _heartbeat(self) -> None:
        pause = FIRST_HEARTBEAT_SECONDS
        while True:
            before = self._seq
            await asyncio.sleep(pause)
            pause = min(2 * pause, HEARTBEAT_SECONDS)
            if self._seq == before:
                frames = [b"Heartbeat", codec.pack([self.boot_id, self._seq, *codec.to_fields(Heartbeat())])]
                self._publisher.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            # A REQ client sends [identity, empty, payload]; anything else is not for us.
            if len(frames) != 3 or frames[1]:
                self.count("frames_refused")
                continue
            identity, _, payload = frames
            try:
                value = codec.unpack(payload)
                if not isinstance(value, list) or len(value) != 4:
                    raise SchemaError("a request is [request_id, deadline_seconds, tag, fields]")
                request_id, deadline, tag, fields = value
                if not isinstance(request_id, str) or len(request_id) > 64:
                    raise SchemaError("request_id is a string of at most 64 characters")
                if not isinstance(deadline, int | float) or not 0 < deadline <= MAX_DEADLINE_SECONDS:
                    raise SchemaError("deadline_seconds is a number above 0")
            except SchemaError as error:
                await self._refuse(identity, "", error)
                continue
            key = (identity, request_id)
            if key in self._replies:
                reply = self._replies[key]
                if reply is not None:
                    await self._send(identity, reply)
                continue
            try:
                request = codec.from_fields(tag, fields)
            except SchemaError as error:
                await self._refuse(identity, request_id, error)
                continue
            self._remember(key, None)
            self._tasks.start(self._answer(key, request, float(deadline)), f"{self.name} {tag}")

    async def _refuse(self, identity: bytes, request_id: str, error: SchemaError) -> None:
        self.count("unknown_tags" if isinstance(error, UnknownTag) else "schema_errors")
        self._refusal(error.detail, "request_refused", reason=error.detail)
        reply = Refused(code=error.code, detail=error.detail)
        await self._send(identity, codec.pack([request_id, *codec.to_fields(reply)]))

    async def _answer(self, key: tuple[bytes, str], request: codec.Message, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline):
                reply = self._own(request)
                if reply is None:
                    reply = await self._handler(request, deadline)
        except RequestRefused as error:
            reply = Refused(code=error.code, detail=error.detail, retry_after_seconds=error.retry_after_seconds)
        except MeshError as error:
            reply = Refused(code=error.code, detail=error.detail)
        except TimeoutError:
            reply = Refused(code="deadline", detail=f"{self.name} did not finish within {deadline:.0f} s")
        try:
            data = codec.pack([key[1], *codec.to_fields(reply)])
        except SchemaError as error:
            data = codec.pack([key[1], *codec.to_fields(Refused(code=error.code, detail=error.detail))])
        self._remember(key, data)
        await self._send(key[0], data)

    def _own(self, request: codec.Message) -> codec.Message | None:
        match request:
            case GetSnapshot():
                return Snapshot(boot_id=self.boot_id, seq=self._seq, items=tuple(self._snapshot_items()))
            case GetDaemonInfo():
                return DaemonInfo(
                    name=self.name,
                    pid=os.getpid(),
                    version=VERSION,
                    boot_id=self.boot_id,
                    uptime_seconds=round(time.monotonic() - self._started, 3),
                    state=self._facts.state_line(),
                    counters=dict(self.counters),
                )
            case GetStory(limit=limit):
                return Story(entries=self._facts.story(max(1, min(limit, 500))))
        return None

    def _snapshot_items(self) -> Iterable[bytes]:
        for message in self._facts.snapshot():
            try:
                yield codec.encode(message)
            except SchemaError as error:
                self._unsendable(type(message).__name__, error)

    def _remember(self, key: tuple[bytes, str], reply: bytes | None) -> None:
        self._reply_bytes += len(reply or b"") - len(self._replies.get(key) or b"")
        self._replies[key] = reply
        self._replies.move_to_end(key)
        while len(self._replies) > REPLY_MEMORY or self._reply_bytes > REPLY_MEMORY_BYTES:
            oldest = next(iter(self._replies))
            if oldest == key:
                break
            if self._replies[oldest] is None and len(self._replies) < 8 * REPLY_MEMORY:
                self._replies.move_to_end(oldest)
                break
            self._reply_bytes -= len(self._replies.pop(oldest) or b"")

    async def _send(self, identity: bytes, payload: bytes) -> None:
        try:
            await self._router.send_multipart([identity, b"", payload], flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            # The client is gone or reads nothing; whoever asks again gets the remembered reply.
            self.count("replies_undeliverable")

    def close(self) -> None:
        """Close both sockets; the ipc files stay and are taken over by the next start."""
        self._publisher.close()
        self._router.close()


def _async_context() -> zmq.asyncio.Context:
    """asyncio sockets over the process's one context, hence one I/O thread."""
    return zmq.asyncio.Context(zmq.Context.instance())


class BusClient:
    """Asks one daemon. Requests may run concurrently; every one has a deadline."""

    def __init__(self, daemon: str, paths: NodePaths) -> None:
        self.daemon = daemon
        self._pending: dict[str, asyncio.Future[codec.Message]] = {}
        self._socket = _async_context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self._socket.connect(paths.requests(daemon))
        self._reader: asyncio.Task[None] | None = None

    async def request(
        self, message: codec.Message, *, deadline_seconds: float = 5.0, resend_seconds: float = RESEND_SECONDS
    ) -> codec.Message:
        """Send and wait for the reply.

        Raises: RequestRefused when the daemon refuses, DaemonUnreachable at the deadline.
        """
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read(), name=f"replies of {self.daemon}")
        request_id = new_request_id()
        future: asyncio.Future[codec.Message] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        deadline = time.monotonic() + deadline_seconds
        try:
            while True:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DaemonUnreachable(
                        f"{self.daemon} did not answer within {deadline_seconds:g} s; "
                        f"see 'meshctl ps' and 'meshctl logs {self.daemon}'"
                    )
                payload = codec.pack([request_id, remaining, *codec.to_fields(message)])
                wait = min(resend_seconds, remaining)
                try:
                    async with asyncio.timeout(wait):
                        # IMMEDIATE: blocks while nobody is connected instead of queueing to a dead socket.
                        await self._socket.send_multipart([b"", payload])
                        reply = await asyncio.shield(future)
                except TimeoutError:
                    continue
                if isinstance(reply, Refused):
                    raise RequestRefused(reply.code, reply.detail, reply.retry_after_seconds)
                return reply
        finally:
            del self._pending[request_id]
            future.cancel()

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                value = codec.unpack(frames[-1])
                request_id, tag, fields = value
                future = self._pending.get(request_id)
                if future is not None and not future.done():
                    future.set_result(codec.from_fields(tag, fields))
            except (SchemaError, ValueError, TypeError):
                log.warning("reply_refused", daemon=self.daemon)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._socket.close()


class Mirror:
    """A live copy of another daemon's published state.

    ``on_snapshot(messages)`` replaces the copy, ``on_message(message)`` changes it. Both run in the event loop.
    """

    def __init__(
        self,
        daemon: str,
        paths: NodePaths,
        on_snapshot: Callable[[list[codec.Message]], None],
        on_message: Callable[[codec.Message], None],
        on_new_boot: Callable[[BootId], None] | None = None,
    ) -> None:
        self.daemon = daemon
        self.boot_id: BootId | None = None
        self.resyncs = 0
        self.heard_at: float | None = None
        self._seq = 0
        self._on_snapshot = on_snapshot
        self._on_message = on_message
        self._on_new_boot = on_new_boot
        self._client = BusClient(daemon, paths)
        self._stale = asyncio.Event()
        self._stale.set()
        self._socket = _async_context().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(paths.publisher(daemon))

    def start(self, tasks: Tasks) -> None:
        tasks.start(self._receive(), f"mirror of {self.daemon}")
        tasks.start(self._resynchronise(), f"snapshots of {self.daemon}")

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                value = codec.unpack(frames[-1])
                boot_id, seq, tag, fields = value
                if not isinstance(seq, int) or not isinstance(boot_id, str):
                    raise SchemaError("a publication is [boot_id, seq, tag, fields]")
            except (SchemaError, ValueError, TypeError):
                self._stale.set()
                continue
            self.heard_at = time.monotonic()
            expected = self._seq if tag == "Heartbeat" else self._seq + 1
            if boot_id != self.boot_id or seq > expected:
                self._stale.set()
                continue
            if tag == "Heartbeat" or seq < expected:
                continue
            self._seq = seq
            try:
                message = codec.from_fields(tag, fields)
            except SchemaError:
                continue
            self._on_message(message)

    async def _resynchronise(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                snapshot = await self._client.request(GetSnapshot(), deadline_seconds=2.0, resend_seconds=0.5)
            except DaemonUnreachable:
                self._stale.set()
                continue
            except RequestRefused as error:
                if error.code == StillStarting.code:
                    await asyncio.sleep(STARTING_SECONDS)
                else:
                    log.warning("snapshot_refused", daemon=self.daemon, code=error.code, reason=error.detail)
                    await asyncio.sleep(REFUSED_SECONDS)
                self._stale.set()
                continue
            if not isinstance(snapshot, Snapshot):
                continue
            if snapshot.boot_id == self.boot_id and snapshot.seq < self._seq:
                # Overtaken by publications on the other socket: the copy is complete and newer.
                continue
            messages = []
            for item in snapshot.items:
                try:
                    messages.append(codec.decode(item))
                except SchemaError:
                    continue
            new_boot = snapshot.boot_id != self.boot_id
            self.boot_id, self._seq = snapshot.boot_id, snapshot.seq
            self.heard_at = time.monotonic()
            self.resyncs += 1
            self._on_snapshot(messages)
            if new_boot and self._on_new_boot is not None:
                self._on_new_boot(snapshot.boot_id)

    def close(self) -> None:
        self._client.close()
        self._socket.close()
