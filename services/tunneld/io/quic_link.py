"""One QUIC connection driven by hand: datagrams in and out, one timer, streams with backpressure.

aioquic's asyncio adapters neither hold a writer back nor tell a clean end from a lost connection, so this drives its
sans-I/O core. What is used of that core beyond its public face (``_initialize``, ``_write_stream_limits``, the TLS
context's peer certificates, send buffers) is pinned by ``tests/tunneld/io/test_quic_link.py``.

Source: docs/spec/transport.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from aioquic.quic import events
from aioquic.quic.connection import QuicConnection
from cryptography import x509

from services.tunneld.io.stream import HIGH_WATER_BYTES, Inbox, bounded_reason
from shared.errors import StreamLost

WINDOW_BYTES = HIGH_WATER_BYTES
"""A peer may send so much on a stream beyond what was read here."""
WRITE_BYTES = 64 * 1024
DONE_KEPT = 256
CUT_CODE = 0x1
"""Application code of a stream that was cut."""
Address = Any
"""What the socket's ``sendto`` takes: (host, port) or with flow and scope for IPv6."""


class LinkOwner(Protocol):
    """Whoever made the link."""

    def handshake_done(self, alpn: str, chain: list[x509.Certificate]) -> None: ...

    def stream_came(self, stream: QuicStream) -> None: ...

    def stream_over(self, stream: QuicStream) -> None: ...

    def measured(self, rtt_seconds: float) -> None: ...

    def link_ended(self, reason: str, code: int) -> None: ...


class QuicStream:
    """A :class:`~services.tunneld.io.stream.TunnelStream` over one :class:`QuicLink`."""

    def __init__(self, link: QuicLink, stream_id: int) -> None:
        self.stream_id = stream_id
        self.bytes_sent = 0
        self.bytes_received = 0
        self.consumed = 0
        self._link = link
        self._inbox = Inbox()
        self._writer: asyncio.Future[None] | None = None
        self._sent_end = False
        self._over = False

    async def read(self) -> bytes:
        data = await self._inbox.read()
        if data:
            self.consumed += len(data)
            self._link.transmit_soon()
        return data

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), WRITE_BYTES):
            self._check_writable()
            part = data[at : at + WRITE_BYTES]
            self._link.quic.send_stream_data(self.stream_id, part)
            self.bytes_sent += len(part)
            self._link.transmit_soon()
            while self._link.pending_bytes(self.stream_id) > HIGH_WATER_BYTES:
                self._writer = asyncio.get_running_loop().create_future()
                try:
                    await self._writer
                finally:
                    self._writer = None
                self._check_writable()

    async def finish(self) -> None:
        if self._sent_end:
            return
        self._check_writable()
        self._link.quic.send_stream_data(self.stream_id, b"", end_stream=True)
        self._sent_end = True
        self._link.transmit_soon()
        self._check_over()

    def abort(self, reason: str = "") -> None:
        if self._inbox.lost is not None:
            return
        if self._sent_end and self._inbox.ended:
            self.consumed += self._inbox.waiting_bytes
            self._inbox.drop()
            return
        self._link.cut(self.stream_id, sending=not self._sent_end, receiving=not self._inbox.ended)
        self.lose(f"cut here: {reason}" if reason else "cut here")

    def _check_writable(self) -> None:
        if self._inbox.lost is not None:
            raise StreamLost(self._inbox.lost)
        if self._sent_end:
            raise StreamLost("this direction was ended before")

    # -- from the link ------------------------------------------------------------------------------------------------

    def take(self, data: bytes, end: bool) -> None:
        if self._inbox.lost is not None:
            self.consumed += len(data)
            return
        if data:
            self.bytes_received += len(data)
            self._inbox.put(data)
        if end:
            self._inbox.end()
            self._check_over()

    def lose(self, reason: str) -> None:
        if self._inbox.lost is None:
            self._inbox.lose(reason)
            self._check_over()
        _wake(self._writer)

    def may_write(self) -> None:
        if self._writer is not None and self._link.pending_bytes(self.stream_id) <= HIGH_WATER_BYTES // 2:
            _wake(self._writer)

    def _check_over(self) -> None:
        if not self._over and (self._inbox.lost is not None or (self._sent_end and self._inbox.ended)):
            self._over = True
            self._link.stream_over(self)


