"""services.gossipd.authority: whom an issuer invites and admits (docs/spec/invites.md)."""

from __future__ import annotations

import datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from services.gossipd.authority import KEPT_SECONDS, Authority, Issuer
from shared.certificates import check_issuer, load_der, make_csr, make_issuer_csr, verify_chain
from shared.errors import CertificateRefused, InviteRefused, StateError
from shared.ids import InviteId, PeerId
from shared.invites import SignedInvite, parse_token
from shared.messages.trust import Enrolled, RenewCertificate
from shared.peer_ids import peer_id_of
from tests.shared.test_certificates import MESH, MINE, NODE_ID, NOW

NOW_UNIX = NOW.timestamp()
ID = InviteId("invite-1")
ADDRESSES = ("/ip4/127.0.0.1/udp/9340/quic-v1",)


def an_authority() -> Authority:
    return Authority(MESH, "home", MINE.root, Issuer(MINE.issuer, MINE.issuer_key), NODE_ID)


def minted(authority: Authority, uses: int = 1, invite_id: InviteId = ID) -> SignedInvite:
    return authority.invite(
        invite_id,
        grant="member",
        uses=uses,
        expires_seconds=3600.0,
        addresses=ADDRESSES,
        now_unix_seconds=NOW_UNIX,
    )


def redeem(
    authority: Authority, signed: SignedInvite, key: ed25519.Ed25519PrivateKey, late_seconds: float = 0.0
) -> Enrolled:
    return authority.redeem(
        signed, make_csr(key), peers=(), observed_address="", now_unix_seconds=NOW_UNIX + late_seconds
    )


def refusal(authority: Authority, signed: SignedInvite, key: ed25519.Ed25519PrivateKey, late: float = 0.0) -> str:
    with pytest.raises(InviteRefused) as caught:
        redeem(authority, signed, key, late)
    return caught.value.code


def new_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def id_of(key: ed25519.Ed25519PrivateKey) -> PeerId:
    return peer_id_of(key.public_key().public_bytes_raw())


def test_who_holds_the_token_gets_a_certificate_that_verifies() -> None:
    authority, key = an_authority(), new_key()
    enrolled = redeem(authority, parse_token(minted(authority).token), key)
    chain = [load_der(der) for der in enrolled.chain_der]
    peer = verify_chain(chain, load_der(enrolled.root_der), mesh_id=MESH, now=NOW)
    assert (peer.peer_id, peer.grant) == (id_of(key), "member")


def test_uses_are_counted_by_key() -> None:
    """5. ... the one that made it counts its uses. The same key enrolling again is not counted twice."""
    authority, one, two, three = an_authority(), new_key(), new_key(), new_key()
    signed = minted(authority, uses=2)
    for key in (one, one, two, one, two):
        redeem(authority, signed, key)
    assert refusal(authority, signed, three) == "invite_used_up"
    (view,) = authority.invites(now_unix_seconds=NOW_UNIX)
    assert (view.used, view.uses) == (2, 2)


def test_what_others_redeemed_counts_once_and_in_any_order() -> None:
    authority, other = an_authority(), an_authority()
    signed = minted(authority)
    key = new_key()
    redeem(other, signed, key)
    for _ in range(2):
        authority.merge(other.redemptions())
    assert refusal(authority, signed, new_key()) == "invite_used_up"
    redeem(authority, signed, key)


def test_revoked_expired_banned() -> None:
    """4. ... each refusal has a code of its own."""
    authority, key = an_authority(), new_key()
    signed = minted(authority, uses=5)
    assert refusal(authority, signed, key, late=3601.0) == "invite_expired"
    authority.banned.add(id_of(key))
    assert refusal(authority, signed, key) == "banned"
    authority.revoke(ID)
    assert refusal(authority, signed, new_key()) == "invite_revoked"
    other = an_authority()
    other.merge({}, revoked=[ID])
    assert refusal(other, signed, new_key()) == "invite_revoked"


def test_a_refused_redemption_counts_nothing() -> None:
    authority = an_authority()
    signed = minted(authority)
    with pytest.raises(CertificateRefused):
        authority.redeem(signed, b"no csr", peers=(), observed_address="", now_unix_seconds=NOW_UNIX)
    refusal(authority, signed, new_key(), late=4000.0)
    assert authority.invites(now_unix_seconds=NOW_UNIX)[0].used == 0


@pytest.mark.parametrize(
    "terms",
    [{"uses": 0}, {"expires_seconds": 0.0}, {"expires_seconds": 1e12}, {"expires_seconds": float("nan")}],
)
def test_terms_that_make_no_sense(terms: dict[str, object]) -> None:
    how: dict[str, object] = {"uses": 1, "expires_seconds": 60.0, **terms}
    with pytest.raises(InviteRefused) as caught:
        an_authority().invite(ID, grant="member", addresses=ADDRESSES, now_unix_seconds=NOW_UNIX, **how)  # type: ignore[arg-type]
    assert caught.value.code == "bad_terms"


