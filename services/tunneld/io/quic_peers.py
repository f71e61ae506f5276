"""Who is at the other end of a QUIC link: a dialled node, a node that dials, somebody who wants to join.

Each greets on the first stream of the side that dialled: version, and where the other one is seen. An enrolment has no
greeting: its one stream is all there is.

Source: docs/spec/transport.md.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cryptography import x509

from services.tunneld.framing import FrameReader, encode_frame
from services.tunneld.io.connection import (
    LATE_SECONDS,
    PING_SECONDS,
    SILENT_SECONDS,
    STREAM_LIMIT,
    SUSPICION_ROUNDS,
    Connection,
    Greeted,
)
from services.tunneld.io.credentials import Credentials
from services.tunneld.io.quic_link import QuicLink, QuicStream
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.certificates import VerifiedPeer, certified_mesh_id, fingerprint, verify_chain
from shared.errors import CertificateRefused, MeshError, PeerUnreachable, SchemaError
from shared.ids import PeerId
from shared.multiaddrs import Address
from shared.version import VERSION

MESH_ALPN = "meshd/1"
ENROLL_ALPN = "meshd-join/1"
REFUSED = 0x100
"""Application code: the certificate was refused; the reason phrase says why."""
GREETING_LIMIT_BYTES = 4096
GREETING_VERSION = 1
ENROLMENT_SECONDS = 20.0
TLS_ALERT = 0x100
"""QUIC errors from here to 0x1ff are TLS alerts (RFC 9001, 4.8)."""


class QuicMeshConnection(Connection):
    """One peer over QUIC, greeted both ways."""

    transport = "quic"

    def __init__(
        self, link: QuicLink, peer: VerifiedPeer, remote: str, observed_address: str, *, dialled_here: bool
    ) -> None:
        super().__init__(peer, remote, observed_address, dialled_here=dialled_here)
        self._link = link
        self._keeper = asyncio.get_running_loop().create_task(self._keep_alive())

    async def open_stream(self) -> TunnelStream:
        if self.closed.done():
            raise PeerUnreachable(self.closed.result())
        stream = self._link.open_stream()
        self.stream_began(opened_here=True)
        return stream

    def close(self, reason: str) -> None:
        self._link.close(reason)

    def silent_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._link.heard_at

    def suspect(self) -> None:
        if not self.closed.done():
            self._link.ping()
            self._judge_later(self._link.heard_count, SUSPICION_ROUNDS)

    def _judge_later(self, heard: int, rounds: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(
            loop.time() + self.suspicion_seconds(),
            self._judge_silence,
            heard,
            rounds,
            loop.time() + self.suspicion_seconds() + LATE_SECONDS,
        )

    def _judge_silence(self, heard: int, rounds: int, late_at: float) -> None:
        if self.closed.done() or self._link.heard_count != heard:
            return
        if asyncio.get_running_loop().time() > late_at and rounds > 1:
            self._judge_later(heard, rounds - 1)
            return
        self.close(f"no sign of life for {self.silent_seconds():.1f} s after another connection ended")

    def ended(self, reason: str) -> None:
        self._keeper.cancel()
        self.resolve(reason)

    async def _keep_alive(self) -> None:
        while True:
            self._link.ping()
            await asyncio.sleep(PING_SECONDS)


class Maker(Protocol):
    """The endpoint that connections belong to."""

    ungreeted: int
    on_enroll: Callable[[TunnelStream, str], None] | None
    on_connection: Callable[[Connection], None]
    on_stream: Callable[[Connection, TunnelStream], None]

    def forget(self, link: QuicLink) -> None: ...


class _Side:
    """What a dialled and an accepted mesh connection have in common."""

    def __init__(self, endpoint: Maker, credentials: Credentials, remote: str, *, dialled_here: bool) -> None:
        self.link: QuicLink | None = None
        self.connection: QuicMeshConnection | None = None
        self.peer: VerifiedPeer | None = None
        self._endpoint = endpoint
        self._credentials = credentials
        self._remote = remote
        self._dialled_here = dialled_here
        self._greeting_stream: QuicStream | None = None
        self._early: list[QuicStream] = []
        """Streams that came before the greeting was complete: packets overtake each other."""

    def judge(self, chain: list[x509.Certificate]) -> VerifiedPeer:
        """Raises: CertificateRefused."""
        if not chain:
            raise CertificateRefused("it presented no certificate; only enrolment goes without")
        return self._credentials.judge(chain)

    def stream_came(self, stream: QuicStream) -> None:
        if self.connection is None:
            self._early.append(stream)
        else:
            self._hand_over(self.connection, stream)

    def _hand_over(self, connection: QuicMeshConnection, stream: QuicStream) -> None:
        connection.stream_began(opened_here=False)
        if connection.open_streams > STREAM_LIMIT:
            stream.abort(f"more than {STREAM_LIMIT} streams at once")
            return
        self._endpoint.on_stream(connection, stream)

    def stream_over(self, stream: QuicStream) -> None:
        if self.connection is not None and stream is not self._greeting_stream:
            self.connection.stream_ended(stream)

    def measured(self, rtt_seconds: float) -> None:
        if self.connection is not None:
            self.connection.measured(rtt_seconds)

    def welcome(self, observed_address: str) -> QuicMeshConnection:
        """Both have greeted: the connection exists from here on."""
        assert self.link is not None
        assert self.peer is not None
        connection = self.connection = QuicMeshConnection(
            self.link, self.peer, self._remote, observed_address, dialled_here=self._dialled_here
        )
        self._endpoint.on_connection(connection)
        early, self._early = self._early, []
        for stream in early:
            self._hand_over(connection, stream)
        return connection

    def over(self, reason: str) -> None:
        if self.link is not None:
            self._endpoint.forget(self.link)
        if self.connection is not None:
            self.connection.ended(reason)


class MeshPeer(_Side):
    """A node that this one dials. ``ready`` becomes its connection, or why there is none.

    With ``probing`` it is only greeted, and ``greeted`` becomes what it said; there is no connection then.
    """

    def __init__(
        self,
        endpoint: Maker,
        credentials: Credentials,
        remote: str,
        expected: PeerId | None,
        *,
        probing: bool = False,
    ) -> None:
        super().__init__(endpoint, credentials, remote, dialled_here=True)
        self.ready: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.greeted: asyncio.Future[Greeted] = asyncio.get_running_loop().create_future()
        self._expected = expected
        self._probing = probing
        self._greeter: asyncio.Task[None] | None = None

    def handshake_done(self, alpn: str, chain: list[x509.Certificate]) -> None:
        assert self.link is not None
        try:
            self.peer = self.judge(chain)
            if self._expected is not None and self.peer.peer_id != self._expected:
                raise CertificateRefused(f"{self.peer.peer_id} answers there, not {self._expected}")
        except CertificateRefused as error:
            self._fail(error)
            self.link.close(error.detail, REFUSED)
            return
        self.link.accepted = True
        self._greeting_stream = self.link.open_stream()
        self._greeter = asyncio.get_running_loop().create_task(self._greet(self._greeting_stream))

    async def _greet(self, stream: QuicStream) -> None:
        try:
            await stream.write(_greeting(self._remote, probe=self._probing))
            await stream.finish()
            answer = await _read_greeting(stream)
        except MeshError as error:
            if self.link is not None:
                self.link.close(f"no greeting: {error.detail}")
            return
        if self._probing:
            assert self.peer is not None
            if not self.greeted.done():
                self.greeted.set_result(Greeted(self.peer, answer.version, answer.observed))
            return
        connection = self.welcome(answer.observed)
        if not self.ready.done():
            self.ready.set_result(connection)

    def _fail(self, error: MeshError) -> None:
        _fail(self.ready, error)
        _fail(self.greeted, error)

    def link_ended(self, reason: str, code: int) -> None:
        refused = TLS_ALERT <= code <= 0x1FF
        words = f"it refuses this node: {reason}" if refused else reason
        self._fail(CertificateRefused(words) if refused else PeerUnreachable(words))
        self.over(words)


class ServerSide(_Side):
    """Somebody who dials this node: a node of the mesh, or one that wants to join."""

    def __init__(self, endpoint: Maker, credentials: Credentials, address: Address) -> None:
        super().__init__(endpoint, credentials, str(address), dialled_here=False)
        self._enrolling = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._endpoint.ungreeted += 1
        self._timer = asyncio.get_running_loop().call_later(
            SILENT_SECONDS, self._too_late, "it did not complete its greeting"
        )

    def _too_late(self, reason: str) -> None:
        if self.link is not None:
            self.link.close(reason)

    def _greeted(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._endpoint.ungreeted -= 1

    def handshake_done(self, alpn: str, chain: list[x509.Certificate]) -> None:
        assert self.link is not None
        if alpn == ENROLL_ALPN:
            self._enrolling = True
            self.link.accepted = True
            self._greeted()
            asyncio.get_running_loop().call_later(ENROLMENT_SECONDS, self._too_late, "the enrolment took too long")
            return
        try:
            self.peer = self.judge(chain)
        except CertificateRefused as error:
            self.link.close(error.detail, REFUSED)
            return
        self.link.accepted = True

    def stream_came(self, stream: QuicStream) -> None:
        assert self.link is not None
        if self._greeting_stream is not None:
            if self._enrolling:
                self.link.close("an enrolment has one stream", REFUSED)
                return
            super().stream_came(stream)
        elif self._enrolling:
            self._greeting_stream = stream
            if self._endpoint.on_enroll is None:
                self.link.close("nobody can join here", REFUSED)
            else:
                self._endpoint.on_enroll(stream, self._remote)
        elif stream.stream_id == 0:
            self._greeting_stream = stream
            asyncio.get_running_loop().create_task(self._greet(stream))
        else:
            super().stream_came(stream)

    async def _greet(self, stream: QuicStream) -> None:
        try:
            greeting = await _read_greeting(stream)
            await stream.write(_greeting(self._remote))
            await stream.finish()
        except MeshError as error:
            if self.link is not None:
                self.link.close(f"no greeting: {error.detail}")
            return
        if greeting.probe:
            # It hangs up once it has read the answer; if not, the timer does.
            return
        self._greeted()
        self.welcome(greeting.observed)

    def link_ended(self, reason: str, code: int) -> None:
        self._greeted()
        self.over(reason)


class EnrollClient:
    """This node without a certificate, at a node that may give it one. ``ready`` becomes the stream.

    ``verified`` is done once the node has shown the pinned root; with ``probing`` no stream is opened then.
    """

    def __init__(self, root_fingerprint: str, *, probing: bool = False) -> None:
        self.link: QuicLink | None = None
        self.ready: asyncio.Future[TunnelStream] = asyncio.get_running_loop().create_future()
        self.verified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._root_fingerprint = root_fingerprint
        self._probing = probing

    def handshake_done(self, alpn: str, chain: list[x509.Certificate]) -> None:
        assert self.link is not None
        try:
            check_pinned(chain, self._root_fingerprint)
        except CertificateRefused as error:
            self._fail(error)
            self.link.close(error.detail, REFUSED)
            return
        self.link.accepted = True
        if not self.verified.done():
            self.verified.set_result(None)
        if not self.ready.done() and not self._probing:
            self.ready.set_result(self.link.open_stream())

    def stream_came(self, stream: QuicStream) -> None:
        stream.abort("only one stream here")

    def stream_over(self, stream: QuicStream) -> None:
        if self.link is not None:
            self.link.close("done")

    def measured(self, rtt_seconds: float) -> None:
        """An enrolment is too short for that."""

    def link_ended(self, reason: str, code: int) -> None:
        self._fail(PeerUnreachable(reason))

    def _fail(self, error: MeshError) -> None:
        _fail(self.ready, error)
        _fail(self.verified, error)


def check_pinned(chain: list[x509.Certificate], root_fingerprint: str) -> VerifiedPeer:
    """The chain of a node that enrols others: node, issuer, root, the root being the token's.

    Raises: CertificateRefused.
    """
    if len(chain) != 3:
        raise CertificateRefused("what answers there shows no chain up to a mesh root")
    if fingerprint(chain[2]) != root_fingerprint:
        raise CertificateRefused("what answers there is of another mesh than the token")
    mesh_id = certified_mesh_id(chain[0])
    return verify_chain(chain[:2], chain[2], mesh_id=mesh_id, now=datetime.datetime.now(datetime.UTC))


@dataclass(frozen=True, slots=True)
class _Greeting:
    observed: str
    """Where the peer sees us."""
    version: str
    probe: bool


def _greeting(seen: str, *, probe: bool = False) -> bytes:
    """``seen``: where the other one is seen from here. ``probe``: this is all, no connection shall come of it."""
    said: dict[str, Any] = {"v": GREETING_VERSION, "version": VERSION, "observed": seen}
    return encode_frame(codec.pack({**said, "probe": True} if probe else said))


async def _read_greeting(stream: QuicStream) -> _Greeting:
    """Raises: StreamLost, SchemaError."""
    reader = FrameReader(GREETING_LIMIT_BYTES)
    while True:
        data = await stream.read()
        if not data:
            raise SchemaError("the stream ended before a greeting came")
        frames = reader.feed(data)
        if frames:
            break
    message: Any = codec.unpack(frames[0])
    if not isinstance(message, dict) or message.get("v") != GREETING_VERSION:
        raise SchemaError(f"this node greets in version {GREETING_VERSION}; update the older node")
    return _Greeting(_text(message.get("observed")), _text(message.get("version")), message.get("probe") is True)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 256 else ""


def _fail(ready: asyncio.Future[Any], error: MeshError) -> None:
    if not ready.done():
        ready.set_exception(error)
        # The one who dialled may have given up already.
        ready.exception()
