"""Enrolment over QUIC: the client pins the root it was told of."""

from __future__ import annotations

import pytest

from services.tunneld.io.quic import QuicEndpoint
from services.tunneld.io.quic_peers import check_pinned
from shared.certificates import fingerprint
from shared.errors import CertificateRefused, PeerUnreachable, StreamLost
from tests.tunneld.bounded import bounded
from tests.tunneld.meshes import TestMesh, end_nodes, peer_of, read_all

MESH, OTHER = TestMesh(), TestMesh("mesh-2")


@bounded
async def test_who_wants_to_join_needs_the_fingerprint_and_no_certificate() -> None:
    async with end_nodes("quic", None, MESH.credentials()) as (joiner, issuer):
        assert isinstance(joiner.endpoint, QuicEndpoint)
        assert isinstance(issuer.endpoint, QuicEndpoint)
        issuer.endpoint.on_enroll = lambda stream, seen: issuer.enrolments.put_nowait((stream, seen))
        stream = await joiner.endpoint.dial_enroll(issuer.address, fingerprint(MESH.root))
        await stream.write(b"let me in")
        await stream.finish()
        came, seen = await issuer.enrolments.get()
        assert seen == str(joiner.address)
        assert await read_all(came) == b"let me in"
        await came.write(b"welcome")
        await came.finish()
        assert await read_all(stream) == b"welcome"


@bounded
async def test_another_mesh_than_the_tokens_is_refused_before_anything_is_sent() -> None:
    async with end_nodes("quic", None, OTHER.credentials()) as (joiner, impostor):
        assert isinstance(joiner.endpoint, QuicEndpoint)
        assert isinstance(impostor.endpoint, QuicEndpoint)
        impostor.endpoint.on_enroll = lambda stream, seen: impostor.enrolments.put_nowait((stream, seen))
        with pytest.raises(CertificateRefused, match="of another mesh than the token"):
            await joiner.endpoint.dial_enroll(impostor.address, fingerprint(MESH.root))
        assert impostor.enrolments.empty()


@bounded
async def test_a_node_that_admits_nobody_says_so() -> None:
    async with end_nodes("quic", None, MESH.credentials()) as (joiner, node):
        assert isinstance(joiner.endpoint, QuicEndpoint)
        with pytest.raises((PeerUnreachable, StreamLost)):
            await joiner.endpoint.dial_enroll(node.address, fingerprint(MESH.root))


def test_a_pinned_chain_is_complete_and_verified() -> None:
    own, foreign = MESH.credentials(), OTHER.credentials()
    pin = fingerprint(MESH.root)
    assert check_pinned([*own.chain, MESH.root], pin).peer_id == peer_of(own)
    for chain in ([], list(own.chain), [*foreign.chain, OTHER.root], [*foreign.chain, MESH.root]):
        with pytest.raises(CertificateRefused):
            check_pinned(chain, pin)
