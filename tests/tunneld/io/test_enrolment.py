"""Enrolment from end to end over QUIC, with a real authority's certificates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from services.tunneld.framing import StreamType, encode_frame, encode_opening
from services.tunneld.io import quic
from services.tunneld.io.enrolment import EnrolmentDesk, check_enrolled, enroll
from services.tunneld.io.quic import QuicEndpoint
from shared import codec
from shared.certificates import csr_public_key, fingerprint, issue, make_csr
from shared.errors import CertificateRefused, PeerUnreachable, RequestRefused, StreamLost
from shared.messages.daemon import Done
from shared.messages.trust import EnrollAt, Enrolled, RedeemInvite
from tests.tunneld.bounded import bounded
from tests.tunneld.meshes import NOW, EndNode, TestMesh, end_nodes

MESH = TestMesh()
PIN = fingerprint(MESH.root)


def enrolled_for(csr_der: bytes, mesh: TestMesh = MESH) -> Enrolled:
    leaf = issue(csr_public_key(csr_der), mesh.mesh_id, "member", mesh.issuer, mesh.issuer_key, now=NOW)
    return Enrolled(
        root_der=mesh.root.public_bytes(Encoding.DER),
        chain_der=(leaf.public_bytes(Encoding.DER), mesh.issuer.public_bytes(Encoding.DER)),
        mesh_id=mesh.mesh_id,
        mesh_name="",
        grant="member",
    )


async def admit(request: RedeemInvite) -> codec.Message:
    return replace(enrolled_for(request.csr_der), observed_address=request.observed_address)


def desk(node: EndNode, redeem: Callable[[RedeemInvite], Awaitable[codec.Message]], counts: Counter[str]) -> None:
    """Have ``node`` answer enrolments."""
    assert isinstance(node.endpoint, QuicEndpoint)

    def count(what: str) -> None:
        counts[what] += 1

    answering = EnrolmentDesk(redeem, count)
    tasks = []
    node.endpoint.on_enroll = lambda stream, seen: tasks.append(asyncio.ensure_future(answering.serve(stream, seen)))


def ask(*nodes: EndNode) -> EnrollAt:
    return EnrollAt(addresses=tuple(str(node.address) for node in nodes), root_fingerprint=PIN, invite=b"the token")


def dialler(node: EndNode) -> QuicEndpoint:
    assert isinstance(node.endpoint, QuicEndpoint)
    return node.endpoint


@bounded
async def test_a_certificate_for_a_signed_request_and_an_invite() -> None:
    key = Ed25519PrivateKey.generate()
    async with end_nodes("quic", None, MESH.credentials()) as (joiner, issuer):
        desk(issuer, admit, Counter())
        got = await enroll(ask(issuer), key, dialler(joiner).dial_enroll)
        assert got.observed_address == str(joiner.address)
        check_enrolled(got, PIN, key)


@bounded
async def test_the_issuers_refusal_arrives_as_it_was_said() -> None:
    async def refuse(_: RedeemInvite) -> codec.Message:
        raise RequestRefused("expired", "the invite expired an hour ago; ask for a new one")

    counts: Counter[str] = Counter()
    async with end_nodes("quic", None, MESH.credentials()) as (joiner, issuer):
        desk(issuer, refuse, counts)
        with pytest.raises(RequestRefused, match="expired an hour ago") as refused:
            await enroll(ask(issuer), Ed25519PrivateKey.generate(), dialler(joiner).dial_enroll)
        assert refused.value.code == "expired"
        assert counts == {"enrolments_refused": 1}


@bounded
async def test_dead_and_foreign_addresses_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quic, "DIAL_SECONDS", 1.5)
    foreign = TestMesh("other").credentials()
    async with end_nodes("quic", None, foreign, MESH.credentials()) as (joiner, stranger, issuer):
        desk(issuer, admit, Counter())
        desk(stranger, admit, Counter())
        dead = EndNode("quic", None)
        dead.socket.close()
        got = await enroll(ask(dead, stranger, issuer), Ed25519PrivateKey.generate(), dialler(joiner).dial_enroll)
        assert got.mesh_id == MESH.mesh_id
        with pytest.raises(CertificateRefused, match="of another mesh than the token"):
            await enroll(ask(dead, stranger), Ed25519PrivateKey.generate(), dialler(joiner).dial_enroll)
        with pytest.raises(PeerUnreachable, match="no answer over UDP"):
            await enroll(ask(dead), Ed25519PrivateKey.generate(), dialler(joiner).dial_enroll)
        with pytest.raises(PeerUnreachable, match="names no address"):
            await enroll(ask(), Ed25519PrivateKey.generate(), dialler(joiner).dial_enroll)


@bounded
async def test_a_certificate_that_is_not_ours_is_not_taken() -> None:
    key, other = Ed25519PrivateKey.generate(), MESH.credentials()
    mine = enrolled_for(make_csr(key))
    check_enrolled(mine, PIN, key)
    theirs = replace(mine, chain_der=tuple(part.public_bytes(Encoding.DER) for part in other.chain))
    foreign = enrolled_for(make_csr(key), TestMesh())
    for answer in (theirs, foreign, replace(mine, grant="issuer"), replace(mine, chain_der=())):
        with pytest.raises(CertificateRefused):
            check_enrolled(answer, PIN, key)


@pytest.mark.parametrize(
    "wire",
    [
        b"\xff" * 40,
        encode_opening(StreamType.GOSSIP, {}),
        encode_opening(StreamType.ENROLL, {}) + (1 << 31).to_bytes(4),
        encode_opening(StreamType.ENROLL, {}) + encode_frame(b"\xc1"),
        encode_opening(StreamType.ENROLL, {}) + encode_frame(codec.encode(Done())),
        encode_opening(StreamType.ENROLL, {}),
        b"",
    ],
)
@bounded
async def test_nonsense_from_strangers_is_refused_and_counted(wire: bytes) -> None:
    counts: Counter[str] = Counter()
    async with end_nodes("quic", None, MESH.credentials()) as (joiner, issuer):
        desk(issuer, admit, counts)
        stream = await dialler(joiner).dial_enroll(issuer.address, PIN)
        await stream.write(wire)
        await stream.finish()
        with pytest.raises(StreamLost):
            await stream.read()
        assert counts == {"enrolments_failed": 1}


@bounded
async def test_a_probe_asks_for_nothing() -> None:
    counts: Counter[str] = Counter()
    async with end_nodes("quic", None, MESH.credentials(), MESH.credentials()) as (joiner, issuer, member):
        desk(issuer, admit, counts)
        await dialler(joiner).probe_enroll(issuer.address, PIN)
        with pytest.raises(CertificateRefused, match="another mesh than the token"):
            await dialler(joiner).probe_enroll(issuer.address, fingerprint(TestMesh("mesh-2").root))
        with pytest.raises(PeerUnreachable) as refused:
            await dialler(joiner).probe_enroll(member.address, PIN)
        print(refused.value.detail)
        assert not counts
        assert not dialler(joiner)._links