class QuicLink:
    """Owns a :class:`QuicConnection`. ``send`` puts a datagram on the wire."""

    def __init__(self, quic: QuicConnection, owner: LinkOwner, send: Callable[[bytes, Address], None]) -> None:
        self.quic = quic
        self.accepted = False
        """Set by the owner once the peer's certificate was judged: until then nothing it sends is looked at."""
        self.on_id_issued: Callable[[bytes], None] | None = None
        self.on_id_retired: Callable[[bytes], None] | None = None
        self._owner = owner
        self._send = send
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self.heard_count = 0
        self._streams: dict[int, QuicStream] = {}
        self._done: set[int] = set()
        """Streams that are over here but may not be for the core: late bytes of theirs begin no new one."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._soon = False
        self._ended = False
        self._pings: dict[int, float] = {}
        self._ping_count = 0
        original = quic._write_stream_limits

        def write_stream_limits(builder: Any, space: Any, stream: Any) -> None:
            self._bound(stream)
            highest, stream.receiver.highest_offset = stream.receiver.highest_offset, 0
            try:
                original(builder=builder, space=space, stream=stream)
            finally:
                stream.receiver.highest_offset = highest

        quic._write_stream_limits = write_stream_limits  # type: ignore[method-assign]

    def _bound(self, stream: Any) -> None:
        """The window follows what was read, not what arrived."""
        own = self._streams.get(stream.stream_id)
        if own is not None and own.consumed + WINDOW_BYTES - stream.max_stream_data_local >= WINDOW_BYTES // 2:
            stream.max_stream_data_local = own.consumed + WINDOW_BYTES

    # -- for the owner ------------------------------------------------------------------------------------------------

    def connect(self, address: Address) -> None:
        self.quic.connect(address, now=self._loop.time())
        self.transmit()

    def open_stream(self) -> QuicStream:
        stream_id = self.quic.get_next_available_stream_id()
        # An id is taken only by a first write, be it an empty one.
        self.quic.send_stream_data(stream_id, b"")
        stream = self._streams[stream_id] = QuicStream(self, stream_id)
        if self._ended:
            stream.lose("the connection has ended")
        return stream

    def ping(self) -> None:
        self._ping_count += 1
        # The loop's own clock stands still within a turn of it, on uvloop for up to a millisecond.
        self._pings = {self._ping_count: time.perf_counter()}
        self.quic.send_ping(self._ping_count)
        self.transmit()

    def close(self, reason: str, code: int = 0) -> None:
        """Tell the peer and end; ``link_ended`` follows at once."""
        if self._ended:
            return
        self.quic.close(error_code=code, reason_phrase=bounded_reason(reason))
        self.transmit()
        self._end(reason, code)

    # -- for the streams ----------------------------------------------------------------------------------------------

    def pending_bytes(self, stream_id: int) -> int:
        """Written and not acknowledged yet."""
        stream = self.quic._streams.get(stream_id)
        return 0 if stream is None else stream.sender._buffer_stop - stream.sender._buffer_start

    def cut(self, stream_id: int, *, sending: bool, receiving: bool) -> None:
        if self._ended or stream_id not in self.quic._streams:
            return
        if sending:
            self.quic.reset_stream(stream_id, CUT_CODE)
        if receiving:
            self.quic.stop_stream(stream_id, CUT_CODE)
        self.transmit_soon()

    def stream_over(self, stream: QuicStream) -> None:
        self._streams.pop(stream.stream_id, None)
        self._done.add(stream.stream_id)
        if len(self._done) > DONE_KEPT:
            self._done = {stream_id for stream_id in self._done if stream_id in self.quic._streams}
        self._owner.stream_over(stream)

    def transmit_soon(self) -> None:
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self.transmit)

    # -- the wire -----------------------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, address: Address) -> None:
        self.heard_at = self._loop.time()
        self.heard_count += 1
        self.quic.receive_datagram(data, address, now=self._loop.time())
        self._take_events()
        self.transmit()

    def transmit(self) -> None:
        self._soon = False
        for data, address in self.quic.datagrams_to_send(now=self._loop.time()):
            self._send(data, address)
        for stream in list(self._streams.values()):
            stream.may_write()
        self._arm()

    def _arm(self) -> None:
        due = self.quic.get_timer()
        if due == self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self._loop.call_at(due, self._on_timer) if due is not None else None

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, None
        self.quic.handle_timer(now=self._loop.time())
        self._take_events()
        self.transmit()

    # -- events -------------------------------------------------------------------------------------------------------

    def _take_events(self) -> None:
        while (event := self.quic.next_event()) is not None:
            match event:
                case events.ConnectionIdIssued(connection_id=connection_id):
                    # Events of a packet go on after one of them ended the link; its ids are nobody's any more.
                    if self.on_id_issued is not None and not self._ended:
                        self.on_id_issued(connection_id)
                case events.ConnectionIdRetired(connection_id=connection_id):
                    if self.on_id_retired is not None:
                        self.on_id_retired(connection_id)
                case events.HandshakeCompleted(alpn_protocol=alpn):
                    self._owner.handshake_done(alpn or "", self._peer_chain())
                case events.ConnectionTerminated(error_code=code, reason_phrase=reason):
                    self._end(_ending(code, reason), code)
                case events.PingAcknowledged(uid=uid):
                    sent_at = self._pings.pop(uid, None)
                    if sent_at is not None:
                        self._owner.measured(time.perf_counter() - sent_at)
                case _ if not self.accepted or self._ended:
                    # A peer that was refused, or not judged yet, may still be heard; it is not listened to.
                    continue
                case events.StreamDataReceived(stream_id=stream_id, data=data, end_stream=end):
                    self._stream_data(stream_id, data, end)
                case events.StreamReset(stream_id=stream_id) | events.StopSendingReceived(stream_id=stream_id):
                    stream = self._streams.get(stream_id)
                    if stream is not None:
                        self.cut(stream_id, sending=isinstance(event, events.StreamReset), receiving=False)
                        stream.lose("the peer cut it")

    def _stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id in self._done or self._opened_here(stream_id) or stream_id & 2:
                # The rest of a stream that is over here, or a one-way stream, which nobody uses.
                return
            stream = self._streams[stream_id] = QuicStream(self, stream_id)
            self._owner.stream_came(stream)
        stream.take(data, end)

    def _opened_here(self, stream_id: int) -> bool:
        return (stream_id & 1 == 0) is self.quic._is_client

    def _peer_chain(self) -> list[x509.Certificate]:
        leaf = self.quic.tls._peer_certificate
        return [] if leaf is None else [leaf, *self.quic.tls._peer_certificate_chain]

    def _end(self, reason: str, code: int) -> None:
        if self._ended:
            return
        self._ended = True
        for stream in list(self._streams.values()):
            stream.lose(reason)
        self._owner.link_ended(reason, code)


def request_client_certificate(quic: QuicConnection) -> None:
    """Have a server ask for the client's certificate. aioquic's switch exists once the first packet has come."""
    original = quic._initialize

    def initialize(peer_cid: bytes) -> None:
        original(peer_cid)
        quic.tls._request_client_certificate = True

    quic._initialize = initialize  # type: ignore[method-assign]


def _ending(code: int, reason: str) -> str:
    text = bounded_reason(reason)
    if text == "Idle timeout":
        return "silent for too long"
    if code == 0:
        return f"the peer closed it: {text}" if text else "the peer closed it"
    return text or f"QUIC error {code:#x}"


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
