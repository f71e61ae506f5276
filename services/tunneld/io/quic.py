"""QUIC between nodes: one UDP socket that accepts and dials, mesh connections and enrolments.

Both directions use the one socket, so that the address a peer observes is the one others can use too.

A handshake proves a key, nothing else: aioquic's server looks at no certificate, and its client is content before the
server has judged. So each side judges with :meth:`Credentials.judge` the moment the handshake completes, listens to
nothing before, and the connection counts once both have greeted on the first stream.

Source: docs/spec/transport.md.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType, encode_quic_version_negotiation, pull_quic_header
from cryptography import x509

from services.tunneld.io.connection import SILENT_SECONDS, Connection, Greeted
from services.tunneld.io.credentials import Credentials
from services.tunneld.io.quic_link import WINDOW_BYTES, QuicLink, request_client_certificate
from services.tunneld.io.quic_peers import ENROLL_ALPN, MESH_ALPN, EnrollClient, MeshPeer, ServerSide
from services.tunneld.io.stream import TunnelStream
from shared.errors import PeerUnreachable
from shared.ids import PeerId
from shared.multiaddrs import Address

DIAL_SECONDS = 4.0
"""From the first packet to the greeting; a lost packet costs about a second."""
UNGREETED_LIMIT = 256
"""Connections that others have begun and not finished greeting."""

logging.getLogger("quic").setLevel(logging.CRITICAL)
"""The core warns of what peers do wrong, packet by packet; what matters of it reaches our own log with the peer."""

OnConnection = Callable[[Connection], None]
OnStream = Callable[[Connection, TunnelStream], None]
OnEnroll = Callable[[TunnelStream, str], None]


class QuicEndpoint(asyncio.DatagramProtocol):
    """Dials and, after :meth:`listen`, accepts. ``credentials`` is asked anew for every handshake.

    ``on_enroll`` takes the streams of those who want to join; while it is None, nobody can.
    """

    def __init__(
        self,
        udp: socket.socket,
        credentials: Callable[[], Credentials | None],
        on_connection: OnConnection,
        on_stream: OnStream,
    ) -> None:
        self.on_enroll: OnEnroll | None = None
        self.on_connection = on_connection
        self.on_stream = on_stream
        self.credentials = credentials
        self.ungreeted = 0
        self._socket = udp
        self._family = udp.family
        self._transport: asyncio.DatagramTransport | None = None
        self._links: dict[bytes, QuicLink] = {}
        self._opening: asyncio.Lock = asyncio.Lock()
        self._accepting = False

    async def listen(self) -> None:
        await self._open()
        self._accepting = True

    async def _open(self) -> None:
        """Take the socket into use; dialling needs no more than that."""
        async with self._opening:
            if self._transport is None:
                self._socket.setblocking(False)
                transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                    lambda: self, sock=self._socket
                )
                self._transport = transport

    def close(self) -> None:
        for link in set(self._links.values()):
            link.close("that node stops")
        self._links.clear()
        if self._transport is not None:
            self._transport.close()

    # -- dialling -----------------------------------------------------------------------------------------------------

    async def dial(self, address: Address, expected: PeerId | None) -> Connection:
        """A new connection, reported to ``on_connection`` too. Raises: PeerUnreachable, CertificateRefused."""
        credentials = self.credentials()
        if credentials is None:
            raise PeerUnreachable("this node is in no mesh, so nobody would accept it")
        configuration = self._configuration(credentials, is_client=True)
        configuration.alpn_protocols = [MESH_ALPN]
        remote = await self._resolve(address)
        peer = MeshPeer(self, credentials, str(address.without_peer()), expected)
        link = self._begin(configuration, peer, remote)
        peer.link = link
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                return await asyncio.shield(peer.ready)
        except TimeoutError:
            link.close("the handshake took too long")
            raise PeerUnreachable(f"no answer over UDP within {DIAL_SECONDS:g} s") from None
        except asyncio.CancelledError:
            if not peer.ready.done():
                # Else it is a connection already, and has been reported.
                link.close("no longer wanted")
            raise

    async def probe(self, address: Address, expected: PeerId | None) -> Greeted:
        """Greet like a node that dials, and hang up: neither end reports a connection.

        Raises: PeerUnreachable, CertificateRefused.
        """
        credentials = self.credentials()
        if credentials is None:
            raise PeerUnreachable("this node is in no mesh, so nobody would accept it")
        configuration = self._configuration(credentials, is_client=True)
        configuration.alpn_protocols = [MESH_ALPN]
        remote = await self._resolve(address)
        peer = MeshPeer(self, credentials, str(address.without_peer()), expected, probing=True)
        link = self._begin(configuration, peer, remote)
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                return await asyncio.shield(peer.greeted)
        except TimeoutError:
            raise PeerUnreachable(f"no answer over UDP within {DIAL_SECONDS:g} s") from None
        finally:
            link.close("it was only a probe")

    async def probe_enroll(self, address: Address, root_fingerprint: str) -> None:
        """Whether a node of that mesh takes those who join; nothing is asked of it.

        Raises: PeerUnreachable, CertificateRefused.
        """
        configuration = self._configuration(None, is_client=True)
        configuration.alpn_protocols = [ENROLL_ALPN]
        remote = await self._resolve(address)
        client = EnrollClient(root_fingerprint, probing=True)
        link = self._begin(configuration, client, remote)
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await asyncio.shield(client.verified)
        except TimeoutError:
            raise PeerUnreachable(f"no answer over UDP within {DIAL_SECONDS:g} s") from None
        finally:
            link.close("it was only a probe")
            self.forget(link)

    async def dial_enroll(self, address: Address, root_fingerprint: str) -> TunnelStream:
        """A stream to a node whose chain ends in the root of that fingerprint, without a certificate of ours.

        The connection ends with the stream. Raises: PeerUnreachable, CertificateRefused.
        """
        configuration = self._configuration(None, is_client=True)
        configuration.alpn_protocols = [ENROLL_ALPN]
        remote = await self._resolve(address)
        client = EnrollClient(root_fingerprint)
        link = self._begin(configuration, client, remote)
        client.link = link
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                return await asyncio.shield(client.ready)
        except TimeoutError:
            link.close("the handshake took too long")
            raise PeerUnreachable(f"no answer over UDP within {DIAL_SECONDS:g} s") from None
        except asyncio.CancelledError:
            link.close("no longer wanted")
            raise

    def _begin(self, configuration: QuicConfiguration, owner: MeshPeer | EnrollClient, remote: Any) -> QuicLink:
        quic = QuicConnection(configuration=configuration)
        link = self._make_link(quic, owner)
        self._links[quic.host_cid] = link
        owner.link = link
        link.connect(remote)
        return link

    async def _resolve(self, address: Address) -> Any:
        await self._open()
        wanted = self._family if address.family in ("dns", "ip4", "ip6") else (
            socket.AF_INET6 if address.family == "dns6" else socket.AF_INET
        )
        host = address.host
        if address.family == "ip4" and self._family == socket.AF_INET6:
            host = f"::ffff:{host}"
        if address.family == "ip6" and self._family == socket.AF_INET:
            raise PeerUnreachable("this node's mesh port has no IPv6; set mesh.host to :: for it")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, address.port, family=wanted, type=socket.SOCK_DGRAM
            )
        except socket.gaierror as error:
            raise PeerUnreachable(f"the name cannot be resolved: {error.strerror}") from None
        if wanted != self._family:
            raise PeerUnreachable("this node's mesh port has another IP version than that name asks for")
        return found[0][4]

    # -- datagrams ----------------------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: Any) -> None:
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=8)
        except ValueError:
            return
        link = self._links.get(header.destination_cid)
        if link is not None:
            link.datagram_received(data, addr)
        elif (
            self._accepting
            and header.packet_type == QuicPacketType.INITIAL
            and len(data) >= SMALLEST_MAX_DATAGRAM_SIZE
            and self.ungreeted < UNGREETED_LIMIT
        ):
            self._accept(header.version, header.destination_cid, header.source_cid, data, addr)

    def error_received(self, exc: Exception) -> None:
        """What the network reports about earlier datagrams; each connection has its own timers for that."""

    def _accept(self, version: int | None, destination_cid: bytes, source_cid: bytes, data: bytes, addr: Any) -> None:
        credentials = self.credentials()
        if credentials is None:
            return
        configuration = self._configuration(credentials, is_client=False)
        if version is not None and version not in configuration.supported_versions:
            versions = encode_quic_version_negotiation(
                source_cid=destination_cid,
                destination_cid=source_cid,
                supported_versions=configuration.supported_versions,
            )
            self._send(versions, addr)
            return
        configuration.alpn_protocols = [MESH_ALPN, ENROLL_ALPN] if self.on_enroll else [MESH_ALPN]
        quic = QuicConnection(
            configuration=configuration, original_destination_connection_id=destination_cid
        )
        request_client_certificate(quic)
        side = ServerSide(self, credentials, address_of(addr))
        link = self._make_link(quic, side)
        side.link = link
        self._links[destination_cid] = link
        self._links[quic.host_cid] = link
        side.start()
        link.datagram_received(data, addr)

    def _make_link(self, quic: QuicConnection, owner: Any) -> QuicLink:
        link = QuicLink(quic, owner, self._send)
        link.on_id_issued = lambda connection_id: self._links.__setitem__(connection_id, link)
        link.on_id_retired = lambda connection_id: self._retire(connection_id, link)
        return link

    def _retire(self, connection_id: bytes, link: QuicLink) -> None:
        if self._links.get(connection_id) is link:
            del self._links[connection_id]

    def forget(self, link: QuicLink) -> None:
        """The connection is over; late packets of it are nobody's."""
        for connection_id in [key for key, value in self._links.items() if value is link]:
            del self._links[connection_id]

    def _send(self, data: bytes, addr: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(data, addr)

    # -- configuration ------------------------------------------------------------------------------------------------

    @staticmethod
    def _configuration(credentials: Credentials | None, *, is_client: bool) -> QuicConfiguration:
        configuration = QuicConfiguration(
            is_client=is_client,
            idle_timeout=SILENT_SECONDS,
            max_stream_data=WINDOW_BYTES,
            max_data=16 * WINDOW_BYTES,
            verify_mode=ssl.CERT_NONE,
        )
        if credentials is not None:
            configuration.certificate = credentials.chain[0]
            chain: list[x509.Certificate] = [*credentials.chain[1:]]
            if not is_client:
                # Who enrols knows nothing of the mesh but its root's fingerprint.
                chain.append(credentials.root)
            configuration.certificate_chain = chain
            configuration.private_key = credentials.key
        return configuration


def address_of(addr: Any) -> Address:
    """A socket's address as a multiaddr's parts."""
    host = str(addr[0]).split("%")[0].removeprefix("::ffff:")
    return Address("ip6" if ":" in host else "ip4", host, int(addr[1]), "quic")


