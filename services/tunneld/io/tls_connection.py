"""One peer over TLS on TCP: a control socket, and data sockets kept warm for streams from both ends.

Source: docs/spec/transport.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from services.tunneld.io.connection import (
    LATE_SECONDS,
    PING_SECONDS,
    SILENT_SECONDS,
    STREAM_LIMIT,
    SUSPICION_ROUNDS,
    Connection,
)
from services.tunneld.io.stream import TunnelStream, bounded_reason
from services.tunneld.io.tls_socket import Message, TlsSocket, TlsStream
from shared.certificates import VerifiedPeer
from shared.errors import CertificateRefused, PeerUnreachable
from shared.ids import PeerId
from shared.multiaddrs import Address

OPEN_SECONDS = 5.0
PARKED = 2
"""Sockets that lie ready for the other side's next streams."""
KEPT_IDLE = 8


class Maker(Protocol):
    """The endpoint that a connection belongs to."""

    on_stream: Callable[[Connection, TunnelStream], None]

    def start(self, work: Coroutine[Any, Any, None]) -> None: ...

    async def dial_socket(self, address: Address, expected: PeerId, kind: str, link: str) -> TlsSocket: ...

    def forget(self, connection: TlsConnection) -> None: ...


class TlsConnection(Connection):
    """One peer over TLS. Made by :class:`TlsEndpoint` once the control socket was greeted both ways."""

    transport = "tcp"

    def __init__(
        self,
        endpoint: Maker,
        control: TlsSocket,
        peer: VerifiedPeer,
        address: Address,
        link: str,
        observed_address: str,
        *,
        dialled_here: bool,
    ) -> None:
        super().__init__(peer, str(address), observed_address, dialled_here=dialled_here)
        self.link = link
        self._address = address
        self._endpoint = endpoint
        self._control = control
        self._sockets: set[TlsSocket] = set()
        self._idle: list[TlsSocket] = []
        """Ready for a stream from this end."""
        self._parked = 0
        """At the dialler: sockets ready for a stream from the other end, or on their way."""
        self._wanted: list[asyncio.Future[TlsSocket]] = []
        self._pings: dict[int, float] = {}
        self._ping_count = 0
        self._ended = False
        control.on_lost = lambda _socket, reason: self._over(reason)
        control.heard_at = asyncio.get_running_loop().time()
        control.carry_messages(self._on_message)
        if control.lost is not None:
            asyncio.get_running_loop().call_soon(self._over, control.lost)
        endpoint.start(self._keep_alive())
        if dialled_here:
            for _ in range(PARKED):
                self._park()

    async def open_stream(self) -> TunnelStream:
        carrier = await self._free_socket()
        self.stream_began(opened_here=True)
        return carrier.begin()

    def close(self, reason: str) -> None:
        if not self._ended:
            self._control.send_message({"bye": bounded_reason(reason)})
            self._over(reason)

    def silent_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._control.heard_at

    def suspect(self) -> None:
        if not self._ended:
            self._endpoint.start(self._prove_alive())

    async def _prove_alive(self) -> None:
        loop = asyncio.get_running_loop()
        heard = self._control.heard_count
        self._ping_count += 1
        self._control.send_message({"ping": self._ping_count})
        for _ in range(SUSPICION_ROUNDS):
            seconds = self.suspicion_seconds()
            began = loop.time()
            await asyncio.sleep(seconds)
            if loop.time() - began < seconds + LATE_SECONDS:
                break
        if self._control.heard_count == heard:
            self._over(f"no sign of life for {self.silent_seconds():.1f} s after another connection ended")

    # -- sockets ------------------------------------------------------------------------------------------------------

    async def _free_socket(self) -> TlsSocket:
        while self._idle:
            carrier = self._idle.pop()
            if carrier.lost is None:
                return carrier
        if self._ended:
            raise PeerUnreachable("the connection has ended")
        if self.dialled_here:
            carrier = await self._endpoint.dial_socket(self._address, self.peer.peer_id, "mine", self.link)
            self._adopt(carrier, is_opener=True)
            if self._ended or carrier.lost is not None:
                raise PeerUnreachable("the connection has just ended")
            return carrier
        wanted: asyncio.Future[TlsSocket] = asyncio.get_running_loop().create_future()
        self._wanted.append(wanted)
        self._control.send_message({"need": len(self._wanted)})
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await wanted
        except TimeoutError:
            raise PeerUnreachable(f"the peer made no connection for another stream within {OPEN_SECONDS:g} s") from None
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)

    def attach(self, carrier: TlsSocket, kind: str) -> None:
        """At the accepting side: another greeted socket of this link."""
        self._adopt(carrier, is_opener=kind == "yours")
        if kind == "yours":
            self._offer(carrier)

    def _adopt(self, carrier: TlsSocket, *, is_opener: bool) -> None:
        if self._ended or carrier.lost is not None:
            carrier.close()
            return
        self._sockets.add(carrier)
        carrier.on_lost = self._socket_lost
        carrier.on_idle = self._offer if is_opener else self._idle_again
        carrier.on_over = self._stream_over
        carrier.on_stream = self._stream_came
        carrier.carry_streams(is_opener=is_opener)

    def _offer(self, carrier: TlsSocket) -> None:
        """A socket is free for a stream from this end."""
        while self._wanted:
            wanted = self._wanted.pop(0)
            if not wanted.done():
                wanted.set_result(carrier)
                return
        if len(self._idle) >= KEPT_IDLE:
            self._sockets.discard(carrier)
            carrier.close()
            return
        self._idle.append(carrier)

    def _idle_again(self, carrier: TlsSocket) -> None:
        """A stream from the other end is over, and the socket lies ready for another one."""
        if self.dialled_here:
            self._parked += 1

    def _socket_lost(self, carrier: TlsSocket, _reason: str) -> None:
        self._sockets.discard(carrier)
        if carrier in self._idle:
            self._idle.remove(carrier)
        if self.dialled_here and not carrier.is_opener and carrier.stream is None and not self._ended:
            self._parked -= 1
            if self._parked < 0:
                self._parked = 0
            self._park_enough()

    def _park(self) -> None:
        self._parked += 1
        self._endpoint.start(self._dial_parked())

    def _park_enough(self) -> None:
        for _ in range(PARKED - self._parked):
            self._park()

    async def _dial_parked(self) -> None:
        try:
            carrier = await self._endpoint.dial_socket(self._address, self.peer.peer_id, "yours", self.link)
        except (PeerUnreachable, CertificateRefused):
            # The control socket will tell whether the peer is gone; until then the other side asks again.
            self._parked -= 1
            return
        self._adopt(carrier, is_opener=False)

    # -- streams ------------------------------------------------------------------------------------------------------

    def _stream_came(self, carrier: TlsSocket, stream: TlsStream) -> None:
        if self.dialled_here:
            self._parked -= 1
            self._park_enough()
        self.stream_began(opened_here=False)
        if self.open_streams > STREAM_LIMIT:
            self.count_refused()
            stream.abort(f"more than {STREAM_LIMIT} streams at once")
            return
        self._endpoint.on_stream(self, stream)

    def _stream_over(self, stream: TlsStream) -> None:
        self.stream_ended(stream)

    # -- control ------------------------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        match message:
            case {"ping": int(number)}:
                self._control.send_message({"pong": number})
            case {"pong": int(number)}:
                sent_at = self._pings.pop(number, None)
                if sent_at is not None:
                    self.measured(time.perf_counter() - sent_at)
            case {"need": int(count)} if self.dialled_here:
                for _ in range(min(count, KEPT_IDLE) - self._parked):
                    self._park()
            case {"bye": str(reason)}:
                self._over(f"the peer closed it: {bounded_reason(reason)}")

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._ended:
            began = loop.time()
            self._ping_count += 1
            self._pings = {self._ping_count: time.perf_counter()}
            self._control.send_message({"ping": self._ping_count})
            await asyncio.sleep(PING_SECONDS)
            late = loop.time() - began - PING_SECONDS > PING_SECONDS
            silent = loop.time() - self._control.heard_at
            # After a pause of this very process the answers still wait to be read.
            if silent > SILENT_SECONDS and not late:
                self._over(f"silent for {silent:.0f} s")

    def _over(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._endpoint.forget(self)
        for wanted in self._wanted:
            if not wanted.done():
                wanted.set_exception(PeerUnreachable(reason))
        for carrier in [*self._sockets, self._control]:
            if carrier.stream is not None:
                carrier.stream.lose(reason)
            carrier.close()
        self.resolve(reason)
