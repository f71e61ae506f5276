"""Invite tokens: what one node shows a person, and another redeems.

``meshd1.`` and base64url of the msgpack array ``[body, signature, checksum]``. The body says which mesh, which root to
pin, where to connect, and what the bearer gets; the signature is ECDSA P-256 of the minting issuer over it, whose
certificate is part of the body; the checksum is there so that a typing error is told from a forgery.

Whoever holds a token may redeem it: it is shown once, and no log, status or error repeats any of it.

Source: docs/spec/invites.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from shared import codec
from shared.certificates import load_der
from shared.errors import CertificateRefused, InviteRefused, SchemaError
from shared.ids import InviteId, MeshId
from shared.messages.trust import Grant

PREFIX = "meshd1."
TOKEN_LIMIT_CHARACTERS = 8192
"""A token with ten addresses has about 1,300."""
ADDRESSES_LIMIT = 32
TEXT_LIMIT = 256
USES_LIMIT = 100_000
CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """What a token says."""

    invite_id: InviteId
    mesh_id: MeshId
    mesh_name: str
    root_fingerprint: str
    """SHA-256 of the root certificate's DER in hex: what the bearer pins."""
    addresses: tuple[str, ...]
    grant: Grant
    expires_unix_seconds: int
    uses: int
    issuer_der: bytes
    """The minting issuer's certificate."""


@dataclass(frozen=True, slots=True)
class SignedInvite:
    """``body`` is what was signed, byte for byte."""

    invite: Invite
    body: bytes
    signature: bytes

    @property
    def token(self) -> str:
        data = codec.pack([self.body, self.signature, _checksum(self.body, self.signature)])
        return PREFIX + base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def mint(invite: Invite, issuer_key: ec.EllipticCurvePrivateKey) -> SignedInvite:
    """Sign ``invite`` with the key of the issuer certificate in it."""
    body = codec.pack(
        [
            invite.invite_id,
            invite.mesh_id,
            invite.mesh_name,
            bytes.fromhex(invite.root_fingerprint),
            list(invite.addresses),
            invite.grant,
            invite.expires_unix_seconds,
            invite.uses,
            invite.issuer_der,
        ]
    )
    return SignedInvite(invite, body, issuer_key.sign(body, ec.ECDSA(hashes.SHA256())))


def parse_token(text: str) -> SignedInvite:
    """Read a token, without judging it. Raises: InviteRefused with code ``token_…``; never repeats the token."""
    text = "".join(text.split())
    if not text.startswith(PREFIX):
        what = "a token of another version of meshd" if text.startswith("meshd") else "no meshd token"
        raise InviteRefused("token_foreign", f"this is {what}: one begins with {PREFIX}; 'meshctl invite' prints one")
    if len(text) > TOKEN_LIMIT_CHARACTERS:
        raise InviteRefused("token_foreign", f"this is no meshd token: it has {len(text)} characters")
    encoded = text[len(PREFIX) :]
    try:
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        value = codec.unpack(data)
    except (binascii.Error, ValueError, SchemaError):
        raise _damaged() from None
    match value:
        case [bytes(body), bytes(signature), bytes(checksum)] if checksum == _checksum(body, signature):
            return parse_invite(body, signature)
    raise _damaged()


def parse_invite(body: bytes, signature: bytes) -> SignedInvite:
    """Raises: InviteRefused when ``body`` is no invite."""
    try:
        value = codec.unpack(body)
    except SchemaError:
        raise _damaged() from None
    match value:
        case [
            str(invite_id),
            str(mesh_id),
            str(mesh_name),
            bytes(root),
            [*addresses],
            str(grant),
            int(expires),
            int(uses),
            bytes(issuer_der),
        ] if (
            len(root) == hashlib.sha256().digest_size
            and len(addresses) <= ADDRESSES_LIMIT
            and all(
                isinstance(item, str) and len(item) <= TEXT_LIMIT
                for item in (*addresses, invite_id, mesh_id, mesh_name)
            )
            and 0 < uses <= USES_LIMIT
            and expires >= 0
        ):
            for known in get_args(Grant):
                if grant == known:
                    invite = Invite(
                        invite_id=InviteId(invite_id),
                        mesh_id=MeshId(mesh_id),
                        mesh_name=mesh_name,
                        root_fingerprint=root.hex(),
                        addresses=tuple(addresses),
                        grant=known,
                        expires_unix_seconds=expires,
                        uses=uses,
                        issuer_der=issuer_der,
                    )
                    return SignedInvite(invite, body, signature)
    raise InviteRefused("token_foreign", "this token says things that this version of meshd does not know: update it")


def check_invite(
    signed: SignedInvite,
    root: x509.Certificate,
    *,
    mesh_id: MeshId,
    now_unix_seconds: float,
    revoked: bool = False,
    used: int = 0,
) -> None:
    """Whether an issuer of this mesh may honour it for one more node.

    Raises: InviteRefused with code ``invite_wrong_mesh``, ``invite_tampered``, ``invite_revoked``, ``invite_expired``
    or ``invite_used_up``, in this order.
    """
    invite = signed.invite
    if invite.mesh_id != mesh_id or bytes.fromhex(invite.root_fingerprint) != root.fingerprint(hashes.SHA256()):
        raise InviteRefused("invite_wrong_mesh", "this invite is for another mesh than the node that was asked is in")
    if not _signed_by_issuer(signed, root):
        raise InviteRefused("invite_tampered", "this invite was changed, or no issuer of this mesh made it")
    if revoked:
        raise InviteRefused("invite_revoked", "this invite was revoked; ask for a new one")
    if now_unix_seconds > invite.expires_unix_seconds:
        hours = (now_unix_seconds - invite.expires_unix_seconds) / 3600
        raise InviteRefused(
            "invite_expired", f"this invite expired {hours:.1f} hours ago; ask for a new one, and compare the clocks"
        )
    if used >= invite.uses:
        times = "once" if invite.uses == 1 else f"{invite.uses} times"
        raise InviteRefused("invite_used_up", f"this invite was good {times} and is used up; ask for a new one")


def signature_holds(signed: SignedInvite) -> bool:
    """Whether the issuer whose certificate it carries signed it: all that can be told without the mesh's root."""
    try:
        key = load_der(signed.invite.issuer_der).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signed.signature, signed.body, ec.ECDSA(hashes.SHA256()))
    except (CertificateRefused, InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def _signed_by_issuer(signed: SignedInvite, root: x509.Certificate) -> bool:
    try:
        issuer = load_der(signed.invite.issuer_der)
        issuer.verify_directly_issued_by(root)
        if not issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return False
    except (
        CertificateRefused,
        InvalidSignature,
        UnsupportedAlgorithm,
        ValueError,
        TypeError,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
    ):
        return False
    return signature_holds(signed)


def _checksum(body: bytes, signature: bytes) -> bytes:
    return hashlib.sha256(body + signature).digest()[:CHECKSUM_BYTES]


def _damaged() -> InviteRefused:
    return InviteRefused(
        "token_damaged", "this token is incomplete or mistyped; copy it again, whole, or pass it as a file: @FILE"
    )
