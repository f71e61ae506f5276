"""services.gossipd.claims against docs/spec/trust.md: bans and what else issuers decide, merged from anywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gossipd.claims import ROOT, STATEMENT_CLAIMS, VERSION_LIMIT, Claim, ClaimKind, Claims, Signer
from shared import codec
from shared.certificates import make_issuer
from shared.errors import CertificateRefused, SchemaError
from shared.ids import InviteId, MeshId, PeerId
from shared.messages.trust import SignedClaim, TrustStatement
from tests.shared.test_certificates import MESH, MINE, NOW, authority, leaf

CREATOR = Signer(ROOT, MINE.root_key)
ANN, BOB, EVE = PeerId("ann"), PeerId("bob"), PeerId("eve")


def issuer(name: PeerId) -> Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = make_issuer(key.public_key(), name, MINE.root, MINE.root_key, now=NOW)
    return Signer(name, key, certificate.public_bytes(Encoding.DER))


OF_ANN, OF_BOB = issuer(ANN), issuer(BOB)


def claims() -> Claims:
    return Claims(MESH, MINE.root)


def tell(source: Claims, target: Claims) -> int:
    return sum(len(target.merge(statement)) for statement in source.statements())


def test_a_ban_travels_and_is_taken_once() -> None:
    one, two = claims(), claims()
    one.decide("banned", EVE, True, OF_ANN)
    assert (tell(one, two), tell(one, two)) == (1, 0)
    assert two.banned == {EVE}
    assert one.decide("banned", EVE, True, OF_ANN) is None


def test_a_ban_can_be_lifted_and_made_again_by_any_issuer() -> None:
    one, two = claims(), claims()
    one.decide("banned", EVE, True, OF_ANN)
    tell(one, two)
    two.decide("banned", EVE, False, OF_BOB)
    tell(two, one)
    assert one.banned == two.banned == frozenset()
    one.decide("banned", EVE, True, OF_ANN)
    tell(one, two)
    assert one.banned == two.banned == {EVE}


def test_the_creator_outranks_every_version() -> None:
    one = claims()
    one.decide("banned", ANN, False, CREATOR)
    for _ in range(3):
        one.decide("banned", ANN, True, OF_BOB)
        one.decide("banned", ANN, False, OF_BOB)
    one.decide("banned", ANN, True, OF_BOB)
    assert one.banned == frozenset()
    assert one.decided_by_root("banned", ANN)
    assert not one.decided_by_root("banned", BOB)


def test_a_banned_issuer_cannot_lift_its_own_ban_nor_grant_trust() -> None:
    one, other = claims(), claims()
    one.decide("trusted", EVE, True, OF_ANN)
    one.decide("banned", ANN, True, OF_BOB)
    assert one.banned == {ANN}
    assert one.trusted == frozenset()
    other.decide("banned", ANN, True, OF_BOB)
    other.decide("banned", ANN, False, OF_ANN)
    assert tell(other, one) == 0
    assert one.refused["an issuer decides about itself"] == 1


def test_the_creators_ban_undoes_what_the_banned_issuer_decided() -> None:
    one = claims()
    one.decide("banned", EVE, True, OF_ANN)
    one.decide("redeemed", "i1/eve", True, OF_ANN)
    one.decide("banned", ANN, True, CREATOR)
    assert one.banned == {ANN}
    assert one.redeemed == {InviteId("i1"): {EVE}}, "what takes something away still counts"


def test_redemptions_and_revocations() -> None:
    one = claims()
    one.decide("redeemed", "i1/bob", True, OF_ANN, until_unix_seconds=100)
    one.decide("redeemed", "i1/eve", True, OF_BOB, until_unix_seconds=100)
    one.decide("revoked", "i1", True, OF_BOB)
    assert one.redeemed == {InviteId("i1"): {BOB, EVE}}
    assert one.revoked == {InviteId("i1")}
    assert not one.forget_old(now_unix_seconds=100)
    assert one.forget_old(now_unix_seconds=101)
    assert one.redeemed == {}
    assert one.revoked == {InviteId("i1")}


def test_any_order_gives_the_same_view() -> None:
    made = claims()
    history = [
        made.decide("banned", EVE, True, OF_ANN),
        made.decide("banned", EVE, False, OF_BOB),
        made.decide("banned", BOB, True, OF_ANN),
        made.decide("trusted", EVE, True, OF_BOB),
        made.decide("banned", ANN, False, CREATOR),
        made.decide("banned", ANN, True, OF_BOB),
    ]
    views = set()
    for order in itertools.permutations(held for held in history if held is not None):
        other = claims()
        for held in order:
            for statement in made.statements([held]):
                other.merge(statement)
        views.add((other.banned, other.trusted))
    assert views == {(made.banned, made.trusted)}


def test_another_mesh_is_refused() -> None:
    foreign = Claims(MeshId("mesh-2"), MINE.root)
    foreign.decide("banned", EVE, True, OF_ANN)
    mine = claims()
    with pytest.raises(CertificateRefused, match="of mesh mesh-2"):
        tell(foreign, mine)
    (statement,) = foreign.statements()
    assert mine.merge(replace(statement, mesh_id=MESH)) == ()
    assert mine.banned == frozenset()
    assert sum(mine.refused.values()) == 2


def test_forged_claims_are_refused() -> None:
    mine, made = claims(), claims()
    made.decide("banned", EVE, True, OF_ANN)
    (statement,) = made.statements()
    (signed,) = statement.claims
    other_root = authority()
    forgeries = [
        replace(statement, claims=(replace(signed, body=Claim(MESH, "banned", "bob", 1, True).to_body()),)),
        replace(statement, claims=(replace(signed, signature=b"x"),)),
        replace(statement, claims=(replace(signed, issuer=-1),)),
        replace(statement, claims=(replace(signed, issuer=7),)),
        replace(statement, issuers=(other_root.issuer.public_bytes(Encoding.DER),)),
        replace(statement, issuers=(leaf().public_bytes(Encoding.DER),)),
        replace(statement, issuers=(b"no certificate",)),
    ]
    for forged in forgeries:
        assert mine.merge(forged) == ()
    assert sum(mine.refused.values()) == len(forgeries)
    assert mine.banned == frozenset()


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_are_a_claim_or_refused(data: bytes) -> None:
    try:
        Claim.from_body(data)
    except SchemaError:
        pass
    claims().merge(TrustStatement(mesh_id=MESH, claims=(SignedClaim(body=data, signature=data),)))


@pytest.mark.parametrize("version", [0, -1, VERSION_LIMIT + 1])
def test_versions_out_of_range_are_no_claim(version: int) -> None:
    with pytest.raises(SchemaError):
        Claim.from_body(codec.pack([MESH, "banned", "eve", version, True, 0]))


def test_many_claims_go_in_several_messages() -> None:
    one, two = claims(), claims()
    count = STATEMENT_CLAIMS + 10
    for number in range(count):
        one.decide("redeemed", f"i/{number}", True, OF_ANN)
    assert len(one.statements()) == 2
    assert tell(one, two) == count == len(two)


def test_two_words_of_one_issuer_under_one_version_end_in_one_view() -> None:
    """Its state was restored from a backup in between."""
    one, two = claims(), claims()
    one.decide("banned", EVE, True, OF_ANN)
    two.decide("banned", EVE, False, OF_ANN)
    assert tell(one, two) + tell(two, one) == 1
    assert one.banned == two.banned


SIGNERS = (CREATOR, OF_ANN, OF_BOB)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(SIGNERS),
        st.sampled_from(["banned", "trusted", "revoked"]),
        st.sampled_from([ANN, BOB, EVE]),
        st.booleans(),
        st.sampled_from([None, 0, 1, 2]),
    ),
    max_size=14,
)


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_whatever_was_decided_where_all_come_to_the_same_view(
    steps: list[tuple[int, Signer, ClaimKind, PeerId, bool, int | None]],
) -> None:
    """9. Merging is idempotent and in any order; replicas hear of each other now and then, at the end of everything."""
    replicas = [claims(), claims(), claims()]
    for at, signer, kind, subject, value, told in steps:
        if signer.by != subject:
            replicas[at].decide(kind, subject, value, signer)
        if told is not None:
            tell(replicas[at], replicas[told])
    for _ in range(2):
        for one, two in itertools.permutations(replicas, 2):
            tell(one, two)
    views = {(held.banned, held.trusted, held.revoked, len(held)) for held in replicas}
    assert len(views) == 1
