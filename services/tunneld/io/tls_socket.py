"""One TCP connection under TLS: first a greeting, then either control messages or streams, one at a time.

Streams on it begin at one end only, the *opener's*; when both directions of a stream have ended the next may begin.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

from services.tunneld.chunks import END_BYTES, ChunkReader, Cut, End, encode_chunk, encode_cut
from services.tunneld.io.stream import HIGH_WATER_BYTES, Inbox, bounded_reason
from shared import codec
from shared.errors import SchemaError, StreamLost

MESSAGE_LIMIT_BYTES = 4096
"""Greetings and control messages."""
WRITE_BYTES = 1024 * 1024
"""Larger writes are cut up, so that waiting for the peer begins in time."""
LINGER_SECONDS = 1.0
"""How long a cut stream's last words may take before the connection is dropped."""
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]


class TlsStream:
    """A :class:`~services.tunneld.io.stream.TunnelStream` over one :class:`TlsSocket`."""

    def __init__(self, carrier: TlsSocket) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self._carrier = carrier
        self.sent_end = False
        self._inbox = Inbox()

    @property
    def received_end(self) -> bool:
        return self._inbox.ended

    async def read(self) -> bytes:
        data = await self._inbox.read()
        if data:
            self._carrier.may_read()
        return data

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), WRITE_BYTES):
            self._check_writable()
            part = data if len(data) <= WRITE_BYTES else data[at : at + WRITE_BYTES]
            self._carrier.send(encode_chunk(part))
            self.bytes_sent += len(part)
            if self._carrier.paused is not None:
                await self._drained()

    async def finish(self) -> None:
        if self.sent_end:
            return
        self._check_writable()
        self._carrier.send(END_BYTES)
        self.sent_end = True
        self._carrier.direction_ended(self)

    def abort(self, reason: str = "") -> None:
        if self._inbox.lost is not None:
            return
        if self.sent_end and self.received_end:
            # Over already; what nobody read must not hold up the next stream.
            self._inbox.drop()
            self._carrier.may_read()
            return
        self._carrier.cut(reason)
        self.lose(f"cut here: {reason}" if reason else "cut here")

    async def _drained(self) -> None:
        while self._carrier.paused is not None and self._inbox.lost is None:
            await asyncio.shield(self._carrier.paused)
        if self._inbox.lost is not None:
            raise StreamLost(self._inbox.lost)

    def _check_writable(self) -> None:
        if self._inbox.lost is not None:
            raise StreamLost(self._inbox.lost)
        if self.sent_end:
            raise StreamLost("this direction was ended before")

    # -- from the socket ----------------------------------------------------------------------------------------------

    def take(self, piece: bytes | End) -> bool:
        """What came; False when enough waits to be read."""
        if isinstance(piece, End):
            self._inbox.end()
        else:
            self.bytes_received += len(piece)
            self._inbox.put(piece)
        return self._inbox.waiting_bytes < HIGH_WATER_BYTES

    def lose(self, reason: str) -> None:
        """The stream ended, not cleanly."""
        if self._inbox.lost is None:
            self._inbox.lose(reason)
            self._carrier.stream_over(self)


