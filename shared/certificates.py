"""The mesh's certificates, and the one function that judges a peer's.

A mesh is a private certificate authority: a P-256 root, P-256 issuers under it, and an Ed25519 certificate for each
node, issued for its peer id, mesh and grant. Mutual TLS 1.3 proves them on every connection; what a TLS library
checks of them differs from library to library, so :func:`verify_chain` checks everything anew on both transports.

Keys and time are arguments; serial numbers are hashes of both.

Source: RFC 5280 §4.2, §6; docs/spec/trust.md.
"""

from __future__ import annotations

import datetime
import hashlib
import urllib.parse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from shared.errors import CertificateRefused
from shared.ids import MeshId, PeerId
from shared.messages.trust import Grant
from shared.peer_ids import peer_id_of

ROOT_LIFE = datetime.timedelta(days=3650)
ISSUER_LIFE = datetime.timedelta(days=730)
NODE_LIFE = datetime.timedelta(days=30)
"""Renewed after two thirds of it, while any issuer of the mesh is reachable."""
BACKDATED = datetime.timedelta(hours=1)
"""Clocks of machines at home are minutes apart; a new certificate is valid at once everywhere."""
URI_SCHEME = "meshd"
ISSUER_PREFIX = "issuer"
DER_LIMIT_BYTES = 4096
"""A node certificate has about 400 bytes."""

_KNOWN_CRITICAL = (ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE)


@dataclass(frozen=True, slots=True)
class VerifiedPeer:
    """Who stands at the other end, proved by certificate."""

    peer_id: PeerId
    mesh_id: MeshId
    grant: Grant
    not_after: datetime.datetime
    """Aware, UTC."""


def named_mesh_id(name: str, root: x509.Certificate) -> MeshId:
    """The id of a named mesh: SHA-256 of its name and root public key, in hex."""
    key = root.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return MeshId(hashlib.sha256(name.encode("utf-8") + b"\0" + key).hexdigest())


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the DER, in hex."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


def load_der(data: bytes) -> x509.Certificate:
    """Raises: CertificateRefused for whatever is no certificate."""
    if len(data) > DER_LIMIT_BYTES:
        raise CertificateRefused(f"a certificate of {len(data)} bytes is over the limit of {DER_LIMIT_BYTES}")
    try:
        return x509.load_der_x509_certificate(data)
    except (ValueError, TypeError, x509.InvalidVersion) as error:
        raise CertificateRefused(f"not a certificate: {str(error)[:200]}") from None


# -- making ---------------------------------------------------------------------------------------------------


def make_root(key: ec.EllipticCurvePrivateKey, *, now: datetime.datetime) -> x509.Certificate:
    """A self-signed mesh root. ``key``: P-256; ``now``: aware."""
    name = _name("meshd root")
    builder = _builder(name, name, key.public_key(), key.public_key(), now, ROOT_LIFE)
    return _as_authority(builder, path_length=1).sign(key, hashes.SHA256())


def make_issuer(
    public_key: ec.EllipticCurvePublicKey,
    peer_id: PeerId,
    root: x509.Certificate,
    root_key: ec.EllipticCurvePrivateKey,
    *,
    now: datetime.datetime,
) -> x509.Certificate:
    """An issuer certificate for ``peer_id``: with its key that node admits others."""
    subject = _name(_issuer_name(peer_id))
    builder = _builder(subject, root.subject, public_key, root_key.public_key(), now, ISSUER_LIFE)
    return _as_authority(builder, path_length=0).sign(root_key, hashes.SHA256())


def make_csr(key: ed25519.Ed25519PrivateKey) -> bytes:
    """A signing request, DER, that proves possession of the node key."""
    subject = _name(peer_id_of(key.public_key().public_bytes_raw()))
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, None)
    return request.public_bytes(Encoding.DER)


