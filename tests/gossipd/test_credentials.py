"""services.gossipd.credentials: one document, whole or refused; what a node keeps when it founds, joins, renews."""

from __future__ import annotations

import datetime
import json
import uuid
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding

from services.gossipd.authority import Authority
from services.gossipd.credentials import Credentials, admitted, found_mesh, renewed_by_itself
from shared.certificates import fingerprint, make_csr, make_issuer, make_issuer_csr, named_mesh_id, needs_renewal
from shared.errors import CertificateRefused, StateError
from shared.ids import InviteId, MeshId, PeerId
from shared.messages.trust import Enrolled, Grant, PeerAddresses
from shared.peer_ids import peer_id_of
from tests.shared.test_certificates import NODE_ID, NODE_KEY, NOW, authority

UNNAMED = MeshId(str(uuid.UUID(int=7, version=4)))
OTHER_KEY = ed25519.Ed25519PrivateKey.generate()
OTHER = peer_id_of(OTHER_KEY.public_key().public_bytes_raw())
DAY = datetime.timedelta(days=1)


def p256() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def founded(name: str = "") -> Credentials:
    return found_mesh(p256(), p256(), make_csr(NODE_KEY), mesh_id=UNNAMED, mesh_name=name, now=NOW)


def enrolled_at(
    creator: Credentials, grant: Grant = "member", issuer_key: ec.EllipticCurvePrivateKey | None = None
) -> Enrolled:
    assert creator.root
    assert creator.issuer
    issuing = Authority(creator.mesh_id, creator.mesh_name, creator.root, creator.issuer, NODE_ID, creator.root_key)
    signed = issuing.invite(
        InviteId("i"), grant=grant, uses=1, expires_seconds=60, addresses=("/a",), now_unix_seconds=NOW.timestamp()
    )
    return issuing.redeem(
        signed,
        make_csr(OTHER_KEY),
        peers=(PeerAddresses(peer_id=NODE_ID, addresses=("/a",)), PeerAddresses(peer_id=OTHER)),
        observed_address="",
        now_unix_seconds=NOW.timestamp(),
        issuer_csr_der=make_issuer_csr(issuer_key, OTHER) if issuer_key else b"",
    )


def joined(creator: Credentials, grant: Grant = "member") -> Credentials:
    assert creator.root
    key = p256()
    return admitted(enrolled_at(creator, grant, key), key, OTHER, fingerprint(creator.root), now=NOW)


def test_an_unnamed_mesh_keeps_its_id_a_named_one_has_that_of_name_and_key() -> None:
    assert founded().mesh_id == UNNAMED
    named = founded("home")
    assert named.root
    assert named.mesh_id == named_mesh_id("home", named.root)
    assert named.grant() == "issuer"


@pytest.mark.parametrize("made", [founded("home"), joined(founded()), joined(founded(), "issuer"), Credentials()])
def test_what_is_written_is_read(made: Credentials) -> None:
    again = Credentials.from_json(made.to_json(), "x")
    assert again.to_json() == made.to_json()
    assert again.chain == made.chain
    assert (again.root_key is None) == (made.root_key is None)


def test_a_member_keeps_no_authority() -> None:
    made = joined(founded())
    assert (made.root_key, made.issuer, made.grant()) == (None, None, "member")
    assert [peer.peer_id for peer in made.bootstrap] == [NODE_ID]


def test_an_issuer_gets_its_own_certificate() -> None:
    made = joined(founded(), "issuer")
    assert made.issuer is not None
    assert made.root_key is None


def test_a_file_cut_off_anywhere_is_refused_without_repeating_a_key() -> None:
    text = founded("home").to_json()
    for length in range(0, len(text) - 1, 97):
        with pytest.raises(StateError, match=r"authority\.json is damaged") as caught:
            Credentials.from_json(text[:length], "authority.json")
        assert "BEGIN" not in caught.value.detail
        assert caught.value.__cause__ is None


def test_parts_that_do_not_belong_together_are_refused() -> None:
    one, two = json.loads(founded().to_json()), json.loads(founded().to_json())
    for name in ("root", "root_key", "issuer", "issuer_key", "chain"):
        for wrong in (two[name], "", "no pem", None, 5):
            if wrong or name not in ("root_key", "chain"):
                with pytest.raises(StateError):
                    Credentials.from_json(json.dumps({**one, name: wrong}), "x")
    with pytest.raises(StateError, match="format"):
        Credentials.from_json(json.dumps({**one, "format": 2}), "x")


def test_another_root_than_the_tokens_is_refused() -> None:
    creator = founded()
    with pytest.raises(CertificateRefused, match="token names"):
        admitted(enrolled_at(creator), None, OTHER, fingerprint(authority().root), now=NOW)


def test_a_mesh_under_a_name_that_is_not_its_own_is_refused() -> None:
    creator = founded("home")
    assert creator.root
    assert joined(creator).mesh_name == "home"
    with pytest.raises(CertificateRefused, match="called work"):
        admitted(replace(enrolled_at(creator), mesh_name="work"), None, OTHER, fingerprint(creator.root), now=NOW)


def test_a_certificate_for_somebody_else_is_refused() -> None:
    creator = founded()
    assert creator.root
    enrolled = enrolled_at(creator)
    with pytest.raises(CertificateRefused, match="not for this node"):
        admitted(enrolled, None, NODE_ID, fingerprint(creator.root), now=NOW)
    with pytest.raises(CertificateRefused):
        admitted(replace(enrolled, mesh_id=MeshId("m")), None, OTHER, fingerprint(creator.root), now=NOW)
    with pytest.raises(CertificateRefused):
        admitted(replace(enrolled, chain_der=()), None, PeerId("x"), fingerprint(creator.root), now=NOW)


def test_an_issuer_renews_itself() -> None:
    creator = founded()
    later = NOW + 21 * DAY
    assert creator.leaf
    assert needs_renewal(creator.leaf, now=later)
    renewed = renewed_by_itself(creator, make_csr(NODE_KEY), now=later)
    assert renewed.leaf
    assert not needs_renewal(renewed.leaf, now=later)
    assert renewed.grant() == "issuer"
    assert renewed.root == creator.root
    other = renewed_by_itself(joined(creator, "issuer"), make_csr(OTHER_KEY), now=later)
    assert other.grant() == "issuer"
    with pytest.raises(CertificateRefused, match="only an issuer"):
        renewed_by_itself(joined(creator), make_csr(OTHER_KEY), now=later)


def test_an_issuer_certificate_for_somebody_else_is_refused() -> None:
    creator, key = founded(), p256()
    assert creator.root
    assert creator.root_key
    wrong = make_issuer(key.public_key(), NODE_ID, creator.root, creator.root_key, now=NOW).public_bytes(Encoding.DER)
    enrolled = replace(enrolled_at(creator, "issuer", key), issuer_der=wrong)
    with pytest.raises(CertificateRefused, match="another node"):
        admitted(enrolled, key, OTHER, fingerprint(creator.root), now=NOW)