class TlsSocket(asyncio.Protocol):
    """Created by ``create_connection`` and ``connect_accepted_socket`` with the handshake done.

    After :meth:`greet` it carries control messages (``on_message``) or streams (``on_stream``, ``on_idle``);
    ``on_lost`` is called once, with the reason.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.paused: asyncio.Future[None] | None = None
        """Set while the peer does not read."""
        self.stream: TlsStream | None = None
        self.is_opener = False
        self.on_message: Callable[[Message], None] | None = None
        self.on_stream: Callable[[TlsSocket, TlsStream], None] | None = None
        self.on_idle: Callable[[TlsSocket], None] | None = None
        self.on_over: Callable[[TlsStream], None] | None = None
        self.on_lost: Callable[[TlsSocket, str], None] | None = None
        self.lost: str | None = None
        self.heard_at = 0.0
        self.heard_count = 0
        self._loop = asyncio.get_running_loop()
        self._greeting: asyncio.Future[Message] = self._loop.create_future()
        self._buffer = bytearray()
        self._chunks: ChunkReader | None = None
        self._reading = True

    # -- greeting and control -----------------------------------------------------------------------------------------

    async def greeting(self, seconds: float) -> Message:
        """The peer's first message. Raises: StreamLost, TimeoutError."""
        async with asyncio.timeout(seconds):
            return await self._greeting

    def send_message(self, message: Message) -> None:
        payload = codec.pack(message)
        self.send(_LENGTH.pack(len(payload)) + payload)

    def carry_streams(self, *, is_opener: bool) -> None:
        """From here on the connection carries streams. Bytes that came with the greeting are theirs."""
        self.is_opener = is_opener
        self._chunks = ChunkReader()
        early, self._buffer = bytes(self._buffer), bytearray()
        if early:
            self._take_chunks(early)

    def carry_messages(self, on_message: Callable[[Message], None]) -> None:
        self.on_message = on_message
        self._take_messages()

    # -- streams ------------------------------------------------------------------------------------------------------

    def begin(self) -> TlsStream:
        """A new stream from this end; on a connection that has just been lost it is lost from its beginning."""
        assert self.is_opener
        assert self.stream is None
        stream = self.stream = TlsStream(self)
        if self.lost is not None:
            stream.lose(self.lost)
        return stream

    def send(self, data: bytes) -> None:
        if self.transport is not None and self.lost is None:
            self.transport.write(data)

    def direction_ended(self, stream: TlsStream) -> None:
        if stream is self.stream and stream.sent_end and stream.received_end:
            self.stream = None
            self.stream_over(stream)
            if self.on_idle is not None and self.lost is None:
                self.on_idle(self)

    def stream_over(self, stream: TlsStream) -> None:
        if self.on_over is not None:
            self.on_over(stream)

    def may_read(self) -> None:
        if not self._reading and self.transport is not None and self.lost is None:
            self._reading = True
            self.transport.resume_reading()

    def cut(self, reason: str) -> None:
        """The stream it carries ends at once, and the connection with it."""
        self.send(encode_cut(bounded_reason(reason)))
        self.close()

    def close(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        transport.close()
        self._loop.call_later(LINGER_SECONDS, transport.abort)

    # -- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no asyncio class.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            # asyncio does that by itself only for sockets whose protocol number is known.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        self.heard_count += 1
        if self._chunks is not None:
            self._take_chunks(data)
            return
        self._buffer += data
        self._take_messages()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        reason = _words(error)
        self.lost = reason
        if self.paused is not None and not self.paused.done():
            self.paused.set_result(None)
        self.paused = None
        if not self._greeting.done():
            self._greeting.set_exception(StreamLost(reason))
            # Nobody may be waiting for it any more.
            self._greeting.exception()
        if self.stream is not None:
            self.stream.lose(reason)
        if self.on_lost is not None:
            self.on_lost(self, reason)

    def pause_writing(self) -> None:
        self.paused = self._loop.create_future()

    def resume_writing(self) -> None:
        if self.paused is not None and not self.paused.done():
            self.paused.set_result(None)
        self.paused = None

    # -- taking apart -------------------------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        while self._chunks is None and len(self._buffer) >= _LENGTH.size:
            if self._greeting.done() and self.on_message is None:
                # What it will carry is not decided yet, so what these bytes are is not known.
                return
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MESSAGE_LIMIT_BYTES:
                self._violated(f"a message of {size} bytes is over the limit of {MESSAGE_LIMIT_BYTES}")
                return
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            try:
                message = codec.unpack(bytes(self._buffer[_LENGTH.size : end]))
            except SchemaError as error:
                self._violated(error.detail)
                return
            del self._buffer[:end]
            if not isinstance(message, dict):
                self._violated("a message is a map")
                return
            if not self._greeting.done():
                self._greeting.set_result(message)
            elif self.on_message is not None:
                self.on_message(message)

    def _take_chunks(self, data: bytes) -> None:
        assert self._chunks is not None
        try:
            pieces = self._chunks.feed(data)
        except SchemaError as error:
            self._violated(error.detail)
            return
        for piece in pieces:
            stream = self.stream
            if isinstance(piece, Cut):
                if stream is not None:
                    why = bounded_reason(piece.reason)
                    stream.lose(f"the peer cut it: {why}" if why else "the peer cut it")
                self.close()
                return
            if stream is None:
                if self.is_opener or self.on_stream is None:
                    self._violated("a stream began at the wrong end")
                    return
                stream = self.stream = TlsStream(self)
                self.on_stream(self, stream)
            elif stream.received_end:
                self._violated("bytes came after the end of a stream")
                return
            if not stream.take(piece) and self._reading and self.transport is not None:
                self._reading = False
                self.transport.pause_reading()
            if isinstance(piece, End):
                self.direction_ended(stream)

    def _violated(self, what: str) -> None:
        """The peer does not keep to the framing: nothing it sends can be understood any more."""
        if self.stream is not None:
            self.stream.lose(f"the peer broke the framing: {what}")
        if not self._greeting.done():
            self._greeting.set_exception(StreamLost(what))
            self._greeting.exception()
        if self.transport is not None:
            self.transport.abort()


def _words(error: Exception | None) -> str:
    if error is None:
        return "the connection was closed"
    if isinstance(error, ConnectionResetError):
        return "the connection was reset"
    if isinstance(error, OSError) and error.strerror:
        return f"the connection broke: {error.strerror}"
    return f"the connection broke: {error}"
