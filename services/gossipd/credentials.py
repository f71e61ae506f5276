"""What this node proves its membership with, and as an issuer admits others with; as one document.

Mesh id, root, keys and certificates are one document so that no crash can leave half of them: whatever is on disk is
one whole identity, the former or the new one. Of several places that name the mesh, this one counts.

Source: docs/spec/trust.md, docs/spec/joining.md.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from services.gossipd.authority import Issuer
from services.gossipd.mesh_identity import NO_MESH
from shared.certificates import (
    VerifiedPeer,
    check_issuer,
    csr_public_key,
    fingerprint,
    issue,
    load_der,
    make_issuer,
    make_root,
    named_mesh_id,
    verify_chain,
)
from shared.errors import CertificateRefused, StateError
from shared.ids import MeshId, PeerId
from shared.messages.trust import Enrolled, Grant, PeerAddresses
from shared.peer_ids import peer_id_of

FORMAT = 1
ISSUER_GRANT: Grant = "issuer"


@dataclass(frozen=True, slots=True)
class Credentials:
    """All of it. Empty ``chain``: nobody was ever invited, this node is a mesh of its own without certificates."""

    mesh_id: MeshId = NO_MESH
    mesh_name: str = ""
    root: x509.Certificate | None = None
    root_key: ec.EllipticCurvePrivateKey | None = None
    """Only with the mesh's creator."""
    issuer: Issuer | None = None
    chain: tuple[x509.Certificate, ...] = ()
    """This node's certificate, then its issuer's."""
    bootstrap: tuple[PeerAddresses, ...] = ()
    """Who was in the mesh when this node joined: whom to dial before anybody else is known."""

    @property
    def leaf(self) -> x509.Certificate | None:
        return self.chain[0] if self.chain else None

    @property
    def chain_der(self) -> tuple[bytes, ...]:
        return tuple(part.public_bytes(Encoding.DER) for part in self.chain)

    @property
    def root_der(self) -> bytes:
        return self.root.public_bytes(Encoding.DER) if self.root else b""

    def grant(self) -> Grant | None:
        """What this node's certificate allows it. None without one."""
        peer = self.certified()
        return peer.grant if peer else None

    def certified(self) -> VerifiedPeer | None:
        """Whom this node's certificate is for. None without one."""
        if self.root is None or not self.chain:
            return None
        # Dates are for others to judge: an expired certificate still says what it was for.
        now = max(part.not_valid_before_utc for part in (*self.chain, self.root))
        return verify_chain(self.chain, self.root, mesh_id=self.mesh_id, now=now)

    # -- on disk ----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "mesh_id": self.mesh_id,
                "mesh_name": self.mesh_name,
                "root": _pem(self.root),
                "root_key": _key_pem(self.root_key),
                "issuer": _pem(self.issuer.certificate if self.issuer else None),
                "issuer_key": _key_pem(self.issuer.key if self.issuer else None),
                "chain": [_pem(part) for part in self.chain],
                "bootstrap": [{"peer_id": peer.peer_id, "addresses": list(peer.addresses)} for peer in self.bootstrap],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str, source: str) -> Credentials:
        """Raises: StateError; never quotes the file, it holds keys."""
        try:
            value = json.loads(text)
            if value["format"] != FORMAT:
                raise ValueError("of a format that this version of meshd does not know")
            root_key, issuer_key = _key(value, "root_key"), _key(value, "issuer_key")
            issuer = _certificate(value["issuer"])
            if (issuer is None) != (issuer_key is None):
                raise ValueError("an issuer certificate without its key, or the other way round")
            made = cls(
                mesh_id=MeshId(str(value["mesh_id"])),
                mesh_name=str(value["mesh_name"]),
                root=_certificate(value["root"]),
                root_key=root_key,
                issuer=Issuer(issuer, issuer_key) if issuer and issuer_key else None,
                chain=tuple(part for part in map(_certificate, value["chain"]) if part is not None),
                bootstrap=tuple(
                    PeerAddresses(peer_id=PeerId(str(peer["peer_id"])), addresses=tuple(map(str, peer["addresses"])))
                    for peer in value["bootstrap"]
                ),
            )
            made.check()
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            OverflowError,
            UnsupportedAlgorithm,
            CertificateRefused,
        ) as error:
            what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else _without_quotes(error)
            raise StateError(
                f"{source} is damaged ({what}); restore it from a backup, or move it away: the node then starts in a "
                "mesh of its own, and joins again with a token"
            ) from None
        return made

    def check(self) -> None:
        """Whether the parts belong together. Raises: CertificateRefused."""
        if self.root is None:
            if self.chain or self.issuer or self.root_key:
                raise CertificateRefused("certificates or keys without the mesh's root")
            return
        if self.root_key is not None and self.root_key.public_key() != self.root.public_key():
            raise CertificateRefused("the root key is not that of the root certificate")
        if self.issuer is not None:
            if self.issuer.key.public_key() != self.issuer.certificate.public_key():
                raise CertificateRefused("the issuer key is not that of the issuer certificate")
            check_issuer(self.issuer.certificate, self.root, now=self.issuer.certificate.not_valid_before_utc)
        if self.chain:
            self.grant()


