"""Credentials: one judgement for both transports, and no key left lying about."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.tunneld.io.credentials import Credentials
from shared.errors import CertificateRefused
from tests.tunneld.meshes import TestMesh, peer_of

MESH = TestMesh()


def test_the_chain_is_judged_with_and_without_the_root() -> None:
    own, other = MESH.credentials(), MESH.credentials(grant="guest")
    for chain in (other.chain, (*other.chain, MESH.root)):
        peer = own.judge(chain)
        assert (peer.peer_id, peer.grant) == (peer_of(other), "guest")
    with pytest.raises(CertificateRefused):
        own.judge((*other.chain, TestMesh().root))
    with pytest.raises(CertificateRefused):
        own.judge(())


def test_contexts_speak_tls_1_3_only_and_ask_for_certificates() -> None:
    own = MESH.credentials()
    server, client = own.server_context(), own.client_context()
    for context in (server, client):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
    assert server.num_tickets == 0


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_file_with_the_key_stays(in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not in_memory:
        monkeypatch.delattr("os.memfd_create")
    MESH.credentials().client_context()
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_of_another_key_is_named() -> None:
    own = MESH.credentials()
    mixed = Credentials(own.mesh_id, own.root, own.chain, Ed25519PrivateKey.generate())
    with pytest.raises(CertificateRefused, match="do not belong together"):
        mixed.client_context()


def test_the_key_is_not_shown() -> None:
    assert "PrivateKey" not in repr(MESH.credentials())
