"""shared.invites against docs/spec/invites.md."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import codec
from shared.certificates import fingerprint
from shared.errors import InviteRefused
from shared.ids import InviteId, MeshId
from shared.invites import (
    PREFIX,
    Invite,
    SignedInvite,
    check_invite,
    mint,
    parse_invite,
    parse_token,
    signature_holds,
)
from tests.shared.test_certificates import MESH, MINE, authority, leaf

EXPIRES = 2_000_000_000
INVITE = Invite(
    invite_id=InviteId("k3v9"),
    mesh_id=MESH,
    mesh_name="home",
    root_fingerprint=fingerprint(MINE.root),
    addresses=("/ip4/127.0.0.1/udp/9340/quic-v1", "/ip6/::1/tcp/9340/tls"),
    grant="member",
    expires_unix_seconds=EXPIRES,
    uses=2,
    issuer_der=MINE.issuer.public_bytes(Encoding.DER),
)
SIGNED = mint(INVITE, MINE.issuer_key)


def check(signed: SignedInvite, **changed: object) -> str:
    """The code of the refusal; empty when it is honoured."""
    how: dict[str, object] = {"mesh_id": MESH, "now_unix_seconds": EXPIRES - 10.0, **changed}
    try:
        check_invite(signed, MINE.root, **how)  # type: ignore[arg-type]
    except InviteRefused as error:
        return error.code
    return ""


def test_a_token_says_what_was_minted() -> None:
    """1. A token names mesh, root fingerprint, addresses, grant, expiry and number of uses."""
    parsed = parse_token(SIGNED.token)
    assert parsed.invite == INVITE
    assert parsed == SIGNED
    assert check(parsed) == ""
    assert len(SIGNED.token) < 1500


def test_the_bearer_can_tell_that_it_was_changed_but_not_by_whom_it_was_made() -> None:
    assert signature_holds(SIGNED)
    assert not signature_holds(dataclasses.replace(SIGNED, body=SIGNED.body + b"\0"))
    assert not signature_holds(dataclasses.replace(SIGNED, signature=b"nonsense"))
    no_issuer = dataclasses.replace(INVITE, issuer_der=b"nonsense")
    assert not signature_holds(mint(no_issuer, MINE.issuer_key))
    other = authority().issuer.public_bytes(Encoding.DER)
    assert not signature_holds(mint(dataclasses.replace(INVITE, issuer_der=other), MINE.issuer_key))


def test_wrapped_in_a_mail() -> None:
    """7. Spaces and line breaks in a token do no harm."""
    token = SIGNED.token
    wrapped = "\n  ".join(token[at : at + 60] for at in range(0, len(token), 60))
    assert parse_token(f"  {wrapped}\n") == SIGNED


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "token_foreign"),
        ("hello", "token_foreign"),
        ("meshd2.AAAA", "token_foreign"),
        (PREFIX, "token_damaged"),
        (PREFIX + "!!!!", "token_damaged"),
        (PREFIX + "A" * 10_000, "token_foreign"),
        (SIGNED.token[:-1], "token_damaged"),
        (SIGNED.token[:-100], "token_damaged"),
        (SIGNED.token[:50] + "x" + SIGNED.token[51:], "token_damaged"),
    ],
)
def test_no_token_or_a_damaged_one(text: str, code: str) -> None:
    """3. A token that is cut off or mistyped is told from one of another kind and from a forged one."""
    with pytest.raises(InviteRefused) as caught:
        parse_token(text)
    assert caught.value.code == code
    assert len(text) < 20 or text[8:40] not in caught.value.detail


def test_each_refusal_has_a_code() -> None:
    """4. ... of its own mesh, unchanged, not revoked, not expired, not used up."""
    other = authority()
    assert check(SIGNED, mesh_id=MeshId("other")) == "invite_wrong_mesh"
    foreign = dataclasses.replace(INVITE, root_fingerprint=fingerprint(other.root))
    assert check(mint(foreign, MINE.issuer_key)) == "invite_wrong_mesh"
    assert check(mint(INVITE, other.issuer_key)) == "invite_tampered"
    impostor = dataclasses.replace(INVITE, issuer_der=other.issuer.public_bytes(Encoding.DER))
    assert check(mint(impostor, other.issuer_key)) == "invite_tampered"
    by_node = dataclasses.replace(INVITE, issuer_der=leaf().public_bytes(Encoding.DER))
    assert check(mint(by_node, MINE.issuer_key)) == "invite_tampered"
    assert check(SIGNED, revoked=True) == "invite_revoked"
    assert check(SIGNED, now_unix_seconds=EXPIRES + 1.0) == "invite_expired"
    assert check(SIGNED, used=1) == ""
    assert check(SIGNED, used=2) == "invite_used_up"


@pytest.mark.parametrize(
    "change",
    [{"uses": 1000}, {"grant": "issuer"}, {"expires_unix_seconds": EXPIRES * 2}, {"mesh_name": "mine"}],
)
def test_more_than_was_granted_is_tampered(change: dict[str, object]) -> None:
    """4. ... unchanged: a bearer cannot raise what the token grants."""
    richer = mint(dataclasses.replace(INVITE, **change), MINE.issuer_key)  # type: ignore[arg-type]
    assert check(SignedInvite(richer.invite, richer.body, SIGNED.signature)) == "invite_tampered"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.integers(0, 2000))
def test_any_text_is_only_refused(text: str, at: int) -> None:
    """3. and 6. Only clean refusals, whatever is pasted."""
    for candidate in (text, PREFIX + text, SIGNED.token[: at % len(SIGNED.token)] + text):
        with contextlib.suppress(InviteRefused):
            assert parse_token(candidate) == SIGNED


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(st.none(), st.integers(-5, 2**40), st.text(max_size=5), st.binary(max_size=40), st.lists(st.text())),
        max_size=10,
    )
)
def test_any_signed_body_is_only_refused(fields: list[object]) -> None:
    """3. Also what is well-formed but says something else."""
    with pytest.raises(InviteRefused):
        parse_invite(codec.pack(fields), b"signature")


def test_limits_of_a_body() -> None:
    for change in ({"uses": 0}, {"addresses": ("a",) * 100}, {"mesh_name": "n" * 300}):
        with pytest.raises(InviteRefused):
            parse_token(mint(dataclasses.replace(INVITE, **change), MINE.issuer_key).token)  # type: ignore[arg-type]