# -- making -------------------------------------------------------------------------------------------------------


def found_mesh(
    root_key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    csr_der: bytes,
    *,
    mesh_id: MeshId,
    mesh_name: str,
    now: datetime.datetime,
) -> Credentials:
    """A mesh with this node as its creator. ``mesh_id`` is used for an unnamed one. Raises: CertificateRefused."""
    key = csr_public_key(csr_der)
    root = make_root(root_key, now=now)
    certificate = make_issuer(issuer_key.public_key(), peer_id_of(key.public_bytes_raw()), root, root_key, now=now)
    if mesh_name:
        mesh_id = named_mesh_id(mesh_name, root)
    leaf = issue(key, mesh_id, ISSUER_GRANT, certificate, issuer_key, now=now)
    return Credentials(
        mesh_id=mesh_id,
        mesh_name=mesh_name,
        root=root,
        root_key=root_key,
        issuer=Issuer(certificate, issuer_key),
        chain=(leaf, certificate),
    )


def admitted(
    enrolled: Enrolled,
    issuer_key: ec.EllipticCurvePrivateKey | None,
    own: PeerId,
    root_fingerprint: str,
    *,
    now: datetime.datetime,
) -> Credentials:
    """What a node that was admitted keeps, everything checked anew. Raises: CertificateRefused."""
    root = load_der(enrolled.root_der)
    if fingerprint(root) != root_fingerprint:
        raise CertificateRefused("the mesh's root is not the one that the token names; ask for a new token")
    if enrolled.mesh_name and enrolled.mesh_id != named_mesh_id(enrolled.mesh_name, root):
        raise CertificateRefused(
            f"the mesh is not the one that is called {enrolled.mesh_name[:64]} under this root; ask for a new token"
        )
    credentials = Credentials(
        mesh_id=enrolled.mesh_id,
        mesh_name=enrolled.mesh_name,
        root=root,
        bootstrap=tuple(peer for peer in enrolled.peers if peer.peer_id != own),
    )
    return with_chain(credentials, enrolled.chain_der, enrolled.issuer_der, issuer_key, own, now=now)


def with_chain(
    credentials: Credentials,
    chain_der: tuple[bytes, ...],
    issuer_der: bytes,
    issuer_key: ec.EllipticCurvePrivateKey | None,
    own: PeerId,
    *,
    now: datetime.datetime,
) -> Credentials:
    """The same mesh with a newer certificate, and perhaps an issuer's. Raises: CertificateRefused."""
    root = credentials.root
    if root is None:
        raise CertificateRefused("this node is in no mesh that could renew its certificate")
    chain = tuple(load_der(der) for der in chain_der)
    peer = verify_chain(chain, root, mesh_id=credentials.mesh_id, now=now)
    if peer.peer_id != own:
        raise CertificateRefused(
            f"the certificate is for {peer.peer_id}, not for this node; see 'meshctl logs tunneld'"
        )
    issuer = credentials.issuer
    if issuer_der and issuer_key is not None:
        certificate = load_der(issuer_der)
        if check_issuer(certificate, root, now=now) != own:
            raise CertificateRefused("the issuer certificate is for another node")
        issuer = Issuer(certificate, issuer_key)
    made = replace(credentials, chain=chain, issuer=issuer)
    made.check()
    return made


def renewed_by_itself(credentials: Credentials, csr_der: bytes, *, now: datetime.datetime) -> Credentials:
    """An issuer signs its own node certificate again, the creator its issuer certificate too.

    Raises: CertificateRefused for a node that is no issuer.
    """
    issuer, root = credentials.issuer, credentials.root
    grant = credentials.grant()
    if issuer is None or root is None or grant is None:
        raise CertificateRefused("only an issuer renews its own certificate")
    key = csr_public_key(csr_der)
    if credentials.root_key is not None:
        own = peer_id_of(key.public_bytes_raw())
        certificate = make_issuer(issuer.key.public_key(), own, root, credentials.root_key, now=now)
        issuer = Issuer(certificate, issuer.key)
    leaf = issue(key, credentials.mesh_id, grant, issuer.certificate, issuer.key, now=now)
    return replace(credentials, issuer=issuer, chain=(leaf, issuer.certificate))


# -- parts --------------------------------------------------------------------------------------------------------


def _pem(certificate: x509.Certificate | None) -> str:
    return certificate.public_bytes(Encoding.PEM).decode("ascii") if certificate else ""


def _key_pem(key: ec.EllipticCurvePrivateKey | None) -> str:
    if key is None:
        return ""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii")


def _certificate(text: str) -> x509.Certificate | None:
    return x509.load_pem_x509_certificate(text.encode("ascii")) if text else None


def _key(value: Mapping[str, Any], name: str) -> ec.EllipticCurvePrivateKey | None:
    text = value[name]
    if not text:
        return None
    key = load_pem_private_key(text.encode("ascii"), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{name} is no P-256 key")
    return key


def _without_quotes(error: Exception) -> str:
    """A parser's message may repeat what it read, and that may be a key: its first words only."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON at line {error.lineno}"
    return str(error).partition("(")[0].strip()[:120] or type(error).__name__
