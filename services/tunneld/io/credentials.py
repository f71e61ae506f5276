"""What this node proves membership with, and the one judgement of others that both transports use."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shared.certificates import VerifiedPeer, verify_chain
from shared.errors import CertificateRefused
from shared.ids import MeshId, PeerId


@dataclass(frozen=True)
class Credentials:
    """Of one node in one mesh. ``chain``: the node's certificate, then its issuer's."""

    mesh_id: MeshId
    root: x509.Certificate
    chain: tuple[x509.Certificate, ...]
    key: Ed25519PrivateKey = field(repr=False)
    banned: frozenset[PeerId] = frozenset()

    def judge(self, chain: Sequence[x509.Certificate], now: datetime.datetime | None = None) -> VerifiedPeer:
        """Who presented ``chain``; the root may be part of it. Raises: CertificateRefused."""
        presented = list(chain)
        if len(presented) == 3:
            if presented[2] != self.root:
                raise CertificateRefused("the node is of another mesh: the root it shows is not this mesh's")
            presented.pop()
        moment = now or datetime.datetime.now(datetime.UTC)
        return verify_chain(presented, self.root, mesh_id=self.mesh_id, now=moment, banned=self.banned)

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 only, client certificates required, no tickets: a resumed session has no certificate chain.

        Raises: CertificateRefused when key and certificate do not belong together.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return self._complete(context)

    def client_context(self) -> ssl.SSLContext:
        """The same for dialling. Names mean nothing between nodes; who it is, the certificate says."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._complete(context)

    def _complete(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.root.public_bytes(Encoding.PEM).decode("ascii"))
        pem = b"".join(certificate.public_bytes(Encoding.PEM) for certificate in self.chain)
        pem += self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            _load(context, pem)
        except ssl.SSLError as error:
            raise CertificateRefused(f"this node's certificate and key do not belong together: {error}") from None
        return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """``load_cert_chain`` takes files only: one in memory where the system has them, else a 0600 one for a moment."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("meshd")
        try:
            os.write(descriptor, pem)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)


def presented_chain(ssl_object: ssl.SSLObject) -> list[x509.Certificate]:
    """What the peer sent, its own certificate first. Python 3.13 has it in public, 3.11 and 3.12 one level deeper."""
    public = getattr(ssl_object, "get_unverified_chain", None)
    if public is not None:
        return [x509.load_der_x509_certificate(der) for der in public() or ()]
    import _ssl

    inner = ssl_object._sslobj  # type: ignore[attr-defined]
    der_encoding = _ssl.ENCODING_DER
    return [
        x509.load_der_x509_certificate(part.public_bytes(der_encoding)) for part in inner.get_unverified_chain() or ()
    ]
