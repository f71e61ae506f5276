"""HTTP/1.1 client to engines on loopback: pooled keep-alive connections, one request at a time on each.

Raw protocols under httptools: a response costs one wake-up of its reader per segment that arrives. Backpressure
reaches the engine because reading stops while ``HIGH_WATER_BYTES`` wait to be taken. Cancelling a request closes its
connection, which is how llama.cpp learns that nobody waits any more.

There is no total timeout, and none until the first byte: prefill takes as long as it takes. The caller watches
:attr:`UpstreamResponse.heard_at` for stalls.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import cast

import httptools

CONNECT_SECONDS = 2.0
"""On loopback a connect takes microseconds; a full backlog is the only reason to wait."""
HIGH_WATER_BYTES = 256 * 1024
IDLE_CONNECTIONS = 64
"""Kept per engine: more than any engine's `parallel` in practice."""
HEAD_LIMIT_BYTES = 256 * 1024

Address = tuple[str, int]


class UpstreamFailed(Exception):
    """The engine could not be reached, or closed the connection. ``detail`` completes "the engine …"."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class NotReached(UpstreamFailed):
    """No byte of an answer came: the request may be tried again."""


class CutOff(UpstreamFailed):
    """The answer ended before it was complete."""


class UpstreamResponse:
    """One answer. ``status`` and ``headers`` are there from the start; the body is taken as it comes."""

    __slots__ = (
        "_buffer",
        "_buffered",
        "_connection",
        "_failure",
        "_waiter",
        "complete",
        "head_complete",
        "headers",
        "heard_at",
        "status",
    )

    def __init__(self, connection: Carrier) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_complete = False
        self.complete = False
        """Everything has arrived; some of it may still wait to be taken."""
        self.heard_at = 0.0
        self._connection: Carrier | None = connection
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._failure: UpstreamFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    def take(self) -> bytes:
        """What has arrived and not been taken; empty when nothing has."""
        buffer = self._buffer
        if not buffer:
            return b""
        data = buffer[0] if len(buffer) == 1 else b"".join(buffer)
        self._buffer = []
        if self._buffered > HIGH_WATER_BYTES and self._connection is not None:
            self._connection.resume()
        self._buffered = 0
        return data

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    async def more(self) -> None:
        """Wait until there is something to take or the answer is complete. Raises: CutOff."""
        while not self._buffer and not self.complete:
            if self._failure is not None:
                raise self._failure
            await self._wait()

    async def head(self) -> None:
        """Wait for status and headers. Raises: NotReached."""
        while not self.head_complete:
            if self._failure is not None:
                raise self._failure
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """The caller is done: an incomplete answer is cancelled by closing its connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # -- called by the connection

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, failure: UpstreamFailed) -> None:
        """What has arrived can still be taken; then ``more`` raises."""
        self._connection = None
        self._failure = failure
        self.wake()


