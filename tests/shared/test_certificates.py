"""shared.certificates: the profile, and every way in which a chain is refused."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import certificates
from shared.certificates import (
    csr_public_key,
    fingerprint,
    issue,
    load_der,
    make_csr,
    make_issuer,
    make_root,
    named_mesh_id,
    needs_renewal,
    verify_chain,
)
from shared.errors import CertificateRefused
from shared.ids import MeshId, PeerId
from shared.messages.trust import GRANTS
from shared.peer_ids import peer_id_of

NOW = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
DAY = datetime.timedelta(days=1)
MESH = MeshId("mesh-1")


@dataclass(frozen=True)
class Authority:
    """A mesh's root and one issuer, with their keys."""

    root: x509.Certificate
    root_key: ec.EllipticCurvePrivateKey
    issuer: x509.Certificate
    issuer_key: ec.EllipticCurvePrivateKey


def authority(now: datetime.datetime = NOW) -> Authority:
    root_key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = ec.generate_private_key(ec.SECP256R1())
    root = make_root(root_key, now=now)
    issuer = make_issuer(issuer_key.public_key(), NODE_ID, root, root_key, now=now)
    return Authority(root, root_key, issuer, issuer_key)


NODE_KEY = ed25519.Ed25519PrivateKey.generate()
NODE_ID = peer_id_of(NODE_KEY.public_key().public_bytes_raw())
MINE = authority()


def leaf(of: Authority = MINE, now: datetime.datetime = NOW, mesh_id: MeshId = MESH) -> x509.Certificate:
    return issue(NODE_KEY.public_key(), mesh_id, "member", of.issuer, of.issuer_key, now=now)


def refused(chain: Sequence[x509.Certificate], *, now: datetime.datetime = NOW, banned: Sequence[PeerId] = ()) -> str:
    with pytest.raises(CertificateRefused) as caught:
        verify_chain(chain, MINE.root, mesh_id=MESH, now=now, banned=banned)
    return caught.value.detail


@pytest.mark.parametrize("grant", GRANTS)
def test_a_node_of_the_mesh_is_who_it_says(grant: str) -> None:
    node = issue(NODE_KEY.public_key(), MESH, grant, MINE.issuer, MINE.issuer_key, now=NOW)  # type: ignore[arg-type]
    peer = verify_chain([node, MINE.issuer], MINE.root, mesh_id=MESH, now=NOW)
    assert (peer.peer_id, peer.mesh_id, peer.grant) == (NODE_ID, MESH, grant)
    assert peer.not_after == node.not_valid_after_utc


def test_a_mesh_id_with_any_characters_survives() -> None:
    odd = MeshId("a/b c%2F?#é")
    peer = verify_chain([leaf(mesh_id=odd), MINE.issuer], MINE.root, mesh_id=odd, now=NOW)
    assert peer.mesh_id == odd


def test_chains_that_prove_nothing() -> None:
    other, mine = authority(), leaf()
    assert "0 certificates" in refused([])
    assert "1 certificates" in refused([mine])
    assert "3 certificates" in refused([mine, MINE.issuer, MINE.root])
    assert "not issued by this mesh" in refused([leaf(other), other.issuer])
    # An impostor issuer under the same name.
    assert "not issued by this mesh" in refused([leaf(other), MINE.issuer])
    # A node that issues for others.
    assert "not issued by this mesh" in refused([mine, mine])
    assert "of mesh mesh-2" in refused([leaf(mesh_id=MeshId("mesh-2")), MINE.issuer])
    assert "banned" in refused([mine, MINE.issuer], banned=[NODE_ID])


def test_clocks_are_named_as_the_reason() -> None:
    chain = [leaf(), MINE.issuer]
    assert "clock" in refused(chain, now=NOW - DAY)
    assert "expired 10 days ago" in refused(chain, now=NOW + 40 * DAY)
    verify_chain(chain, MINE.root, mesh_id=MESH, now=NOW - datetime.timedelta(minutes=50))


def custom(
    change: Callable[[x509.CertificateBuilder], x509.CertificateBuilder] = lambda builder: builder,
    *,
    ca: bool = False,
    usages: Sequence[x509.ObjectIdentifier] = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH),
    uris: Sequence[str] = (f"meshd://{MESH}/member",),
    name: str = NODE_ID,
    signs: bool = True,
) -> x509.Certificate:
    """A node certificate of our own issuer with one thing wrong."""
    builder = certificates._builder(
        certificates._name(name),
        MINE.issuer.subject,
        NODE_KEY.public_key(),
        MINE.issuer_key.public_key(),
        NOW,
        DAY,
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    builder = builder.add_extension(
        certificates._key_usage(digital_signature=signs, crl_sign=not signs), critical=True
    )
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return change(builder).sign(MINE.issuer_key, hashes.SHA256())


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (custom(ca=True), "authority"),
        (custom(usages=[ExtendedKeyUsageOID.SERVER_AUTH]), "both ends"),
        (custom(usages=[]), "cannot be read"),
        (custom(uris=[]), "cannot be read"),
        (custom(uris=[f"meshd://{MESH}/member"] * 2), "exactly one"),
        (custom(uris=[f"meshd://{MESH}/owner"]), "knows"),
        (custom(uris=[f"https://{MESH}/member"]), "knows"),
        (custom(name="12D3KooWsomebodyelse"), "another peer"),
        (custom(signs=False), "may not sign"),
        (
            custom(
                lambda builder: builder.add_extension(
                    x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00"), critical=True
                )
            ),
            "critical",
        ),
    ],
)
def test_a_certificate_of_our_own_issuer_with_one_thing_wrong(node: x509.Certificate, words: str) -> None:
    assert words in refused([node, MINE.issuer])


