"""Whether a peer can be reached, and whether it can reach this node: the handshakes of both transports, tried and told.

Nothing is left behind but, where there was none, a link with the peer that was asked to dial back.

Source: docs/spec/probe.md.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from services.tunneld.io.admin import ask_peer
from services.tunneld.io.connection import Connection, Greeted
from services.tunneld.io.credentials import presented_chain
from services.tunneld.io.quic import QuicEndpoint
from services.tunneld.io.stream import TunnelStream
from services.tunneld.io.tls import CLOCK_WORDS, TlsEndpoint
from shared.certificates import fingerprint
from shared.errors import CertificateRefused, MeshError, PeerUnreachable, RequestRefused
from shared.ids import PeerId
from shared.io.probe import read_path
from shared.messages.tunnel import AdminRequest, PeerProbed, ProbeCheck, ProbeLevel, ProbePeer
from shared.multiaddrs import Address, parse_addresses
from shared.probe import Asked, Handshake, Judged, Place, judge, places_of, settle

HANDSHAKE_SECONDS = 7.0
"""Above what either endpoint waits; names are resolved within it too."""
BACK_AT_ONCE = 4


class Links(Protocol):
    """What the prober needs of :class:`services.tunneld.io.mesh_links.MeshLinks`."""

    quic: QuicEndpoint
    tls: TlsEndpoint

    async def open_stream(self, peer_id: PeerId, *, bulk: bool) -> TunnelStream: ...

    def addresses_of(self, peer_id: PeerId) -> tuple[Address, ...]: ...


class Prober:
    """Both sides of a probe. ``own`` is this node's id."""

    def __init__(self, own: PeerId, links: Links) -> None:
        self._own = own
        self._links = links
        self._back_running = 0

    async def probe(self, request: ProbePeer) -> PeerProbed:
        """All places of ``request``, then the way back. Raises: RequestRefused."""
        places = places_of(parse_addresses(request.addresses))
        if not places:
            raise RequestRefused("no_address", "no address of that node is known; give one: HOST:PORT or a multiaddr")
        asked = self._asked(request.root_fingerprint)
        looks = await self._look(places, request.peer_id, asked)
        there = settle(judged for judged, _ in looks)
        if not request.back:
            return PeerProbed(checks=there)
        return PeerProbed(checks=there, back=await self._ask_back(request.peer_id, looks, asked))

    async def dial_back(self, peer_id: PeerId) -> PeerProbed:
        """A peer asks whether it can be dialled: only at the addresses this node has of it. Raises: RequestRefused."""
        if self._back_running >= BACK_AT_ONCE:
            raise RequestRefused("busy", "that node probes for others just now; ask again in a moment")
        self._back_running += 1
        try:
            places = places_of(self._links.addresses_of(peer_id))
            if not places:
                detail = "the peer knows no address of this node"
                fix = "look at 'meshctl whoami' here; add a public one: mesh.advertise"
                return PeerProbed(checks=(ProbeCheck(name="back", level="fail", detail=detail, fix=fix),))
            looks = await self._look(places, peer_id, Asked(own=self._own))
            return PeerProbed(checks=settle(judged for judged, _ in looks))
        finally:
            self._back_running -= 1

    def _asked(self, root_fingerprint: str) -> Asked:
        """In the mesh as a node of it, else like one that joins."""
        credentials = self._links.quic.credentials()
        if credentials is not None and root_fingerprint in ("", fingerprint(credentials.root)):
            return Asked(own=self._own)
        return Asked(own=self._own, joining=True, root_fingerprint=root_fingerprint)

    # -- there ----------------------------------------------------------------------------------------------------

    async def _look(
        self, places: tuple[Place, ...], expected: PeerId | None, asked: Asked
    ) -> list[tuple[Judged, PeerId | None]]:
        return await asyncio.gather(*(self._look_at(place, expected, asked) for place in places))

    async def _look_at(
        self, place: Place, expected: PeerId | None, asked: Asked
    ) -> tuple[Judged, PeerId | None]:
        quic, tls = self._links.quic, self._links.tls
        over_udp, over_tcp = place.address("quic"), place.address("tcp")
        if asked.joining:
            joining = self._try(lambda: quic.probe_enroll(over_udp, asked.root_fingerprint))
            path, admitted = await asyncio.gather(read_path(place), joining)
            return judge(path, admitted, None, asked), None
        path, over_quic, over_tls = await asyncio.gather(
            read_path(place),
            self._try(lambda: quic.probe(over_udp, expected)),
            self._try(lambda: tls.probe(over_tcp, expected)),
        )
        if CLOCK_WORDS in over_tls.error and not over_quic.is_refusal:
            over_tls = replace(over_tls, error=await self._in_numbers(over_tcp) or over_tls.error)
        return judge(path, over_quic, over_tls, asked), over_quic.peer_id or over_tls.peer_id

    async def _in_numbers(self, address: Address) -> str:
        """OpenSSL says only that a certificate is expired or not valid yet; by how much, the certificate says."""
        credentials = self._links.quic.credentials()
        if credentials is None:
            return ""
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname = False
        anybody.verify_mode = ssl.CERT_NONE
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                _, writer = await asyncio.open_connection(address.host, address.port, ssl=anybody)
            credentials.judge(presented_chain(writer.get_extra_info("ssl_object")))
        except CertificateRefused as error:
            return error.detail
        except (OSError, TimeoutError, ValueError):
            return ""
        finally:
            if writer is not None:
                writer.transport.abort()
        return ""

    async def _try(self, handshake: Callable[[], Awaitable[Greeted | None]]) -> Handshake:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                greeted = await handshake()
        except CertificateRefused as error:
            return Handshake(error=error.detail, is_refusal=True)
        except MeshError as error:
            return Handshake(error=error.detail, is_refusal="ALPN" in error.detail)
        except TimeoutError:
            return Handshake(error=f"no answer within {HANDSHAKE_SECONDS:g} s")
        if greeted is None:
            return Handshake()
        if greeted.peer.peer_id == self._own:
            return Handshake(error=f"{self._own} answers there, not another node", is_refusal=True)
        return Handshake(peer_id=greeted.peer.peer_id, version=greeted.version)

    # -- back -----------------------------------------------------------------------------------------------------

    async def _ask_back(
        self, expected: PeerId | None, looks: list[tuple[Judged, PeerId | None]], asked: Asked
    ) -> tuple[ProbeCheck, ...]:
        if asked.joining:
            return (_back("ok", "the way back is probed once this node is in that mesh"),)
        place, peer_id = next(((judged.place, found) for judged, found in looks if judged.works), (None, expected))
        if peer_id is None:
            return (_back("warn", "not probed: there is no way there over which to ask"),)
        try:
            stream = await self._stream_to(peer_id, place)
            answer = await ask_peer(stream, AdminRequest(peer=peer_id, action="probe"))
        except RequestRefused as error:
            update = "update meshd there" if error.code in ("schema", "not_allowed") else "ask again in a moment"
            return (_back("warn", f"not probed: the peer refuses: {error.detail}", update),)
        except MeshError as error:
            return (_back("warn", f"not probed: {error.detail}"),)
        if isinstance(answer, PeerProbed) and answer.checks:
            return answer.checks
        return (_back("warn", "not probed: the peer answered something else", "update meshd there"),)

    async def _stream_to(self, peer_id: PeerId, place: Place | None) -> TunnelStream:
        """Over the link there is, else over a new one. Raises: PeerUnreachable, CertificateRefused."""
        try:
            return await self._links.open_stream(peer_id, bulk=False)
        except PeerUnreachable:
            if place is None:
                raise
        connection: Connection
        try:
            connection = await self._links.quic.dial(place.address("quic"), peer_id)
        except PeerUnreachable:
            connection = await self._links.tls.dial(place.address("tcp"), peer_id)
        return await connection.open_stream()


def _back(level: ProbeLevel, detail: str, fix: str = "") -> ProbeCheck:
    return ProbeCheck(name="back", level=level, detail=detail, fix=fix)
