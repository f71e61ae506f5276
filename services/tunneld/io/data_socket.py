"""The asking end of TUNNEL_HTTP: this node's proxyd hands in a request for an engine of another node.

A unix stream socket in the node's private directory, one connection per request: an ``OpenHttp`` message, answered by
``StreamOpened`` or ``Refused``, each behind a length of four bytes; after ``StreamOpened`` both ways carry bytes.
Whoever closes before the answer is complete gives the request up, at both ends. A cut answer ends before its HTTP says
that it is complete, and proxyd looks.

Source: docs/spec/tunnel_http.md.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.tunneld.framing import FrameReader, StreamType, encode_frame, encode_opening
from services.tunneld.io.enrolment import read_frame
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.errors import MeshError, PeerUnreachable, SchemaError
from shared.ids import PeerId
from shared.io import log
from shared.io.drive import Tasks
from shared.messages.daemon import Refused
from shared.messages.tunnel import OpenHttp, StreamOpened

OPEN_SECONDS = 5.0
"""For proxyd's first message."""
MESSAGE_LIMIT_BYTES = 16 * 1024
READ_BYTES = 256 * 1024
ANSWER_SLACK_SECONDS = 5.0
"""The peer refuses at the deadline; this much later it counts as gone."""

GRACE_SECONDS = 0.2
LOOK_SECONDS = 0.25
SILENT_SECONDS = 2.0
"""A peer that has not answered two pings is not waited for while another host may serve the request."""

OpenStream = Callable[[PeerId], Awaitable[TunnelStream]]


class DataSocket:
    """Serves ``path`` from :meth:`start` on. ``open_stream`` raises PeerUnreachable with the link's reason."""

    def __init__(
        self,
        path: Path,
        open_stream: OpenStream,
        count: Callable[[str], None],
        tasks: Tasks,
        *,
        silent_seconds: Callable[[PeerId], float] = lambda _peer: 0.0,
    ) -> None:
        self._path = path
        self._open_stream = open_stream
        self._silent_seconds = silent_seconds
        self._count = count
        self._tasks = tasks
        self._server: asyncio.Server | None = None
        self._failed = log.LogOnce()

    async def start(self) -> None:
        """Bind, in place of what an earlier life left. The daemon's lock has made sure that nobody else serves it."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._server = await asyncio.start_unix_server(self._accept, sock=listener, limit=READ_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.start(self._serve(reader, writer), "request for a peer")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream: TunnelStream | None = None
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                request = await _read_request(reader)
            stream = await self._opened(request, reader, writer)
            if stream is not None:
                await _relay(reader, writer, stream)
        except (MeshError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            reason = error.detail if isinstance(error, MeshError) else str(error) or type(error).__name__
            self._count("tunnel_requests_failed")
            self._failed(reason, "tunnel_request_failed", reason=reason)
            writer.transport.abort()
        finally:
            if stream is not None:
                stream.abort("the asking client is gone")
            writer.close()

    async def _opened(
        self, request: OpenHttp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> TunnelStream | None:
        """The stream with its lease, or None after a refusal was passed on. Raises: OSError when proxyd left."""
        opening = asyncio.ensure_future(self._ask(request))
        # proxyd sends nothing before the answer: whatever the read yields, it has left.
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([opening, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before the answer goes out: what comes after it is the request, and not to be read here.
            await _cancelled(leaving)
        if not opening.done():
            await _cancelled(opening)
            raise ConnectionResetError("the client left while the request waited")
        stream, answer = opening.result()
        writer.write(encode_frame(codec.encode(answer)))
        await writer.drain()
        return stream

    async def _ask(self, request: OpenHttp) -> tuple[TunnelStream | None, StreamOpened | Refused]:
        stream: TunnelStream | None = None
        try:
            async with asyncio.timeout(request.deadline_seconds + ANSWER_SLACK_SECONDS):
                stream = await self._open_stream(request.peer_id)
                header = {
                    "model": request.model,
                    "request_id": request.request_id,
                    "deadline_seconds": request.deadline_seconds,
                }
                await stream.write(encode_opening(StreamType.TUNNEL_HTTP, header))
                answer = codec.decode(await self._answer_of(request.peer_id, stream))
            if isinstance(answer, StreamOpened):
                opened, stream = stream, None
                return opened, answer
            if isinstance(answer, Refused):
                await stream.finish()
                while await stream.read():
                    pass
                return None, answer
            raise SchemaError(f"the peer answered {type(answer).__name__}")
        except MeshError as error:
            return None, Refused(code=PeerUnreachable.code, detail=error.detail)
        except TimeoutError:
            return None, Refused(code=PeerUnreachable.code, detail="the node did not answer in time")
        finally:
            if stream is not None:
                stream.abort("not used")


    async def _answer_of(self, peer_id: PeerId, stream: TunnelStream) -> bytes:
        """The peer's frame; loading a model may take long, silence of the whole peer may not.

        Raises: PeerUnreachable, StreamLost, SchemaError.
        """
        reading = asyncio.ensure_future(read_frame(stream, FrameReader(MESSAGE_LIMIT_BYTES)))
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=LOOK_SECONDS)
                if done:
                    return reading.result()
                silent = self._silent_seconds(peer_id)
                if silent > SILENT_SECONDS:
                    raise PeerUnreachable(f"the node has been silent for {silent:.1f} s")
        finally:
            await _cancelled(reading)


async def _read_request(reader: asyncio.StreamReader) -> OpenHttp:
    """Raises: SchemaError, IncompleteReadError."""
    size = int.from_bytes(await reader.readexactly(4))
    if size > MESSAGE_LIMIT_BYTES:
        raise SchemaError(f"a message of {size} bytes is over the limit of {MESSAGE_LIMIT_BYTES}")
    request = codec.decode(await reader.readexactly(size))
    if not isinstance(request, OpenHttp) or not request.deadline_seconds > 0:
        raise SchemaError(f"{type(request).__name__} came where OpenHttp was due")
    return request


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: TunnelStream) -> None:
    """Both ways until the answer is complete. Raises: StreamLost, OSError."""
    sending = asyncio.ensure_future(_send(reader, stream))
    receiving = asyncio.ensure_future(_receive(writer, stream))
    try:
        await asyncio.wait([sending, receiving], return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():
            # proxyd knows from the answer itself that it is whole, and may be faster than the stream's end.
            await asyncio.wait([receiving], timeout=GRACE_SECONDS)
        if not receiving.done():
            raise ConnectionResetError("the client left before its answer was complete")
        await receiving
        await stream.finish()
    finally:
        await _cancelled(sending)
        await _cancelled(receiving)


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel it and wait until it has stopped, however it stopped."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


async def _send(reader: asyncio.StreamReader, stream: TunnelStream) -> None:
    while data := await reader.read(READ_BYTES):
        await stream.write(data)


async def _receive(writer: asyncio.StreamWriter, stream: TunnelStream) -> None:
    while data := await stream.read():
        writer.write(data)
        await writer.drain()
