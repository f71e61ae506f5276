"""An issuer's decisions: whom it invites, whom it admits, whom it no longer does.

Invites are counted where they are redeemed; what other issuers redeemed arrives by gossip and is merged as sets, so
that nothing is counted twice and two issuers that cannot hear each other overshoot by at most one count each. Only ids
and counts are kept: a token exists on its bearer's screen and nowhere here.

Source: docs/spec/invites.md, docs/spec/trust.md.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import get_args

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding

from shared.certificates import csr_public_key, fingerprint, issue, issuer_csr_public_key, make_issuer
from shared.errors import CertificateRefused, InviteRefused, StateError
from shared.ids import InviteId, MeshId, PeerId
from shared.invites import Invite, SignedInvite, check_invite, mint
from shared.messages.trust import CertificateRenewed, Enrolled, Grant, InviteView, PeerAddresses, RenewCertificate
from shared.peer_ids import peer_id_of

KEPT_SECONDS = 7 * 86_400
"""Invites are remembered for so long after they expired, for the list and for late redemptions of others."""
LONGEST_EXPIRY_SECONDS = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class Issuer:
    """What makes a node an issuer: its issuer certificate and the key of it."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Minted:
    """An invite of this issuer, without what could redeem it."""

    grant: Grant
    uses: int
    expires_unix_seconds: int


