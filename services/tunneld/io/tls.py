"""TLS 1.3 over TCP between nodes: the endpoint that dials and accepts, and the connection it makes of several sockets.

A connection with a peer is one control socket (keep-alive, round trips, requests for more sockets) and as many data
sockets as there are streams, kept warm for the next ones. All are dialled by the same side, so that a node nobody can
dial is reachable: *mine* are those the dialler opens streams on, *yours* lie ready for the other side's streams. The
greeting names the control socket's link, by which the accepting side tells whose they are.

Source: docs/spec/transport.md.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from services.tunneld.io.connection import Connection, Greeted
from services.tunneld.io.credentials import Credentials, presented_chain
from services.tunneld.io.stream import TunnelStream, bounded_reason
from services.tunneld.io.tls_connection import TlsConnection
from services.tunneld.io.tls_socket import Message, TlsSocket
from shared.certificates import VerifiedPeer
from shared.errors import CertificateRefused, PeerUnreachable, StreamLost
from shared.ids import PeerId
from shared.multiaddrs import Address
from shared.version import VERSION

HANDSHAKE_SECONDS = 3.0
GREETING_SECONDS = 3.0
HANDSHAKES_AT_ONCE = 64
GREETING_VERSION = 1
X509_NOT_YET_VALID, X509_EXPIRED = 9, 10
CLOCK_WORDS = "the certificate does not fit the clock here"

OnConnection = Callable[[Connection], None]
OnStream = Callable[[Connection, TunnelStream], None]


class TlsEndpoint:
    """Dials and, after :meth:`listen`, accepts. ``credentials`` is asked anew for every handshake."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Callable[[], Credentials | None],
        on_connection: OnConnection,
        on_stream: OnStream,
    ) -> None:
        self._listener = listener
        self._credentials = credentials
        self._on_connection = on_connection
        self.on_stream = on_stream
        self._connections: dict[tuple[PeerId, str], TlsConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes = 0
        self._contexts: tuple[Credentials, ssl.SSLContext, ssl.SSLContext] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def listen(self) -> None:
        self._listener.setblocking(False)
        # What is accepted inherits it: with it, what is left of ended connections (TIME_WAIT) need not keep a
        # restarted node from its port.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.listen(128)
        self.start(self._accept())

    def close(self) -> None:
        for connection in list(self._connections.values()):
            connection.close("that node stops")
        for task in self._tasks:
            task.cancel()

    def forget(self, connection: TlsConnection) -> None:
        self._connections.pop((connection.peer.peer_id, connection.link), None)

    # -- dialling -----------------------------------------------------------------------------------------------------

    async def dial(self, address: Address, expected: PeerId | None) -> Connection:
        """A new connection, reported to ``on_connection`` too. Raises: PeerUnreachable, CertificateRefused."""
        link = os.urandom(12).hex()
        carrier, peer, answer = await self._greet(address, expected, "control", link)
        connection = TlsConnection(
            self, carrier, peer, address.without_peer(), link, _text(answer, "observed"), dialled_here=True
        )
        self._connections[peer.peer_id, link] = connection
        self._on_connection(connection)
        return connection

    async def probe(self, address: Address, expected: PeerId | None) -> Greeted:
        """Greet and hang up: neither end reports a connection. Raises: PeerUnreachable, CertificateRefused."""
        carrier, peer, answer = await self._greet(address, expected, "probe", os.urandom(12).hex())
        carrier.close()
        return Greeted(peer, _text(answer, "version"), _text(answer, "observed"))

    async def dial_socket(self, address: Address, expected: PeerId, kind: str, link: str) -> TlsSocket:
        """Another socket of a link. Raises: PeerUnreachable, CertificateRefused."""
        carrier, _, _ = await self._greet(address, expected, kind, link)
        return carrier

    async def _greet(
        self, address: Address, expected: PeerId | None, kind: str, link: str
    ) -> tuple[TlsSocket, VerifiedPeer, Message]:
        credentials = self._credentials()
        if credentials is None:
            raise PeerUnreachable("this node is in no mesh, so nobody would accept it")
        carrier = await self._connect(address, self._client_context(credentials))
        try:
            peer = credentials.judge(_chain_of(carrier))
            if expected is not None and peer.peer_id != expected:
                raise CertificateRefused(f"{peer.peer_id} answers there, not {expected}")
            seen = str(address.without_peer())
            carrier.send_message(
                {"v": GREETING_VERSION, "kind": kind, "link": link, "version": VERSION, "observed": seen}
            )
            answer = await carrier.greeting(GREETING_SECONDS)
            _check_answer(answer)
        except StreamLost as error:
            carrier.close()
            raise _not_welcomed(error.detail) from None
        except TimeoutError:
            carrier.close()
            raise PeerUnreachable(f"it connected but sent no greeting within {GREETING_SECONDS:g} s") from None
        except BaseException:
            carrier.close()
            raise
        return carrier, peer, answer

    async def _connect(self, address: Address, context: ssl.SSLContext) -> TlsSocket:
        family = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                _, carrier = await asyncio.get_running_loop().create_connection(
                    TlsSocket,
                    address.host,
                    address.port,
                    ssl=context,
                    server_hostname="",
                    family=family.get(address.family, 0),
                )
        except TimeoutError:
            raise PeerUnreachable(f"no answer over TCP within {HANDSHAKE_SECONDS:g} s") from None
        except ssl.SSLCertVerificationError as error:
            clock = error.verify_code in (X509_NOT_YET_VALID, X509_EXPIRED)
            what = CLOCK_WORDS if clock else "what answers there is of another mesh"
            raise CertificateRefused(f"{what}: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise CertificateRefused(f"the TLS handshake failed: {error.reason or error}") from None
        except OSError as error:
            raise PeerUnreachable(_os_words(error)) from None
        return carrier

    # -- accepting ----------------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        while True:
            try:
                raw = self._listener.accept()[0]
            except BlockingIOError:
                await self._readable()
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED):
                    return
                await asyncio.sleep(0.1)
                continue
            raw.setblocking(False)
            credentials = self._credentials()
            if credentials is None or self._handshakes >= HANDSHAKES_AT_ONCE:
                raw.close()
                continue
            self.start(self._welcome(raw, credentials))

    async def _readable(self) -> None:
        """Somebody connects. ``loop.sock_accept`` would drop the socket and log an error if cancelled just then."""
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_reader(self._listener, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._listener)

    async def _welcome(self, raw: socket.socket, credentials: Credentials) -> None:
        self._handshakes += 1
        carrier: TlsSocket | None = None
        try:
            context = self._server_context(credentials)
            # uvloop returns its own protocol instead of the one it was given.
            made = TlsSocket()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: made, raw, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
            carrier = made
            peer = credentials.judge(_chain_of(carrier))
            await self._sort(carrier, peer, await carrier.greeting(GREETING_SECONDS))
        except CertificateRefused as error:
            if carrier is None:
                raw.close()
                return
            carrier.send_message({"refused": bounded_reason(error.detail)})
            carrier.close()
        except (OSError, TimeoutError, StreamLost):
            if carrier is not None:
                carrier.close()
        finally:
            self._handshakes -= 1

    async def _sort(self, carrier: TlsSocket, peer: VerifiedPeer, greeting: Message) -> None:
        """What the dialler wants this socket for."""
        remote = _address_of(carrier)
        answer: Message = {"v": GREETING_VERSION, "version": VERSION, "observed": str(remote)}
        kind, link = greeting.get("kind"), greeting.get("link")
        if greeting.get("v") != GREETING_VERSION or not isinstance(link, str) or len(link) > 64:
            raise CertificateRefused(f"this node greets in version {GREETING_VERSION}; update the older node")
        key = (peer.peer_id, link)
        if kind == "probe":
            carrier.send_message(answer)
            carrier.close()
        elif kind == "control" and key not in self._connections:
            carrier.send_message(answer)
            seen = _text(greeting, "observed")
            connection = TlsConnection(self, carrier, peer, remote, link, seen, dialled_here=False)
            self._connections[key] = connection
            self._on_connection(connection)
        elif kind in ("mine", "yours") and key in self._connections:
            carrier.send_message(answer)
            self._connections[key].attach(carrier, kind)
        else:
            raise CertificateRefused("the greeting names no connection of this node")

    # -- contexts -----------------------------------------------------------------------------------------------------

    def _client_context(self, credentials: Credentials) -> ssl.SSLContext:
        return self._made(credentials)[1]

    def _server_context(self, credentials: Credentials) -> ssl.SSLContext:
        return self._made(credentials)[2]

    def _made(self, credentials: Credentials) -> tuple[Credentials, ssl.SSLContext, ssl.SSLContext]:
        if self._contexts is None or self._contexts[0] is not credentials:
            self._contexts = (credentials, credentials.client_context(), credentials.server_context())
        return self._contexts


def _chain_of(carrier: TlsSocket) -> list[Any]:
    assert carrier.transport is not None
    try:
        return list(presented_chain(carrier.transport.get_extra_info("ssl_object")))
    except ValueError as error:
        raise CertificateRefused(f"a certificate cannot be read: {error}") from None


def _address_of(carrier: TlsSocket) -> Address:
    assert carrier.transport is not None
    name = carrier.transport.get_extra_info("peername") or ("0.0.0.0", 0)
    host = str(name[0]).split("%")[0]
    return Address("ip6" if ":" in host else "ip4", host, int(name[1]), "tcp")


def _text(said: Message, what: str) -> str:
    value = said.get(what)
    return value if isinstance(value, str) and len(value) <= 256 else ""


def _check_answer(answer: Message) -> None:
    refused = answer.get("refused")
    if isinstance(refused, str):
        raise CertificateRefused(f"it refuses this node: {bounded_reason(refused)}")
    if answer.get("v") != GREETING_VERSION:
        raise CertificateRefused("it greets in another version; update the older node")


def _not_welcomed(detail: str) -> CertificateRefused | PeerUnreachable:
    """A refused client learns it only after its handshake, by an alert instead of a greeting."""
    if "alert" in detail.lower():
        return CertificateRefused(f"it refuses this node's certificate: {detail}")
    return PeerUnreachable(f"it ended the connection without a greeting: {detail}")


def _os_words(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "TCP connection refused: nothing listens there"
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved: {error.strerror}"
    return f"TCP: {error.strerror or error}"
