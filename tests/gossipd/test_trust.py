"""services.gossipd.trust: what a node may decide, what follows from it, when it renews, how it is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from services.gossipd.claims import HeldClaim
from services.gossipd.credentials import Credentials, renewed_by_itself, with_chain
from services.gossipd.mesh_identity import MeshIdentity
from services.gossipd.trust import Trust, wanted_identity
from shared.certificates import fingerprint, make_csr
from shared.errors import InviteRefused, MeshError, RequestRefused, StateError
from shared.ids import InviteId, MeshId, PeerId
from shared.messages.trust import CreateInvite, Enrolled, RedeemInvite, RenewCertificate, TrustChanged
from tests.gossipd.test_credentials import DAY, OTHER, OTHER_KEY, UNNAMED, founded, joined
from tests.shared.test_certificates import NODE_ID, NODE_KEY, NOW

UNIX = NOW.timestamp()
NODE_CSR = make_csr(NODE_KEY)
IDENTITY = MeshIdentity(mesh_id=UNNAMED, incarnation=3, peer_id=NODE_ID)
DAY_SECONDS = 86_400.0
THIRD = PeerId("12D3KooWthird")


def token(trust: Trust, invite_id: str = "i1", **more: object) -> bytes:
    request = CreateInvite(**more)  # type: ignore[arg-type]
    return trust.invite(request, InviteId(invite_id), ("/a",), now_unix_seconds=UNIX).token.encode()


def redeem(
    trust: Trust, invite: bytes, key: ed25519.Ed25519PrivateKey = OTHER_KEY, late: float = 0.0
) -> tuple[Enrolled, list[HeldClaim]]:
    request = RedeemInvite(invite=invite, csr_der=make_csr(key))
    return trust.redeem(request, (), now_unix_seconds=UNIX + late)


def hear(trust: Trust, source: Trust, held: list[HeldClaim] | None = None) -> int:
    return sum(len(trust.merge(statement)) for statement in source.statements(held))


def code_of(error: pytest.ExceptionInfo[MeshError]) -> str:
    return error.value.code


def test_a_node_that_was_never_asked_has_no_certificates() -> None:
    trust = Trust()
    assert trust.message(IDENTITY) == TrustChanged(mesh_id=UNNAMED)
    assert trust.mesh_known(IDENTITY, others=False).alone
    assert trust.renewal(NODE_ID, now_unix_seconds=UNIX) == "none"
    with pytest.raises(RequestRefused, match="ann"):
        trust.issuing(["ann"])


def test_what_tunneld_is_told() -> None:
    made = founded("home")
    trust = Trust(made)
    said = trust.message(IDENTITY)
    assert (said.mesh_id, said.mesh_name, said.issuer) == (made.mesh_id, "home", True)
    assert len(said.chain_der) == 2
    trust.ban(THIRD, lift=False)
    trust.trust_guest(OTHER)
    assert (trust.message(IDENTITY).banned, trust.message(IDENTITY).trusted) == ((THIRD,), (OTHER,))
    trust.ban(THIRD, lift=True)
    assert trust.message(IDENTITY).banned == ()
    member = Trust(joined(made)).message(IDENTITY)
    assert not member.issuer


def test_whoever_admitted_somebody_is_not_alone() -> None:
    trust = Trust(founded())
    assert trust.mesh_known(IDENTITY, others=False).alone
    assert not trust.mesh_known(IDENTITY, others=True).alone
    redeem(trust, token(trust))
    assert not trust.mesh_known(IDENTITY, others=False).alone
    assert not Trust(joined(founded())).mesh_known(IDENTITY, others=False).alone


def test_a_redemption_is_known_to_every_issuer() -> None:
    creator = founded()
    one, two = Trust(creator), Trust(joined(creator, "issuer"))
    invite = token(one)
    _, made = redeem(one, invite)
    assert len(made) == 1
    assert redeem(one, invite)[1] == [], "the same key again counts nothing"
    assert hear(two, one, made) == 1
    with pytest.raises(InviteRefused) as caught:
        redeem(two, invite, ed25519.Ed25519PrivateKey.generate())
    assert code_of(caught) == "invite_used_up"


def test_a_revoked_invite_is_refused_by_every_issuer() -> None:
    creator = founded()
    one, two = Trust(creator), Trust(joined(creator, "issuer"))
    invite = token(one, uses=9)
    hear(one, two, two.revoke(InviteId("i1"), now_unix_seconds=UNIX))
    for trust in (one, two):
        with pytest.raises(InviteRefused) as caught:
            redeem(trust, invite)
        assert code_of(caught) == "invite_revoked"
    assert one.invites(now_unix_seconds=UNIX)[0].revoked
    one.revoke(InviteId("i1"), now_unix_seconds=UNIX)
    hear(two, one)
    assert two.revoke(InviteId("i1"), now_unix_seconds=UNIX) == [], "saying it again is no contradiction"


@pytest.mark.parametrize("wrong", [b"", b"\xff\xfe", b"meshd1.AAAA", b"x" * 9000])
def test_what_is_no_token_is_refused(wrong: bytes) -> None:
    with pytest.raises(InviteRefused):
        redeem(Trust(founded()), wrong)


def test_tampered_expired_and_foreign_tokens_are_refused() -> None:
    trust = Trust(founded())
    invite = token(trust)
    for at in range(8, len(invite), 41):
        changed = bytearray(invite)
        changed[at] = ord("A") if changed[at] != ord("A") else ord("B")
        with pytest.raises(InviteRefused):
            redeem(trust, bytes(changed))
    with pytest.raises(InviteRefused) as caught:
        redeem(trust, invite, late=2 * DAY_SECONDS)
    assert code_of(caught) == "invite_expired"
    with pytest.raises(InviteRefused) as caught:
        redeem(Trust(founded()), invite)
    assert code_of(caught) == "invite_wrong_mesh"
    assert not trust.admitted_others


def test_no_issuer_bans_the_creator_and_nobody_itself() -> None:
    creator = founded()
    one, two = Trust(creator), Trust(joined(creator, "issuer"))
    hear(two, one)
    with pytest.raises(RequestRefused, match="made this mesh"):
        two.ban(NODE_ID, lift=False)
    with pytest.raises(RequestRefused, match="leave"):
        one.ban(NODE_ID, lift=False)
    hear(two, one, one.ban(OTHER, lift=False))
    with pytest.raises(RequestRefused, match="banned"):
        two.trust_guest(THIRD)


def test_a_member_decides_nothing() -> None:
    trust = Trust(joined(founded()))
    for act in (
        lambda: trust.ban(THIRD, lift=False),
        lambda: trust.trust_guest(THIRD),
        lambda: trust.revoke(InviteId("i"), now_unix_seconds=UNIX),
        lambda: trust.invite(CreateInvite(), InviteId("i"), ("/a",), now_unix_seconds=UNIX),
        lambda: redeem(trust, b"x"),
    ):
        with pytest.raises(RequestRefused) as caught:
            act()
        assert code_of(caught) == "not_an_issuer"
        assert "member" in caught.value.detail


def test_a_banned_key_is_not_admitted_again() -> None:
    trust = Trust(founded())
    invite = token(trust)
    trust.ban(OTHER, lift=False)
    with pytest.raises(InviteRefused) as caught:
        redeem(trust, invite)
    assert code_of(caught) == "banned"


def test_when_a_certificate_is_renewed_and_by_whom() -> None:
    """5. ... It is renewed after two thirds of its life."""
    creator = founded()
    late = UNIX + 21 * DAY_SECONDS
    assert Trust(creator).renewal(NODE_ID, now_unix_seconds=UNIX) == "none"
    assert Trust(creator).renewal(NODE_ID, now_unix_seconds=late) == "itself"
    assert Trust(creator).renewal(OTHER, now_unix_seconds=UNIX) == "itself", "its key was replaced"
    member = Trust(joined(creator))
    assert member.renewal(OTHER, now_unix_seconds=UNIX) == "none"
    assert member.renewal(OTHER, now_unix_seconds=late) == "peer"
    issuer = Trust(joined(creator, "issuer"))
    assert issuer.renewal(OTHER, now_unix_seconds=late) == "itself"
    assert issuer.renewal(OTHER, now_unix_seconds=UNIX + 500 * DAY_SECONDS) == "peer", "its issuer certificate"
    without = Trust(replace(joined(creator, "issuer"), issuer=None))
    assert without.renewal(OTHER, now_unix_seconds=UNIX) == "peer", "it may admit others, but cannot yet"


def test_a_member_is_renewed_for_its_own_key_only() -> None:
    creator = founded()
    trust, member = Trust(creator), joined(creator)
    late = UNIX + 21 * DAY_SECONDS
    answer = trust.renew(OTHER, "member", RenewCertificate(csr_der=make_csr(OTHER_KEY)), now_unix_seconds=late)
    renewed = with_chain(member, answer.chain_der, answer.issuer_der, None, OTHER, now=NOW + 21 * DAY)
    assert Trust(renewed).renewal(OTHER, now_unix_seconds=late) == "none"
    assert trust.renew(THIRD, "member", RenewCertificate(csr_der=NODE_CSR), now_unix_seconds=late).reason
    refused = Trust(member).renew(OTHER, "member", RenewCertificate(csr_der=NODE_CSR), now_unix_seconds=late)
    assert (refused.chain_der, "member" in refused.reason) == ((), True)


def test_only_what_is_better_replaces_a_certificate() -> None:
    creator = founded()
    member, issuer = joined(creator), joined(creator, "issuer")
    late = UNIX + 21 * DAY_SECONDS
    assert not Trust(member).improves(joined(creator), OTHER, now_unix_seconds=UNIX)
    assert Trust(member).improves(joined(creator), OTHER, now_unix_seconds=late)
    assert Trust(member).improves(joined(creator), THIRD, now_unix_seconds=UNIX), "its key was replaced"
    without = replace(issuer, issuer=None)
    assert Trust(without).improves(issuer, OTHER, now_unix_seconds=UNIX)
    assert not Trust(without).improves(without, OTHER, now_unix_seconds=UNIX), "still none: not written each minute"


def test_decisions_survive_a_restart_and_a_renewal() -> None:
    creator = founded()
    trust = Trust(creator)
    redeem(trust, token(trust, uses=2))
    trust.ban(THIRD, lift=False)
    for again in (Trust(creator, trust.to_json(), "x"), trust):
        again.adopt(renewed_by_itself(creator, NODE_CSR, now=NOW + 21 * DAY))
        assert again.message(IDENTITY).banned == (THIRD,)
        assert again.invites(now_unix_seconds=UNIX)[0].used == 1
        assert again.admitted_others


def test_another_mesh_starts_without_the_decisions_of_the_former() -> None:
    trust = Trust(founded())
    trust.ban(THIRD, lift=False)
    redeem(trust, token(trust))
    trust.adopt(founded("home"))
    assert trust.message(IDENTITY).banned == ()
    assert not trust.admitted_others
    kept = Trust(founded("other"), trust.to_json(), "x")
    assert kept.invites(now_unix_seconds=UNIX) == ()


def test_damaged_decisions_are_refused_with_the_way_out() -> None:
    """5. An issuer that forgot its bans must not go on as if there were none."""
    creator = founded()
    trust = Trust(creator)
    trust.ban(THIRD, lift=False)
    text = trust.to_json()
    for length in range(1, len(text) - 1, 61):
        with pytest.raises(StateError, match="restore it from a backup"):
            Trust(creator, text[:length], "invites.json")


def test_nothing_kept_or_shown_can_redeem_an_invite() -> None:
    """TRAPS 6: the token never shows."""
    trust = Trust(founded())
    secret = token(trust).decode().removeprefix("meshd1.")
    shown = trust.to_json() + repr(trust.message(IDENTITY)) + repr(trust.invites(now_unix_seconds=UNIX))
    assert secret[40:80] not in shown


def test_after_a_crash_between_two_files_the_credentials_count() -> None:
    made = founded("home")
    identity = wanted_identity(IDENTITY, made)
    assert (identity.mesh_id, identity.mesh_name, identity.incarnation) == (made.mesh_id, "home", 3)
    assert wanted_identity(IDENTITY, Credentials()) == IDENTITY
    assert fingerprint(made.root) == Trust(made).root_fingerprint if made.root else False
    assert wanted_identity(IDENTITY, Credentials(mesh_id=MeshId("m"))).mesh_id == "m"