def test_the_control_certificate_passes() -> None:
    verify_chain([custom(), MINE.issuer], MINE.root, mesh_id=MESH, now=NOW)


def test_an_issuer_may_not_make_issuers() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    below = make_issuer(key.public_key(), NODE_ID, MINE.issuer, MINE.issuer_key, now=NOW)
    node = issue(NODE_KEY.public_key(), MESH, "member", below, key, now=NOW)
    assert "not issued by this mesh" in refused([node, below])
    # Signed by the root, but with a root's path length.
    long = certificates._as_authority(
        certificates._builder(
            certificates._name("x"), MINE.root.subject, key.public_key(), MINE.root_key.public_key(), NOW, DAY
        ),
        path_length=1,
    ).sign(MINE.root_key, hashes.SHA256())
    node = issue(NODE_KEY.public_key(), MESH, "member", long, key, now=NOW)
    assert "may not issue" in refused([node, long])


def test_a_signing_request_proves_its_key() -> None:
    der = make_csr(NODE_KEY)
    assert csr_public_key(der).public_bytes_raw() == NODE_KEY.public_key().public_bytes_raw()
    forged = der[:-1] + bytes([der[-1] ^ 1])
    with pytest.raises(CertificateRefused):
        csr_public_key(forged)
    with pytest.raises(CertificateRefused, match="limit"):
        csr_public_key(b"\x30" * 5000)
    rsa_like = x509.CertificateSigningRequestBuilder().subject_name(certificates._name("x"))
    other = rsa_like.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    with pytest.raises(CertificateRefused, match="Ed25519"):
        csr_public_key(other.public_bytes(Encoding.DER))


def test_never_longer_valid_than_the_issuer() -> None:
    late = MINE.issuer.not_valid_after_utc - DAY
    assert leaf(now=late).not_valid_after_utc <= MINE.issuer.not_valid_after_utc


def test_renewal_after_two_thirds() -> None:
    node = leaf()
    assert not needs_renewal(node, now=NOW + 19 * DAY)
    assert needs_renewal(node, now=NOW + 21 * DAY)


def test_a_named_mesh_is_its_name_and_root() -> None:
    other = authority()
    assert named_mesh_id("home", MINE.root) == named_mesh_id("home", MINE.root)
    assert len({named_mesh_id(name, root) for name in ("home", "work") for root in (MINE.root, other.root)}) == 4
    assert fingerprint(MINE.root) != fingerprint(other.root)


CHAIN = (leaf().public_bytes(Encoding.DER), MINE.issuer.public_bytes(Encoding.DER))


@pytest.mark.filterwarnings("ignore")
def test_no_flipped_bit_is_ever_believed() -> None:
    """Each bit of a chain and of a request: refused, or it changed nothing that is signed (BIT STRING padding)."""
    for which, original in enumerate(CHAIN):
        for bit in range(len(original) * 8):
            chain = [load_der(der) for der in CHAIN]
            try:
                chain[which] = load_der(flipped(original, bit))
                verify_chain(chain, MINE.root, mesh_id=MESH, now=NOW)
            except CertificateRefused:
                continue
            assert chain[which].tbs_certificate_bytes == load_der(original).tbs_certificate_bytes
    request = make_csr(NODE_KEY)
    for bit in range(len(request) * 8):
        with contextlib.suppress(CertificateRefused):
            assert csr_public_key(flipped(request, bit)) == NODE_KEY.public_key()


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=600))
def test_random_bytes_are_only_refused(data: bytes) -> None:
    with pytest.raises(CertificateRefused):
        load_der(data)
    with pytest.raises(CertificateRefused):
        csr_public_key(data)


def test_what_a_banned_issuer_signed_is_refused() -> None:
    """A banned issuer could otherwise come back under a new key of its own making."""
    key = ed25519.Ed25519PrivateKey.generate()
    node = issue(key.public_key(), MESH, "member", MINE.issuer, MINE.issuer_key, now=NOW)
    assert verify_chain([node, MINE.issuer], MINE.root, mesh_id=MESH, now=NOW, banned=[PeerId("someone")])
    assert "join again" in refused([node, MINE.issuer], banned=[NODE_ID])


def test_an_issuers_request_proves_a_p256_key() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    der = certificates.make_issuer_csr(key, NODE_ID)
    assert certificates.issuer_csr_public_key(der) == key.public_key()
    with pytest.raises(CertificateRefused, match="P-256"):
        certificates.issuer_csr_public_key(make_csr(NODE_KEY))
    other_curve = certificates.make_issuer_csr(ec.generate_private_key(ec.SECP384R1()), NODE_ID)
    with pytest.raises(CertificateRefused, match="P-256"):
        certificates.issuer_csr_public_key(other_curve)
    with pytest.raises(CertificateRefused, match="Ed25519"):
        csr_public_key(der)


def test_whose_issuer_certificate_it_is() -> None:
    assert certificates.check_issuer(MINE.issuer, MINE.root, now=NOW) == NODE_ID
    for wrong in (leaf(), MINE.root, authority().issuer):
        with pytest.raises(CertificateRefused):
            certificates.check_issuer(wrong, MINE.root, now=NOW)
    with pytest.raises(CertificateRefused, match="expired"):
        certificates.check_issuer(MINE.issuer, MINE.root, now=NOW + 800 * DAY)