def test_a_node_that_nobody_can_reach_says_so_before_it_invites() -> None:
    with pytest.raises(InviteRefused, match="doctor"):
        an_authority().invite(ID, grant="member", uses=1, expires_seconds=60.0, addresses=(), now_unix_seconds=NOW_UNIX)


def test_everything_survives_a_restart_and_no_token_is_kept() -> None:
    authority, key = an_authority(), new_key()
    signed = minted(authority, uses=3)
    redeem(authority, signed, key)
    authority.revoke(InviteId("other"))
    authority.banned.add(PeerId("bad"))
    text = authority.to_json()
    assert signed.token[20:60] not in text
    assert signed.signature.hex() not in text
    again = an_authority()
    again.restore(text, "issuer.json")
    assert again.to_json() == text
    assert again.invites(now_unix_seconds=NOW_UNIX) == authority.invites(now_unix_seconds=NOW_UNIX)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"minted":{"a":{"grant":"king"}},"redeemed":{},"revoked":[],"banned":[]}']
)
def test_a_damaged_file_is_never_taken_for_an_empty_one(text: str) -> None:
    with pytest.raises(StateError, match=r"issuer\.json"):
        an_authority().restore(text, "issuer.json")


def test_old_ones_are_forgotten() -> None:
    authority = an_authority()
    minted(authority)
    authority.forget_old(now_unix_seconds=NOW_UNIX + 3600 + KEPT_SECONDS)
    assert len(authority.invites(now_unix_seconds=NOW_UNIX)) == 1
    authority.forget_old(now_unix_seconds=NOW_UNIX + 3601 + KEPT_SECONDS)
    assert authority.invites(now_unix_seconds=NOW_UNIX) == ()


def creator() -> Authority:
    return Authority(MESH, "home", MINE.root, Issuer(MINE.issuer, MINE.issuer_key), NODE_ID, MINE.root_key)


def issuers_invite(authority: Authority) -> SignedInvite:
    return authority.invite(
        ID, grant="issuer", uses=1, expires_seconds=60.0, addresses=ADDRESSES, now_unix_seconds=NOW_UNIX
    )


def test_the_creator_makes_issuers() -> None:
    authority, key, issuer_key = creator(), new_key(), ec.generate_private_key(ec.SECP256R1())
    enrolled = authority.redeem(
        issuers_invite(authority),
        make_csr(key),
        peers=(),
        observed_address="",
        now_unix_seconds=NOW_UNIX,
        issuer_csr_der=make_issuer_csr(issuer_key, id_of(key)),
    )
    assert enrolled.grant == "issuer"
    certificate = load_der(enrolled.issuer_der)
    assert check_issuer(certificate, MINE.root, now=NOW) == id_of(key)
    assert certificate.public_key() == issuer_key.public_key()


def test_other_issuers_make_none() -> None:
    with pytest.raises(InviteRefused, match="node that made this mesh"):
        issuers_invite(an_authority())
    signed = issuers_invite(creator())
    assert refusal(an_authority(), signed, new_key()) == "not_the_creator"


def test_no_issuers_certificate_for_a_member() -> None:
    authority, key = creator(), new_key()
    asked = make_issuer_csr(ec.generate_private_key(ec.SECP256R1()), id_of(key))
    enrolled = authority.redeem(
        minted(authority),
        make_csr(key),
        peers=(),
        observed_address="",
        now_unix_seconds=NOW_UNIX,
        issuer_csr_der=asked,
    )
    assert (enrolled.grant, enrolled.issuer_der) == ("member", b"")
    renewed = authority.renew(
        id_of(key),
        "member",
        RenewCertificate(csr_der=make_csr(key), issuer_csr_der=asked),
        now_unix_seconds=NOW_UNIX,
    )
    assert renewed.issuer_der == b""


def test_a_joiner_may_want_less() -> None:
    authority, key = creator(), new_key()
    enrolled = authority.redeem(
        issuers_invite(authority),
        make_csr(key),
        peers=(),
        observed_address="",
        now_unix_seconds=NOW_UNIX,
        client=True,
        issuer_csr_der=make_issuer_csr(ec.generate_private_key(ec.SECP256R1()), id_of(key)),
    )
    assert (enrolled.grant, enrolled.issuer_der) == ("client", b"")


def test_renewal_is_for_the_connections_own_key() -> None:
    authority, key = an_authority(), new_key()
    late = NOW_UNIX + 20 * 86_400
    renewed = authority.renew(id_of(key), "guest", RenewCertificate(csr_der=make_csr(key)), now_unix_seconds=late)
    chain = [load_der(der) for der in renewed.chain_der]
    peer = verify_chain(chain, MINE.root, mesh_id=MESH, now=NOW + datetime.timedelta(days=45))
    assert (peer.peer_id, peer.grant) == (id_of(key), "guest")
    with pytest.raises(CertificateRefused, match="own certificate"):
        authority.renew(id_of(key), "member", RenewCertificate(csr_der=make_csr(new_key())), now_unix_seconds=late)
    authority.banned.add(id_of(key))
    with pytest.raises(InviteRefused, match="banned"):
        authority.renew(id_of(key), "member", RenewCertificate(csr_der=make_csr(key)), now_unix_seconds=late)