class Carrier(asyncio.Protocol):
    """One connection to one engine, or through a tunnel to one of another node."""

    def __init__(
        self, free: Callable[[Carrier], None], lost: Callable[[Carrier], None], *, ends_answers: bool = True
    ) -> None:
        """``ends_answers``: the end of the connection ends an answer that says nothing of its length."""
        self._ends_answers = ends_answers
        self._free = free
        self._lost = lost
        self.transport: asyncio.Transport | None = None
        self.response: UpstreamResponse | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._delimited = False
        self._ended = False
        self._surplus = False
        self._keep_alive = False

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        connected = self.transport.get_extra_info("socket")
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        response, self.response = self.response, None
        if response is not None:
            if not response.head_complete:
                response.fail(NotReached("closed the connection before it answered"))
            elif exc is None and not self._delimited and self._ends_answers:
                # Neither Content-Length nor chunked: the end of the connection is the end of the body.
                response.complete = True
                response.wake()
            else:
                response.fail(CutOff("closed the connection in the middle of its answer"))
        self._lost(self)

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:
            # Bytes nobody asked for: this connection's framing can't be trusted.
            self.abort()
            return
        response.heard_at = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(response, f"sent what is not HTTP: {error}")
            return
        if self._ended:
            self._ended = False
            self.response = None
            response.complete = True
            response._connection = None
            if self._keep_alive:
                self._free(self)
            else:
                self.abort()
        elif not response.head_complete:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self._refuse(response, f"sent more than {HEAD_LIMIT_BYTES} bytes of headers")
            return
        elif response._buffered > HIGH_WATER_BYTES and self.transport is not None:
            self.transport.pause_reading()
        response.wake()

    def _refuse(self, response: UpstreamResponse, why: str) -> None:
        self.response = None
        response.fail(CutOff(why) if response.head_complete else NotReached(why))
        self.abort()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._ended:
            # A second answer to one request: the first stands, the connection is not used again.
            self._surplus = True
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self.response
        if response is not None and not self._surplus:
            response.headers.append((name, value))
            if len(name) in (14, 17) and name.lower() in (b"content-length", b"transfer-encoding"):
                self._delimited = True

    def on_headers_complete(self) -> None:
        response = self.response
        if response is not None and not self._surplus:
            response.status = self._parser.get_status_code()
            if response.status >= 200:
                response.head_complete = True
                self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        response = self.response
        if response is not None and body and not self._surplus:
            response._buffer.append(body)
            response._buffered += len(body)

    def on_message_complete(self) -> None:
        response = self.response
        if response is not None and not response.head_complete:
            # 1xx: the real answer follows.
            response.headers = []
            return
        self._ended = True

    # -- driving

    @property
    def alive(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send(self, head: bytes, body: bytes) -> UpstreamResponse:
        """Write a whole request. The transport holds a large body by reference, not as a copy."""
        transport = self.transport
        assert transport is not None
        self._head_bytes = 0
        self._delimited = False
        response = self.response = UpstreamResponse(self)
        response.heard_at = time.monotonic()
        if len(body) <= 65_536:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        return response

    def resume(self) -> None:
        if self.transport is not None:
            self.transport.resume_reading()

    def abort(self) -> None:
        self.response = None
        if self.transport is not None:
            self.transport.abort()


def _nothing(_connection: Carrier) -> None:
    """Nobody keeps a list of connections for one request."""


class UpstreamPool:
    """Connections to all engines of this node."""

    def __init__(self) -> None:
        self._idle: dict[Address, list[Carrier]] = {}
        self._addresses: dict[Carrier, Address] = {}

    async def request(self, address: Address, head: bytes, body: bytes) -> UpstreamResponse:
        """Send a request and wait for its answer's head (and as much of its body as came with it).

        An engine may close an idle connection just as it is used again; then the request goes out once more, on a
        fresh one. Raises: NotReached.
        """
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.alive:
                try:
                    return await self._exchange(connection, head, body)
                except NotReached:
                    break
        return await self._exchange(await self._connect(address), head, body)

    async def carry(self, raw: socket.socket) -> Carrier:
        """A connected unix socket as a connection for one request. Raises: NotReached.

        A tunnel that breaks ends it as cleanly as one that is done: only the answer itself can say that it is whole.
        """
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_unix_connection(
                lambda: Carrier(Carrier.abort, _nothing, ends_answers=False), sock=raw
            )
        except OSError as error:
            raise NotReached(f"cannot be reached: {error.strerror or error}") from None
        return connection

    async def request_over(self, connection: Carrier, head: bytes, body: bytes) -> UpstreamResponse:
        """One request on a connection of :meth:`carry`, which ends with it. Raises: NotReached."""
        if not connection.alive:
            raise NotReached("closed the connection before the request was sent")
        return await self._exchange(connection, head, body)

    async def _exchange(self, connection: Carrier, head: bytes, body: bytes) -> UpstreamResponse:
        response = connection.send(head, body)
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    async def _connect(self, address: Address) -> Carrier:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(lambda: Carrier(self._free, self._lost), *address)
        except TimeoutError:
            raise NotReached(f"did not accept a connection within {CONNECT_SECONDS:g} s") from None
        except OSError as error:
            raise NotReached(f"refused the connection: {error.strerror or error}") from None
        self._addresses[connection] = address
        return connection

    def _free(self, connection: Carrier) -> None:
        address = self._addresses.get(connection)
        if address is None or not connection.alive:
            return
        idle = self._idle.setdefault(address, [])
        if len(idle) < IDLE_CONNECTIONS:
            idle.append(connection)
        else:
            connection.abort()

    def _lost(self, connection: Carrier) -> None:
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        idle = self._idle.get(address)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[address]

    @property
    def connections(self) -> int:
        return len(self._addresses)

    def close(self) -> None:
        """Close every connection, busy ones too."""
        for connection in list(self._addresses):
            connection.abort()