def make_issuer_csr(key: ec.EllipticCurvePrivateKey, peer_id: PeerId) -> bytes:
    """A signing request, DER, for the key with which ``peer_id`` will admit others."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(_issuer_name(peer_id)))
    return request.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def csr_public_key(der: bytes) -> ed25519.Ed25519PublicKey:
    """The node key that signed the request. Raises: CertificateRefused."""
    key = _csr_key(der)
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise CertificateRefused("a node key is an Ed25519 key, this signing request has another kind")
    return key


def issuer_csr_public_key(der: bytes) -> ec.EllipticCurvePublicKey:
    """The issuer key that signed the request. Raises: CertificateRefused."""
    key = _csr_key(der)
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateRefused("an issuer key is a P-256 key, this signing request has another kind")
    return key


def _csr_key(der: bytes) -> object:
    if len(der) > DER_LIMIT_BYTES:
        raise CertificateRefused(f"a signing request of {len(der)} bytes is over the limit of {DER_LIMIT_BYTES}")
    try:
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
        valid = request.is_signature_valid
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise CertificateRefused(f"not a signing request: {str(error)[:200]}") from None
    if not valid:
        raise CertificateRefused("the signing request is not signed with its own key")
    return key


def issue(
    public_key: ed25519.Ed25519PublicKey,
    mesh_id: MeshId,
    grant: Grant,
    issuer: x509.Certificate,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    now: datetime.datetime,
    life: datetime.timedelta = NODE_LIFE,
) -> x509.Certificate:
    """A node certificate, at most as long valid as its issuer's."""
    subject = _name(peer_id_of(public_key.public_bytes_raw()))
    life = min(life, issuer.not_valid_after_utc - now)
    builder = _builder(subject, issuer.subject, public_key, issuer_key.public_key(), now, life)
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_uri(mesh_id, grant))]), critical=False
        )
    )
    return builder.sign(issuer_key, hashes.SHA256())


def issuer_peer_id(issuer: x509.Certificate) -> PeerId:
    """The node that admits others with this issuer certificate. Raises: CertificateRefused."""
    names = issuer.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    text = names[0].value if len(names) == 1 else ""
    prefix, _, peer_id = text.partition(" ") if isinstance(text, str) else ("", "", "")
    if prefix != ISSUER_PREFIX or not peer_id:
        raise CertificateRefused("the issuer certificate names no node")
    return PeerId(peer_id)


def check_issuer(issuer: x509.Certificate, root: x509.Certificate, *, now: datetime.datetime) -> PeerId:
    """Whose issuer certificate of this mesh this is, good now. Raises: CertificateRefused."""
    what = "issuer certificate"
    try:
        _check_issued(issuer, root, what)
        _check_dates(issuer, what, now)
        _check_critical(issuer, what)
        _check_authority(issuer, what, path_length=0)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise CertificateRefused(f"a certificate cannot be read: {str(error)[:200]}") from None
    return issuer_peer_id(issuer)


def needs_renewal(certificate: x509.Certificate, *, now: datetime.datetime) -> bool:
    """Whether two thirds of its life are over."""
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return now >= certificate.not_valid_before_utc + life * 2 / 3


# -- judging --------------------------------------------------------------------------------------------------


def verify_chain(
    chain: Sequence[x509.Certificate],
    root: x509.Certificate,
    *,
    mesh_id: MeshId,
    now: datetime.datetime,
    banned: Collection[PeerId] = (),
) -> VerifiedPeer:
    """Who presented ``chain`` (node certificate, issuer certificate), as a node of this mesh.

    Possession of the key is TLS's business; everything else is checked here, whatever a TLS library did.

    Raises: CertificateRefused with what is wrong and what to do.
    """
    if len(chain) != 2:
        raise CertificateRefused(
            f"{len(chain)} certificates were presented, not a node's and its issuer's; is a meshd of this mesh there?"
        )
    leaf, issuer = chain
    try:
        _check_issued(issuer, root, "issuer certificate")
        _check_issued(leaf, issuer, "node certificate")
        for certificate, what in ((root, "mesh root"), (issuer, "issuer certificate"), (leaf, "node certificate")):
            _check_dates(certificate, what, now)
            _check_critical(certificate, what)
        _check_authority(root, "mesh root", path_length=1)
        _check_authority(issuer, "issuer certificate", path_length=0)
        peer = _read_leaf(leaf, mesh_id)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise CertificateRefused(f"a certificate cannot be read: {str(error)[:200]}") from None
    if peer.peer_id in banned:
        raise CertificateRefused(f"{peer.peer_id} is banned from this mesh")
    if banned and issuer_peer_id(issuer) in banned:
        raise CertificateRefused(
            f"{peer.peer_id} was admitted by a node that is banned from this mesh; it has to join again with a token "
            "of another issuer"
        )
    return peer


def _check_issued(certificate: x509.Certificate, issuer: x509.Certificate, what: str) -> None:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise CertificateRefused(
            f"the {what} was not issued by this mesh: the node is of another mesh, or of one with the same name"
        ) from None


