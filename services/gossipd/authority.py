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
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from shared.certificates import csr_public_key, fingerprint, issue
from shared.errors import InviteRefused, StateError
from shared.ids import InviteId, MeshId, PeerId
from shared.invites import Invite, SignedInvite, check_invite, mint
from shared.messages.trust import Enrolled, Grant, InviteView, PeerAddresses
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
        self, mesh_id: MeshId, mesh_name: str, root: x509.Certificate, issuer: Issuer, peer_id: PeerId
    ) -> None:
        self.mesh_id = mesh_id
        self.mesh_name = mesh_name
        self.root = root
        self.peer_id = peer_id
        self._issuer = issuer
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
    ) -> Enrolled:
        """Admit who holds the invite and the key of the request. The same key again is not counted twice.

        Raises: InviteRefused, CertificateRefused.
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
        now = datetime.datetime.fromtimestamp(now_unix_seconds, datetime.UTC)
        certificate = issue(key, self.mesh_id, invite.grant, self._issuer.certificate, self._issuer.key, now=now)
        self._redeemed.setdefault(invite.invite_id, set()).add(peer_id)
        return Enrolled(
            root_der=self.root.public_bytes(Encoding.DER),
            chain_der=tuple(part.public_bytes(Encoding.DER) for part in (certificate, self._issuer.certificate)),
            mesh_id=self.mesh_id,
            mesh_name=self.mesh_name,
            grant=invite.grant,
            peers=peers,
            observed_address=observed_address,
        )

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


def _minted(value: Mapping[str, object]) -> Minted:
    for grant in get_args(Grant):
        if value["grant"] == grant:
            return Minted(grant, int(str(value["uses"])), int(str(value["expires_unix_seconds"])))
    raise ValueError(f"unknown grant {value['grant']!r}")