class Authority:
    """The decisions of one issuer. No clock: ``now_unix_seconds`` is an argument; keys are given."""

    def __init__(
        self,
        mesh_id: MeshId,
        mesh_name: str,
        root: x509.Certificate,
        issuer: Issuer,
        peer_id: PeerId,
        root_key: ec.EllipticCurvePrivateKey | None = None,
    ) -> None:
        """``root_key``: only the mesh's creator has it, and only it makes other issuers."""
        self.mesh_id = mesh_id
        self.mesh_name = mesh_name
        self.root = root
        self.peer_id = peer_id
        self._issuer = issuer
        self._root_key = root_key
        self._minted: dict[InviteId, Minted] = {}
        self._redeemed: dict[InviteId, set[PeerId]] = {}
        self._revoked: set[InviteId] = set()
        self.banned: set[PeerId] = set()

    # -- invites ----------------------------------------------------------------------------------------------

    def invite(
        self,
        invite_id: InviteId,
        *,
        grant: Grant,
        uses: int,
        expires_seconds: float,
        addresses: tuple[str, ...],
        now_unix_seconds: float,
    ) -> SignedInvite:
        """A new invite. ``invite_id`` is random. Raises: InviteRefused for terms that make no sense."""
        if not 0 < expires_seconds <= LONGEST_EXPIRY_SECONDS:
            raise InviteRefused("bad_terms", "an invite is good for between a second and a year")
        if uses < 1:
            raise InviteRefused("bad_terms", "an invite is good for at least one node")
        self._check_grant(grant)
        if not addresses:
            raise InviteRefused(
                "no_address", "this node has no address that another one could reach; see 'meshctl doctor'"
            )
        expires = int(now_unix_seconds + expires_seconds)
        self._minted[invite_id] = Minted(grant, uses, expires)
        return mint(
            Invite(
                invite_id=invite_id,
                mesh_id=self.mesh_id,
                mesh_name=self.mesh_name,
                root_fingerprint=fingerprint(self.root),
                addresses=addresses,
                grant=grant,
                expires_unix_seconds=expires,
                uses=uses,
                issuer_der=self._issuer.certificate.public_bytes(Encoding.DER),
            ),
            self._issuer.key,
        )

    def invites(self, *, now_unix_seconds: float) -> tuple[InviteView, ...]:
        """This issuer's invites, the longest valid first."""
        views = [
            InviteView(
                invite_id=invite_id,
                grant=minted.grant,
                uses=minted.uses,
                used=len(self._redeemed.get(invite_id, ())),
                expires_in_seconds=minted.expires_unix_seconds - now_unix_seconds,
                issuer=self.peer_id,
                revoked=invite_id in self._revoked,
            )
            for invite_id, minted in self._minted.items()
        ]
        return tuple(sorted(views, key=lambda view: (-view.expires_in_seconds, view.invite_id)))

    def revoke(self, invite_id: InviteId) -> None:
        """Also one of another issuer: its id is enough. Idempotent."""
        self._revoked.add(invite_id)

    def redeem(
        self,
        signed: SignedInvite,
        csr_der: bytes,
        *,
        peers: tuple[PeerAddresses, ...],
        observed_address: str,
        now_unix_seconds: float,
        client: bool = False,
        issuer_csr_der: bytes = b"",
    ) -> Enrolled:
        """Admit who holds the invite and the key of the request. The same key again is not counted twice.

        ``client``: the one who joins wants no more than that. Raises: InviteRefused, CertificateRefused.
        """
        key = csr_public_key(csr_der)
        peer_id = peer_id_of(key.public_bytes_raw())
        if peer_id in self.banned:
            raise InviteRefused("banned", f"{peer_id} is banned from this mesh; an issuer can lift that")
        invite = signed.invite
        redeemed = self._redeemed.get(invite.invite_id, set())
        check_invite(
            signed,
            self.root,
            mesh_id=self.mesh_id,
            now_unix_seconds=now_unix_seconds,
            revoked=invite.invite_id in self._revoked,
            used=len(redeemed - {peer_id}),
        )
        grant: Grant = "client" if client else invite.grant
        self._check_grant(grant)
        certificate = self._sign(key, grant, now_unix_seconds)
        issuer_der = self._issuer_for(peer_id, grant, issuer_csr_der, now_unix_seconds)
        self._redeemed.setdefault(invite.invite_id, set()).add(peer_id)
        return Enrolled(
            root_der=self.root.public_bytes(Encoding.DER),
            chain_der=tuple(part.public_bytes(Encoding.DER) for part in (certificate, self._issuer.certificate)),
            mesh_id=self.mesh_id,
            mesh_name=self.mesh_name,
            grant=grant,
            peers=peers,
            observed_address=observed_address,
            issuer_der=issuer_der,
        )

    def renew(
        self, peer_id: PeerId, grant: Grant, request: RenewCertificate, *, now_unix_seconds: float
    ) -> CertificateRenewed:
        """Sign a member's key again, with the grant that its certificate has.

        ``peer_id`` and ``grant`` are what its connection proved. Raises: InviteRefused, CertificateRefused.
        """
        key = csr_public_key(request.csr_der)
        if peer_id_of(key.public_bytes_raw()) != peer_id:
            raise CertificateRefused("a node renews its own certificate only")
        if peer_id in self.banned:
            raise InviteRefused("banned", f"{peer_id} is banned from this mesh; an issuer can lift that")
        certificate = self._sign(key, grant, now_unix_seconds)
        return CertificateRenewed(
            chain_der=tuple(part.public_bytes(Encoding.DER) for part in (certificate, self._issuer.certificate)),
            issuer_der=self._issuer_for(peer_id, grant, request.issuer_csr_der, now_unix_seconds),
        )

    def _check_grant(self, grant: Grant) -> None:
        """Raises: InviteRefused."""
        if grant == "issuer" and self._root_key is None:
            raise InviteRefused(
                "not_the_creator",
                "only the node that made this mesh can make others issuers; use 'meshctl invite --grant issuer' there",
            )

    def _sign(self, key: ed25519.Ed25519PublicKey, grant: Grant, now_unix_seconds: float) -> x509.Certificate:
        now = _aware(now_unix_seconds)
        return issue(key, self.mesh_id, grant, self._issuer.certificate, self._issuer.key, now=now)

    def _issuer_for(self, peer_id: PeerId, grant: Grant, csr_der: bytes, now_unix_seconds: float) -> bytes:
        """An issuer certificate, DER, if the grant says so and this node can. Raises: CertificateRefused."""
        if grant != "issuer" or not csr_der or self._root_key is None:
            return b""
        key = issuer_csr_public_key(csr_der)
        made = make_issuer(key, peer_id, self.root, self._root_key, now=_aware(now_unix_seconds))
        return made.public_bytes(Encoding.DER)

    # -- what other issuers did ---------------------------------------------------------------------------------

    def redemptions(self) -> dict[InviteId, frozenset[PeerId]]:
        """Who redeemed what, as far as known here; for the other issuers."""
        return {invite_id: frozenset(peers) for invite_id, peers in self._redeemed.items()}

    def merge(self, redemptions: Mapping[InviteId, Iterable[PeerId]], revoked: Iterable[InviteId] = ()) -> None:
        """What another issuer knows. Idempotent and in any order."""
        for invite_id, peers in redemptions.items():
            self._redeemed.setdefault(invite_id, set()).update(peers)
        self._revoked.update(revoked)

    def forget_old(self, *, now_unix_seconds: float) -> None:
        """Drop what expired long ago."""
        for invite_id, minted in list(self._minted.items()):
            if minted.expires_unix_seconds + KEPT_SECONDS < now_unix_seconds:
                del self._minted[invite_id]
                self._redeemed.pop(invite_id, None)
                self._revoked.discard(invite_id)

    # -- keeping ------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Everything but keys and certificates."""
        return json.dumps(
            {
                "minted": {invite_id: asdict(minted) for invite_id, minted in self._minted.items()},
                "redeemed": {invite_id: sorted(peers) for invite_id, peers in self._redeemed.items()},
                "revoked": sorted(self._revoked),
                "banned": sorted(self.banned),
            },
            indent=1,
        )

    def restore(self, text: str, source: str) -> None:
        """Raises: StateError: an issuer that forgot its bans and revocations must not go on as if there were none."""
        try:
            value = json.loads(text)
            minted = {InviteId(str(key)): _minted(item) for key, item in value["minted"].items()}
            redeemed = {
                InviteId(str(key)): {PeerId(str(peer)) for peer in peers} for key, peers in value["redeemed"].items()
            }
            revoked = {InviteId(str(item)) for item in value["revoked"]}
            banned = {PeerId(str(item)) for item in value["banned"]}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise StateError(
                f"{source} is damaged ({error}); restore it from a backup. It says which invites were used and revoked"
            ) from error
        self._minted, self._redeemed, self._revoked, self.banned = minted, redeemed, revoked, banned


def _aware(unix_seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)


def _minted(value: Mapping[str, object]) -> Minted:
    for grant in get_args(Grant):
        if value["grant"] == grant:
            return Minted(grant, int(str(value["uses"])), int(str(value["expires_unix_seconds"])))
    raise ValueError(f"unknown grant {value['grant']!r}")