def _check_dates(certificate: x509.Certificate, what: str, now: datetime.datetime) -> None:
    if now < certificate.not_valid_before_utc:
        early = certificate.not_valid_before_utc - now
        raise CertificateRefused(
            f"the {what} is valid only in {_words(early)}: one of the two clocks is wrong; set both by NTP"
        )
    if now > certificate.not_valid_after_utc:
        late = now - certificate.not_valid_after_utc
        raise CertificateRefused(
            f"the {what} expired {_words(late)} ago: if the clocks are right, the node has to join again"
        )


def _check_critical(certificate: x509.Certificate, what: str) -> None:
    for extension in certificate.extensions:
        if extension.critical and extension.oid not in _KNOWN_CRITICAL:
            raise CertificateRefused(f"the {what} has an unknown critical extension {extension.oid.dotted_string}")


def _check_authority(certificate: x509.Certificate, what: str, *, path_length: int) -> None:
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    if not constraints.ca or constraints.path_length != path_length or not usage.key_cert_sign:
        raise CertificateRefused(f"the {what} may not issue certificates")
    if not isinstance(certificate.public_key(), ec.EllipticCurvePublicKey):
        raise CertificateRefused(f"the {what} has a key of an unexpected kind")


def _read_leaf(leaf: x509.Certificate, mesh_id: MeshId) -> VerifiedPeer:
    extensions = leaf.extensions
    if extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
        raise CertificateRefused("the node certificate is an authority's, not a node's")
    if not extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
        raise CertificateRefused("the node certificate may not sign")
    usages = set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    if not {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH} <= usages:
        raise CertificateRefused("the node certificate is not for both ends of a connection")
    key = leaf.public_key()
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise CertificateRefused("the node certificate has no Ed25519 key")
    peer_id = peer_id_of(key.public_bytes_raw())
    names = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1 or names[0].value != peer_id:
        raise CertificateRefused("the node certificate names another peer than its key belongs to")
    uris = extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.UniformResourceIdentifier
    )
    if len(uris) != 1:
        raise CertificateRefused("the node certificate does not name exactly one mesh")
    said_mesh, grant = _read_uri(uris[0])
    if said_mesh != mesh_id:
        raise CertificateRefused(f"the node is of mesh {said_mesh[:64]}, not of {mesh_id}")
    return VerifiedPeer(peer_id=peer_id, mesh_id=mesh_id, grant=grant, not_after=leaf.not_valid_after_utc)


def certified_mesh_id(leaf: x509.Certificate) -> MeshId:
    """The mesh that a node certificate names; worth something only once its chain was verified.

    Raises: CertificateRefused.
    """
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension) as error:
        raise CertificateRefused(f"a certificate cannot be read: {str(error)[:200]}") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise CertificateRefused("the node certificate does not name exactly one mesh")
    return MeshId(_read_uri(uris[0])[0])


def _uri(mesh_id: MeshId, grant: Grant) -> str:
    return f"{URI_SCHEME}://{urllib.parse.quote(mesh_id, safe='')}/{grant}"


def _read_uri(text: str) -> tuple[str, Grant]:
    scheme, _, rest = text.partition("://")
    mesh, _, grant = rest.partition("/")
    for known in get_args(Grant):
        if scheme == URI_SCHEME and grant == known:
            return urllib.parse.unquote(mesh), known
    raise CertificateRefused(f"the node certificate's name {text[:120]!r} is none that this version knows")


# -- building blocks --------------------------------------------------------------------------------------------


def _issuer_name(peer_id: PeerId) -> str:
    return f"{ISSUER_PREFIX} {peer_id}"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
    issuer_public_key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    life: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(_serial(public_key, issuer_public_key, now))
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_public_key), critical=False)
    )


def _serial(
    public_key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
    issuer_public_key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
) -> int:
    """Unique per issuer, key and time, without chance: RFC 5280 asks for a positive number of at most 20 bytes."""
    text = now.isoformat().encode()
    for key in (public_key, issuer_public_key):
        text += key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")


def _as_authority(builder: x509.CertificateBuilder, *, path_length: int) -> x509.CertificateBuilder:
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True).add_extension(
        _key_usage(key_cert_sign=True, crl_sign=True), critical=True
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _words(span: datetime.timedelta) -> str:
    seconds = span.total_seconds()
    for limit, unit, name in ((120, 1, "seconds"), (7200, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"
