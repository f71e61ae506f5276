"""Whom this node trusts, and what it may do itself: its credentials with all claims of its mesh, and what follows.

Pure: keys, ids and time are arguments, what is to be kept and sent on is returned. ``io/trust_desk.py`` carries it out.

Source: docs/spec/trust.md, docs/spec/invites.md.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from cryptography.hazmat.primitives.serialization import Encoding

from services.gossipd.authority import KEPT_SECONDS, LONGEST_EXPIRY_SECONDS, Authority
from services.gossipd.claims import ROOT, ClaimKind, Claims, HeldClaim, Signer
from services.gossipd.credentials import Credentials
from services.gossipd.joining import MeshKnown
from services.gossipd.mesh_identity import NO_PEER, MeshIdentity
from shared import codec
from shared.certificates import fingerprint, issuer_peer_id, needs_renewal
from shared.errors import CertificateRefused, InviteRefused, RequestRefused, SchemaError, StateError
from shared.ids import InviteId, MeshId, PeerId
from shared.invites import parse_token
from shared.messages.trust import (
    CertificateRenewed,
    CreateInvite,
    Enrolled,
    Grant,
    InviteCreated,
    InviteView,
    PeerAddresses,
    RedeemInvite,
    RenewCertificate,
    TrustChanged,
    TrustStatement,
)

FORMAT = 1
Renewal = Literal["none", "itself", "peer"]
"""Nothing to renew now; this node signs its own certificate; an issuer of the mesh has to."""


class Trust:
    """Credentials, claims and, on an issuer, its invites; always of one and the same mesh."""

    def __init__(self, credentials: Credentials | None = None, decisions: str = "", source: str = "") -> None:
        """``decisions``: what :meth:`to_json` gave; that of another mesh is ignored. Raises: StateError."""
        self._begin(credentials or Credentials(), decisions, source)

    def _begin(self, credentials: Credentials, decisions: str, source: str) -> None:
        self.credentials = credentials
        self.claims: Claims | None = None
        self.authority: Authority | None = None
        self.admitted_others = False
        """Whether this node ever signed somebody else's certificate."""
        self._rebuild()
        if decisions:
            self._restore(decisions, source)
        self._protect_creator()

    def adopt(self, credentials: Credentials) -> None:
        """Another mesh, or newer certificates of the same."""
        same = credentials.mesh_id == self.credentials.mesh_id and credentials.root == self.credentials.root
        kept = self.to_json() if same else ""
        self._begin(credentials, kept, "memory")

    def revert(self, decisions: str) -> None:
        """Back to what :meth:`to_json` gave: what could not be kept shall not count."""
        self._begin(self.credentials, decisions, "memory")

    def _rebuild(self) -> None:
        mine = self.credentials
        if mine.root is None:
            return
        self.claims = Claims(mine.mesh_id, mine.root)
        if mine.issuer is not None:
            self.authority = Authority(mine.mesh_id, mine.mesh_name, mine.root, mine.issuer, self.own, mine.root_key)

    def _protect_creator(self) -> None:
        """No issuer that the creator makes shall be able to ban it: its own word on that outranks theirs."""
        signer = self._signer()
        if signer is not None and signer.by == ROOT and self.claims is not None:
            self.claims.decide("banned", self.own, False, signer)

    @property
    def own(self) -> PeerId:
        """The peer id that the certificate is for; empty without one."""
        peer = self.credentials.certified()
        return peer.peer_id if peer else NO_PEER

    # -- what others are told ---------------------------------------------------------------------------------------

    def message(self, identity: MeshIdentity) -> TrustChanged:
        """What tunneld works with."""
        mine = self.credentials
        if mine.root is None or self.claims is None:
            counts = wanted_identity(identity, mine)
            return TrustChanged(mesh_id=counts.mesh_id, mesh_name=counts.mesh_name)
        return TrustChanged(
            mesh_id=mine.mesh_id,
            mesh_name=mine.mesh_name,
            root_der=mine.root_der,
            chain_der=mine.chain_der,
            issuer=self.authority is not None,
            banned=tuple(sorted(self.claims.banned)),
            trusted=tuple(sorted(self.claims.trusted)),
        )

    def mesh_known(self, identity: MeshIdentity, *, others: bool) -> MeshKnown:
        """``others``: whether gossip knows of another node."""
        joined = self.credentials.root is not None and self.credentials.root_key is None
        alone = not (others or joined or self.admitted_others)
        return MeshKnown(identity.mesh_id, identity.mesh_name, alone)

    @property
    def root_fingerprint(self) -> str:
        return fingerprint(self.credentials.root) if self.credentials.root else ""

    def certificate_seconds(self, *, now_unix_seconds: float) -> float:
        """How long this node's certificate is still good; 0 without one."""
        leaf = self.credentials.leaf
        return leaf.not_valid_after_utc.timestamp() - now_unix_seconds if leaf else 0.0

    def statements(self, held: Iterable[HeldClaim] | None = None) -> list[TrustStatement]:
        return self.claims.statements(held) if self.claims else []

    # -- an issuer's requests -----------------------------------------------------------------------------------------

    def issuing(self, issuers: Iterable[str] = ()) -> Authority:
        """Raises: RequestRefused that names who can, of ``issuers``."""
        if self.authority is not None:
            return self.authority
        who = ", ".join(sorted(issuers))
        where = f"; ask on one that may: {who}" if who else "; ask on the node that made this mesh"
        grant = self.credentials.grant()
        raise RequestRefused("not_an_issuer", f"this node may not decide that, its grant is {grant or 'none'}{where}")

    def invite(
        self, request: CreateInvite, invite_id: InviteId, addresses: tuple[str, ...], *, now_unix_seconds: float
    ) -> InviteCreated:
        """Raises: RequestRefused, InviteRefused."""
        authority = self.issuing()
        signed = authority.invite(
            invite_id,
            grant=request.grant,
            uses=request.uses,
            expires_seconds=request.expires_seconds,
            addresses=addresses,
            now_unix_seconds=now_unix_seconds,
        )
        view = next(item for item in self.invites(now_unix_seconds=now_unix_seconds) if item.invite_id == invite_id)
        return InviteCreated(token=signed.token, invite=view)

    def invites(self, *, now_unix_seconds: float) -> tuple[InviteView, ...]:
        return self.authority.invites(now_unix_seconds=now_unix_seconds) if self.authority else ()

    def revoke(self, invite_id: InviteId, *, now_unix_seconds: float) -> list[HeldClaim]:
        """Raises: RequestRefused."""
        self.issuing()
        if len(invite_id) != len(invite_id.strip()) or not 0 < len(invite_id) <= 64:
            raise RequestRefused("no_such_invite", "this is no invite's id; 'meshctl invite list' shows them")
        until = int(now_unix_seconds + LONGEST_EXPIRY_SECONDS + KEPT_SECONDS)
        return self._decide("revoked", invite_id, True, until)

    def redeem(
        self, request: RedeemInvite, peers: tuple[PeerAddresses, ...], *, now_unix_seconds: float
    ) -> tuple[Enrolled, list[HeldClaim]]:
        """Admit a node. Raises: RequestRefused, InviteRefused, CertificateRefused."""
        authority = self.issuing()
        try:
            text = request.invite.decode("ascii")
        except UnicodeDecodeError:
            raise InviteRefused("token_foreign", "this is no meshd token") from None
        signed = parse_token(text)
        known = authority.redemptions().get(signed.invite.invite_id, frozenset())
        enrolled = authority.redeem(
            signed,
            request.csr_der,
            peers=peers,
            observed_address=request.observed_address,
            now_unix_seconds=now_unix_seconds,
            client=request.client,
            issuer_csr_der=request.issuer_csr_der,
        )
        self.admitted_others = True
        invite_id = signed.invite.invite_id
        made: list[HeldClaim] = []
        for peer_id in authority.redemptions()[invite_id] - known:
            until = int(signed.invite.expires_unix_seconds + KEPT_SECONDS)
            made += self._decide("redeemed", f"{invite_id}/{peer_id}", True, until)
        return enrolled, made

    def ban(self, peer_id: PeerId, *, lift: bool) -> list[HeldClaim]:
        """Raises: RequestRefused."""
        self.issuing()
        if peer_id == self.own:
            raise RequestRefused("itself", "this node does not ban itself; 'meshctl leave' takes it out of the mesh")
        return self._decide("banned", peer_id, not lift)

    def trust_guest(self, peer_id: PeerId) -> list[HeldClaim]:
        """Raises: RequestRefused."""
        self.issuing()
        return self._decide("trusted", peer_id, True)

    def renew(
        self, peer_id: PeerId, grant: Grant, request: RenewCertificate, *, now_unix_seconds: float
    ) -> CertificateRenewed:
        """An answer for a member, in words when it is no."""
        try:
            return self.issuing().renew(peer_id, grant, request, now_unix_seconds=now_unix_seconds)
        except (RequestRefused, InviteRefused, CertificateRefused) as error:
            return CertificateRenewed(reason=error.detail)

    def _decide(self, kind: ClaimKind, subject: str, value: bool, until: int = 0) -> list[HeldClaim]:
        signer = self._signer()
        if self.claims is None or signer is None:
            raise RequestRefused("not_an_issuer", "this node may not decide that")
        if signer.by != ROOT and self.claims.decided_by_root(kind, subject):
            if self.claims.holds(kind, subject) == value:
                return []
            raise RequestRefused("creator_decided", "the node that made this mesh decided that; change it there")
        if self.own in self.claims.banned:
            raise RequestRefused("banned", "this node is banned from the mesh; its decisions count no more")
        made = self.claims.decide(kind, subject, value, signer, until_unix_seconds=until)
        self._sync()
        return [made] if made else []

    def _signer(self) -> Signer | None:
        mine = self.credentials
        if mine.root_key is not None:
            return Signer(ROOT, mine.root_key)
        if mine.issuer is None:
            return None
        certificate = mine.issuer.certificate
        return Signer(issuer_peer_id(certificate), mine.issuer.key, certificate.public_bytes(Encoding.DER))

    # -- what others decided ------------------------------------------------------------------------------------------

    def merge(self, statement: TrustStatement) -> tuple[HeldClaim, ...]:
        """Take what is new; the result is to be sent on. Raises: CertificateRefused for another mesh's."""
        if self.claims is None:
            raise CertificateRefused("this node is in no mesh yet that could decide anything")
        new = self.claims.merge(statement)
        if new:
            self._sync()
        return new

    def forget_old(self, *, now_unix_seconds: float) -> None:
        if self.claims is not None:
            self.claims.forget_old(now_unix_seconds=now_unix_seconds)
        if self.authority is not None:
            self.authority.forget_old(now_unix_seconds=now_unix_seconds)

    def _sync(self) -> None:
        if self.authority is not None and self.claims is not None:
            self.authority.merge(self.claims.redeemed, self.claims.revoked)
            self.authority.banned = set(self.claims.banned)

    # -- renewal ------------------------------------------------------------------------------------------------------

    def renewal(self, own: PeerId, *, now_unix_seconds: float) -> Renewal:
        """Who has to renew what, if anything. ``own``: this node's key, which may have been replaced."""
        mine = self.credentials
        if mine.leaf is None:
            return "none"
        now = datetime.fromtimestamp(now_unix_seconds, UTC)
        if mine.issuer is not None and mine.root_key is None and needs_renewal(mine.issuer.certificate, now=now):
            return "peer"
        ageing = needs_renewal(mine.leaf, now=now) or (own and own != self.own)
        if mine.root_key is not None and mine.issuer is not None:
            ageing = ageing or needs_renewal(mine.issuer.certificate, now=now)
        if mine.issuer is not None:
            return "itself" if ageing else "none"
        return "peer" if ageing or mine.grant() == "issuer" else "none"

    def improves(self, made: Credentials, own: PeerId, *, now_unix_seconds: float) -> bool:
        """Whether these newer credentials are better than the present ones: not merely signed again."""
        mine = self.credentials
        if made.issuer is not None and (mine.issuer is None or made.issuer.certificate != mine.issuer.certificate):
            return True
        if mine.leaf is None or made.leaf is None:
            return False
        return own != self.own or needs_renewal(mine.leaf, now=datetime.fromtimestamp(now_unix_seconds, UTC))

    # -- on disk ------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Everything but the credentials. No keys in it."""
        return json.dumps(
            {
                "format": FORMAT,
                "mesh_id": self.credentials.mesh_id,
                "admitted_others": self.admitted_others,
                "authority": self.authority.to_json() if self.authority else "",
                "claims": [base64.b64encode(codec.encode(item)).decode("ascii") for item in self.statements()],
            },
            indent=1,
        )

    def _restore(self, text: str, source: str) -> None:
        try:
            value = json.loads(text)
            if value["format"] != FORMAT:
                raise ValueError("of a format that this version of meshd does not know")
            if value["mesh_id"] != self.credentials.mesh_id:
                return
            admitted, authority = value["admitted_others"] is True, str(value["authority"])
            statements = [codec.decode(base64.b64decode(item, validate=True)) for item in value["claims"]]
            if not all(isinstance(item, TrustStatement) for item in statements):
                raise ValueError("something else than claims")
        except (ValueError, KeyError, TypeError, RecursionError, binascii.Error, SchemaError) as error:
            raise StateError(
                f"{source} is damaged ({str(error)[:120]}); restore it from a backup. It says who is banned and which "
                "invites were used; without it, move it away"
            ) from error
        self.admitted_others = admitted
        if self.claims is not None:
            for statement in statements:
                self.claims.merge(statement)
        if self.authority is not None and authority:
            self.authority.restore(authority, source)
        self._sync()


def wanted_identity(stored: MeshIdentity, credentials: Credentials) -> MeshIdentity:
    """The mesh that counts where ``mesh.json`` and the credentials differ: a crash fell between the two."""
    if not credentials.mesh_id or credentials.mesh_id == stored.mesh_id:
        return stored
    return MeshIdentity(
        mesh_id=MeshId(credentials.mesh_id),
        mesh_name=credentials.mesh_name,
        incarnation=stored.incarnation,
        peer_id=stored.peer_id,
        draining=stored.draining,
    )
