"""Trust between the gossipds of a mesh: claims told and heard, certificates renewed.

Best effort, so everything is said again: all claims to whoever connects, new ones to everybody connected, all of them
each minute to a few; renewals are asked for each minute until one came. What peers send can only be taken or refused:
refusals are counted, and logged when they are first seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable

from cryptography.hazmat.primitives.asymmetric import ec

from services.gossipd.claims import HeldClaim
from services.gossipd.credentials import renewed_by_itself, with_chain
from services.gossipd.io.trust_keeping import TrustKeeping
from services.gossipd.trust import Trust
from shared import codec
from shared.certificates import make_issuer_csr
from shared.errors import CertificateRefused, MeshError, SchemaError
from shared.ids import PeerId
from shared.io import log
from shared.messages.trust import CertificateRenewed, RenewCertificate, TrustStatement
from shared.messages.tunnel import FromPeer, LinkChanged, SendToPeers

SEND_SECONDS = 5.0
UPKEEP_SECONDS = 60.0
"""Claims are told again, renewals looked at, so often."""
RETOLD_PEERS = 3


class TrustExchange:
    """Speaks with the gossipds of connected peers."""

    def __init__(self, keeping: TrustKeeping) -> None:
        self._keeping = keeping
        self.links: dict[PeerId, LinkChanged] = {}
        """Everything that tunneld says of links, but closed ones."""
        self._wake = asyncio.Event()
        self._issuer_key: ec.EllipticCurvePrivateKey | None = None
        """Offered for an issuer certificate, kept only with one."""

    def start(self) -> None:
        self._keeping.tasks.start(self._upkeep(), "renewals and claims")

    def wake(self) -> None:
        """Something changed that a renewal may have waited for."""
        self._wake.set()

    def only_links(self, present: Iterable[PeerId]) -> None:
        """tunneld's whole list: others are gone."""
        for peer_id in set(self.links) - set(present):
            del self.links[peer_id]

    def on_link(self, link: LinkChanged) -> None:
        before = self.links.get(link.peer_id)
        if link.state == "closed":
            self.links.pop(link.peer_id, None)
        else:
            self.links[link.peer_id] = link
        if link.state == "connected" and (before is None or before.state != "connected"):
            self.tell([link.peer_id])
            self._wake.set()

    def connected(self) -> list[PeerId]:
        return sorted(peer_id for peer_id, link in self.links.items() if link.state == "connected")

    def decided(self, made: Iterable[HeldClaim]) -> None:
        """Decisions of this node: to disk, into effect, to everybody connected. Raises: StateError."""
        made = list(made)
        self._keeping.keep_decisions()
        if made:
            self.tell(self.connected(), made)

    def on_peer(self, said: FromPeer) -> None:
        try:
            message = codec.decode(said.payload)
        except SchemaError as error:
            self._keeping.around.bus.count("enroll_frames_refused")
            self._keeping.once(f"{said.peer_id} schema", "from_peer_refused", peer=said.peer_id, reason=error.detail)
            return
        match message:
            case TrustStatement():
                self._on_statement(said.peer_id, message)
            case RenewCertificate():
                now = self._keeping.unix_seconds()
                answer = self._trust.renew(said.peer_id, said.grant, message, now_unix_seconds=now)
                log.info("renewal", peer=said.peer_id, refused=answer.reason or "no")
                self._send([said.peer_id], answer)
            case CertificateRenewed():
                self._keeping.tasks.start(self._renewed(said.peer_id, message), "renewal")

    def _on_statement(self, peer_id: PeerId, statement: TrustStatement) -> None:
        claims = self._trust.claims
        before = sum(claims.refused.values()) if claims else 0
        try:
            new = self._trust.merge(statement)
        except CertificateRefused as error:
            self._keeping.around.bus.count("claims_refused")
            self._keeping.once(f"{peer_id} mesh", "claims_refused", peer=peer_id, reason=error.detail)
            return
        refused = sum(claims.refused.values()) - before if claims else 0
        if refused and claims is not None:
            self._keeping.around.bus.count("claims_refused", refused)
            reasons = "; ".join(sorted(claims.refused)[:4])
            self._keeping.once(f"{peer_id} claims", "claims_refused", peer=peer_id, reason=reasons)
        if new:
            try:
                self._keeping.keep_decisions()
            except MeshError as error:
                # A full disk: it is told again within a minute.
                self._keeping.once("claims_not_kept", "claims_not_kept", reason=error.detail)
                return
            self.tell([other for other in self.connected() if other != peer_id], new)

    def tell(self, peers: list[PeerId], held: Iterable[HeldClaim] | None = None) -> None:
        for statement in self._trust.statements(held):
            self._send(peers, statement)

    def _send(self, peers: list[PeerId], message: codec.Message) -> None:
        if peers:
            self._keeping.tasks.start(self._sent(peers, message), f"{type(message).__name__} to peers")

    async def _sent(self, peers: list[PeerId], message: codec.Message) -> None:
        asked = SendToPeers(peers=tuple(peers), payload=codec.encode(message), channel="enroll")
        try:
            await self._keeping.tunneld.request(asked, deadline_seconds=SEND_SECONDS)
        except MeshError as error:
            # Best effort: claims are told again every minute, renewals asked for again.
            self._keeping.around.bus.count("not_sent")
            self._keeping.once(f"send {error.code}", "not_sent", reason=error.detail)

    async def _upkeep(self) -> None:
        loop = asyncio.get_running_loop()
        retell_at = loop.time() + UPKEEP_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(retell_at):
                    await self._wake.wait()
            self._wake.clear()
            self._trust.forget_old(now_unix_seconds=self._keeping.unix_seconds())
            try:
                await self._renew_if_due()
            except MeshError as error:
                self._keeping.once(f"renewal {error.code}", "not_renewed", reason=error.detail)
            if loop.time() >= retell_at:
                retell_at = loop.time() + UPKEEP_SECONDS
                connected = self.connected()
                self.tell(random.sample(connected, min(RETOLD_PEERS, len(connected))))

    async def _renew_if_due(self) -> None:
        """Raises: MeshError."""
        keeping = self._keeping
        own = keeping.identity().peer_id
        due = self._trust.renewal(own, now_unix_seconds=keeping.unix_seconds())
        if due == "itself":
            csr_der, _own = await keeping.signing_request()
            async with keeping.lock:
                keeping.adopt(renewed_by_itself(self._trust.credentials, csr_der, now=keeping.now()))
            log.info("renewed", by="itself")
        elif due == "peer":
            issuers = [peer_id for peer_id in self.connected() if self.links[peer_id].grant == "issuer"]
            if self._trust.certificate_seconds(now_unix_seconds=keeping.unix_seconds()) <= 0:
                advice = "this node's certificate expired; get a new token and run: meshctl join TOKEN"
                keeping.once("expired", "certificate_expired", advice=advice)
            if not issuers:
                return
            csr_der, own = await keeping.signing_request()
            issuer_csr_der = b""
            if self._trust.credentials.grant() == "issuer":
                self._issuer_key = self._issuer_key or ec.generate_private_key(ec.SECP256R1())
                issuer_csr_der = make_issuer_csr(self._issuer_key, own)
            asked = random.sample(issuers, min(RETOLD_PEERS, len(issuers)))
            self._send(asked, RenewCertificate(csr_der=csr_der, issuer_csr_der=issuer_csr_der))

    async def _renewed(self, peer_id: PeerId, answer: CertificateRenewed) -> None:
        keeping = self._keeping
        if not answer.chain_der:
            keeping.once(f"renewal {peer_id}", "not_renewed", peer=peer_id, reason=answer.reason)
            return
        try:
            async with keeping.lock:
                own, mine = keeping.identity().peer_id, self._trust.credentials
                if self._trust.renewal(own, now_unix_seconds=keeping.unix_seconds()) != "peer":
                    return
                made = with_chain(mine, answer.chain_der, answer.issuer_der, self._issuer_key, own, now=keeping.now())
                if made.grant() != mine.grant():
                    raise CertificateRefused("the new certificate has another grant than the old one")
                if not self._trust.improves(made, own, now_unix_seconds=keeping.unix_seconds()):
                    return
                keeping.adopt(made)
        except MeshError as error:
            keeping.around.bus.count("renewals_refused")
            keeping.once(f"renewal {peer_id}", "not_renewed", peer=peer_id, reason=error.detail)
            return
        log.info("renewed", by=peer_id)

    @property
    def _trust(self) -> Trust:
        return self._keeping.trust
