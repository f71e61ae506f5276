"""The serving end of TUNNEL_HTTP: a lease, one request to the engine, its answer back.

=========  ========================================================================================================
opening    the header names model, request and deadline
lease      taken here, from this node's launcherd, which loads the model if need be; one frame says granted or why not
request    its head is judged and written anew; exactly its Content-Length goes to the engine
answer     relayed as it comes, read along only to know where it ends: a cut answer cuts the stream
=========  ========================================================================================================

The asking side keeps its direction open until it has the whole answer: if it ends before, nobody waits any more, and
the engine's connection is closed, which is how llama.cpp learns it.

Source: docs/spec/tunnel_http.md; DESIGN §4, §7.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools

from services.tunneld.framing import encode_frame
from services.tunneld.http_request import RequestHead, RequestReader
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.certificates import VerifiedPeer
from shared.errors import DaemonUnreachable, RequestRefused, SchemaError, StreamLost
from shared.ids import ModelName, RequestId
from shared.io.lease_client import Lease, LeaseClient
from shared.messages.daemon import Refused
from shared.messages.tunnel import StreamOpened

HEAD_SECONDS = 30.0
"""For the request's head, once the lease is there: it comes at once, or its sender has a problem."""
CONNECT_SECONDS = 2.0
SILENT_SECONDS = 2.0
"""Silence where bytes are due after which launcherd is asked to probe the engine."""
READ_BYTES = 256 * 1024
LONGEST_DEADLINE_SECONDS = 24 * 3600.0
QUEUE_PARTS = 2
"""Of a request's body, waiting for the engine, ``READ_BYTES`` each: less than a MiB with what is on its way."""
BODY_SILENT_SECONDS = 30.0
"""A request that stops coming for so long has stopped for good; it holds a place at the engine."""
END_SECONDS = 5.0
"""For the asking side's end after a refusal."""
ANSWER_END_SECONDS = 600.0
"""For its end after a whole answer: the rest of one may still be on its way to a client that reads slowly."""
Result = TypeVar("Result")


class _PeerGone(Exception):
    """Nobody waits for the answer any more."""


class EngineRelay:
    """Serves peers' requests under leases of ``leases``."""

    def __init__(self, leases: LeaseClient, count: Callable[[str], None]) -> None:
        self._leases = leases
        self._count = count

    async def serve(self, stream: TunnelStream, header: dict[str, Any], rest: bytes, peer: VerifiedPeer) -> None:
        """One stream, to its end. Raises: SchemaError for a header that says nothing usable."""
        model, request_id, deadline = _read_header(header)
        exchange = _Exchange(stream, rest)
        began = asyncio.get_running_loop().time()
        try:
            lease = await exchange.unless_gone(self._acquire(model, request_id, deadline))
        except RequestRefused as error:
            self._count("tunnel_requests_refused")
            refused = Refused(code=error.code, detail=error.detail, retry_after_seconds=error.retry_after_seconds)
            await self._end(exchange, refused)
            return
        except DaemonUnreachable as error:
            await self._end(exchange, Refused(code=error.code, detail=error.detail, retry_after_seconds=1.0))
            return
        except (_PeerGone, StreamLost):
            exchange.close()
            return
        try:
            self._count("tunnel_requests")
            await self._request(exchange, lease, asyncio.get_running_loop().time() - began)
        except RequestRefused as error:
            self._count("tunnel_requests_refused")
            stream.abort(error.detail)
        except (_PeerGone, StreamLost):
            stream.abort("the asking node is gone")
        except TimeoutError:
            stream.abort(f"no request came within {HEAD_SECONDS:g} s")
        finally:
            exchange.close()
            self._leases.release(lease)

    async def _acquire(self, model: ModelName, request_id: RequestId, deadline: float) -> Lease:
        lease = self._leases.try_acquire(model)
        if lease is not None:
            return lease
        try:
            async with asyncio.timeout(deadline):
                return await self._leases.acquire(model, request_id)
        except TimeoutError:
            raise RequestRefused("deadline", f"{model} was not ready here within {deadline:.0f} s", 5.0) from None

    @staticmethod
    async def _end(exchange: _Exchange, refused: Refused) -> None:
        try:
            await exchange.stream.write(encode_frame(codec.encode(refused)))
            await exchange.stream.finish()
            await exchange.until_end(END_SECONDS)
        except StreamLost:
            return
        except RequestRefused as error:
            exchange.stream.abort(error.detail)
        finally:
            exchange.close()

    # -- the request --------------------------------------------------------------------------------------------------

    async def _request(self, exchange: _Exchange, lease: Lease, queue_seconds: float) -> None:
        exchange.opened = True
        await exchange.stream.write(encode_frame(codec.encode(StreamOpened(queue_seconds=queue_seconds))))
        async with asyncio.timeout(HEAD_SECONDS):
            head = await exchange.head()
        address = urlsplit(lease.base_url)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=READ_BYTES)
        except (OSError, TimeoutError) as error:
            self._engine_failed(lease, f"refused the connection: {error or 'no answer'}", broken=True)
            exchange.stream.abort("the engine refused the connection")
            return
        try:
            await exchange.unless_gone(self._relay(exchange, head, lease, reader, writer))
        finally:
            writer.transport.abort()

    async def _relay(
        self,
        exchange: _Exchange,
        head: RequestHead,
        lease: Lease,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        stream = exchange.stream
        try:
            writer.write(head.for_engine(urlsplit(lease.base_url).netloc.encode("ascii"), lease.api_key))
            async for part in exchange.body(head.content_length):
                writer.write(part)
                await self._from_engine(writer.drain(), lease)
            answer = _AnswerEnd()
            while not answer.complete:
                data = await self._from_engine(reader.read(READ_BYTES), lease)
                if not data:
                    break
                answer.feed(data)
                if answer.endless:
                    # Passed on, its end could not be told from a loss: the asking side's socket knows no reset.
                    self._count("answers_without_length")
                    stream.abort("the engine's answer does not say where it ends")
                    return
                await stream.write(data)
        except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._engine_failed(lease, f"broke off: {error}", broken=True)
            stream.abort("the engine broke off")
            return
        if not answer.complete:
            self._engine_failed(lease, "closed the connection in the middle of its answer", broken=True)
            stream.abort("the engine closed the connection in the middle of its answer")
            return
        # The engine is free, however long the asking side takes to end.
        self._leases.release(lease)
        # Set before the end goes out, which the asking side's own end answers.
        exchange.answered = True
        await stream.finish()
        await exchange.until_end(ANSWER_END_SECONDS)

    async def _from_engine(self, work: Coroutine[Any, Any, Result], lease: Lease) -> Result:
        """What the engine does; while it does nothing, launcherd is asked to probe it. Raises: OSError."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=SILENT_SECONDS)
                if done:
                    return task.result()
                self._leases.suspect(lease, f"silent for {SILENT_SECONDS:g} s", broken=False)
        finally:
            task.cancel()

    def _engine_failed(self, lease: Lease, detail: str, *, broken: bool) -> None:
        self._count("engines_failed")
        self._leases.suspect(lease, detail, broken=broken)


class _Exchange:
    """What comes from the asking node, and whether it is still there.

    Its leaving shows only where its stream is read. So what is not due ends the request: in a full queue it would stop
    the reading, and with it hide the end.
    """

    def __init__(self, stream: TunnelStream, first: bytes) -> None:
        self.stream = stream
        self.opened = False
        self.answered = False
        self._whole = False
        self._parts: asyncio.Queue[bytes] = asyncio.Queue(maxsize=QUEUE_PARTS)
        if first:
            self._parts.put_nowait(first)
        self._surplus = b""
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        """Until the other side's direction ends, which it does only once it has its answer.

        Raises: StreamLost, RequestRefused for bytes that are not due.
        """
        while data := await self.stream.read():
            if self._whole:
                raise RequestRefused("bad_request", "more bytes came than the Content-Length says")
            if not self.opened and self._parts.full():
                raise RequestRefused("bad_request", "too many bytes came before there was a place for the request")
            await self._parts.put(data)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The work's result; it is cancelled when nobody waits for it any more.

        Raises: _PeerGone, RequestRefused for bytes that were not due, and as the work.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, self._reader], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self.answered:
                raise self._why_gone()
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                task.exception()

    async def head(self) -> RequestHead:
        """The request's head. Raises: RequestRefused, _PeerGone."""
        reader = RequestReader()
        while True:
            head = reader.feed(await self._next())
            if head is not None:
                self._surplus = reader.rest
                return head

    async def body(self, content_length: int) -> AsyncIterator[bytes]:
        """Exactly so many bytes, in parts. Raises: RequestRefused when more come, _PeerGone."""
        left = content_length
        data, self._surplus = self._surplus, b""
        while True:
            if len(data) > left:
                raise RequestRefused("bad_request", "more bytes came than the Content-Length says")
            if data:
                left -= len(data)
                yield data
            if left == 0:
                self._whole = True
                if not self._parts.empty():
                    raise RequestRefused("bad_request", "more bytes came than the Content-Length says")
                return
            data = await self._next()

    def _why_gone(self) -> Exception:
        error = None if self._reader.cancelled() else self._reader.exception()
        return error if isinstance(error, RequestRefused) else _PeerGone()

    async def _next(self) -> bytes:
        if self._parts.empty() and self._reader.done():
            raise self._why_gone()
        try:
            async with asyncio.timeout(BODY_SILENT_SECONDS):
                return await self.unless_gone(self._parts.get())
        except TimeoutError:
            raise RequestRefused("too_slow", f"nothing of the request came for {BODY_SILENT_SECONDS:g} s") from None

    async def until_end(self, seconds: float) -> None:
        """The other side's end, so that what carries the stream can carry the next one.

        Raises: StreamLost, RequestRefused.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._reader)

    def close(self) -> None:
        """Nothing is left to do. A stream that did not end cleanly both ways is cut."""
        self._reader.cancel()
        self._reader.add_done_callback(lambda reader: reader.cancelled() or reader.exception())
        self.stream.abort("over")


class _AnswerEnd:
    """Reads an answer along to know where it ends."""

    def __init__(self) -> None:
        self.complete = False
        self.endless = False
        """Neither a Content-Length nor chunks: only the end of its connection would end it."""
        self._delimited = False
        self._final = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises: HttpParserError, HttpParserUpgrade."""
        self._parser.feed_data(data)
        self.endless = self._final and not self._delimited and not self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._delimited = True

    def on_headers_complete(self) -> None:
        self._final = self._parser.get_status_code() >= 200

    def on_message_complete(self) -> None:
        if self._final:
            self.complete = True


def _read_header(header: dict[str, Any]) -> tuple[ModelName, RequestId, float]:
    match header:
        case {"model": str(model), "request_id": str(request_id), "deadline_seconds": int() | float() as deadline} if (
            0 < len(model) <= 256 and 0 < len(request_id) <= 128 and 0 < deadline <= LONGEST_DEADLINE_SECONDS
        ):
            return ModelName(model), RequestId(request_id), float(deadline)
    raise SchemaError("the header of a TUNNEL_HTTP stream names model, request_id and deadline_seconds")
