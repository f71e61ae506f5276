"""Trust between nodes: the mesh's certificates, invites, enrolment, bans. Said by gossipd, tunneld and meshctl."""

from __future__ import annotations

from typing import Literal

from shared.ids import InviteId, MeshId, ModelName, PeerId
from shared.messages.registry import message, part

Grant = Literal["member", "client", "issuer", "guest"]
"""What a node may do: serve and consume; consume only; also admit others; serve whole models, no RPC."""
GRANTS: tuple[Grant, ...] = ("member", "client", "issuer", "guest")


@part
class PeerAddresses:
    """Where a peer may be reached."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()
    """Multiaddrs; the ``/p2p/`` part may be missing, ``peer_id`` is what counts."""


@message
class TrustChanged:
    """gossipd: what tunneld proves membership with and checks it against. Empty chain: in no mesh yet, or alone."""

    mesh_id: MeshId
    mesh_name: str = ""
    root_der: bytes = b""
    chain_der: tuple[bytes, ...] = ()
    """This node's certificate, then its issuer's; without the root."""
    issuer: bool = False
    """Whether this node can admit others: tunneld then accepts ENROLL."""
    banned: tuple[PeerId, ...] = ()
    trusted: tuple[PeerId, ...] = ()
    """Guests that the owner trusts like members."""


@message
class PeersWanted:
    """gossipd: peers that tunneld should keep connected, whole list."""

    peers: tuple[PeerAddresses, ...]


# -- joining ------------------------------------------------------------------------------------------------

JoinStepName = Literal["token", "connect", "verify", "admitted", "peers", "assigned"]
JoinStepState = Literal["waiting", "done", "failed"]


@part
class JoinStep:
    name: JoinStepName
    state: JoinStepState
    detail: str
    """In words; of a waiting or failed step: why, and what to do next."""


@message
class JoinChanged:
    """gossipd: the newest join, step by step. No steps: none since this start. Never carries the token."""

    steps: tuple[JoinStep, ...] = ()


@message
class InitMesh:
    """Request to gossipd: make a mesh with this node as its first issuer. Reply ``MeshJoined`` or ``Refused``."""

    name: str = ""
    switch: bool = False
    """Leave the present mesh for it."""


@message
class JoinMesh:
    """Request to gossipd. ``MeshJoined`` comes when this node is admitted; ``JoinChanged`` tells the steps."""

    token: str
    client: bool = False
    switch: bool = False


@message
class MeshJoined:
    mesh_id: MeshId
    mesh_name: str
    grant: Grant
    already: bool = False


@message
class LeaveMesh:
    """Request to gossipd: say goodbye and forget the mesh. Reply ``Done``."""


@message
class CreateInvite:
    """Request to gossipd of an issuer. Reply ``InviteCreated`` or ``Refused``."""

    grant: Grant = "member"
    expires_seconds: float = 24 * 3600.0
    uses: int = 1


@part
class InviteView:
    """An invite as it is shown: everything but the secret."""

    invite_id: InviteId
    grant: Grant
    uses: int
    used: int
    expires_in_seconds: float
    issuer: PeerId
    revoked: bool = False


@message
class InviteCreated:
    token: str
    invite: InviteView


@message
class ListInvites:
    """Request to gossipd. Reply ``InviteList``."""


@message
class InviteList:
    invites: tuple[InviteView, ...]


@message
class RevokeInvite:
    """Request to gossipd. Reply ``Done`` or ``Refused``."""

    invite_id: InviteId


@message
class BanPeer:
    """Request to gossipd of an issuer: cut a peer off, mesh-wide. Reply ``Done`` or ``Refused``."""

    peer: str
    """Name, peer id, or a unique beginning or end of one."""
    lift: bool = False
    """Take a ban back: the peer may connect again, if its certificate is still good."""


@message
class TrustPeer:
    """Request to gossipd of an issuer: a guest may take part like a member. Reply ``Done`` or ``Refused``."""

    peer: str


@message
class DrainNode:
    """Request to gossipd: take no new requests from the mesh, finish the running ones. Reply ``Done``."""

    off: bool = False


@message
class WhoAmI:
    """Request to gossipd. Reply ``NodeIdentity``."""


@message
class NodeIdentity:
    peer_id: PeerId
    name: str
    mesh_id: MeshId
    mesh_name: str
    grant: Grant | None
    certificate_expires_in_seconds: float = 0.0
    root_fingerprint: str = ""
    addresses: tuple[str, ...] = ()
    models: tuple[ModelName, ...] = ()


# -- enrolment, between gossipd and tunneld -------------------------------------------------------------------


@message
class EnrollAt:
    """Request of gossipd to its tunneld: dial ``addresses`` over ENROLL, pin the root, send key proof and invite.

    Reply ``Enrolled`` or ``Refused`` (``peer_unreachable``, ``wrong_mesh``, or the issuer's own refusal).
    """

    addresses: tuple[str, ...]
    root_fingerprint: str
    """SHA-256 of the root certificate's DER in hex."""
    invite: bytes
    """The token's text as UTF-8; never logged."""
    client: bool = False
    issuer_csr_der: bytes = b""
    """Signing request of a P-256 key of gossipd's, in case the invite makes an issuer."""


@message
class RedeemInvite:
    """Request of a tunneld to its gossipd: somebody enrols here. Reply ``Enrolled`` or ``Refused``."""

    invite: bytes
    csr_der: bytes
    observed_address: str = ""
    client: bool = False
    """The one who joins wants no more than a client's grant."""
    issuer_csr_der: bytes = b""
    """As in ``EnrollAt``."""


@message
class Enrolled:
    """A certificate for the one who enrolled, and where to find the others."""

    root_der: bytes
    chain_der: tuple[bytes, ...]
    mesh_id: MeshId
    mesh_name: str
    grant: Grant
    peers: tuple[PeerAddresses, ...] = ()
    observed_address: str = ""
    """How the issuer saw the one who enrolled."""
    issuer_der: bytes = b""
    """An issuer certificate for the key of ``issuer_csr_der``; empty unless the invite makes an issuer."""


@message
class MakeCsr:
    """Request to tunneld, which owns the node key. Reply ``CsrMade``."""


@message
class CsrMade:
    csr_der: bytes


# -- between gossipds, on channel ``enroll`` --------------------------------------------------------------------


@part
class SignedClaim:
    """One claim about a peer or an invite, forwarded byte for byte as it was signed."""

    body: bytes
    signature: bytes
    issuer: int = -1
    """Index into ``TrustStatement.issuers``; -1: signed with the mesh root's own key."""


@message
class TrustStatement:
    """gossipd to gossipd: bans, trusted guests, revoked and redeemed invites, each signed by an issuer."""

    mesh_id: MeshId
    issuers: tuple[bytes, ...] = ()
    """Issuer certificates, DER."""
    claims: tuple[SignedClaim, ...] = ()


@message
class RenewCertificate:
    """gossipd to an issuer's gossipd: sign this node's key again. Answer ``CertificateRenewed``."""

    csr_der: bytes
    issuer_csr_der: bytes = b""
    """Of a node that may admit others: a P-256 key that the mesh's creator signs."""


@message
class CertificateRenewed:
    """Answer to ``RenewCertificate``. An empty chain: refused, ``reason`` says why."""

    chain_der: tuple[bytes, ...] = ()
    issuer_der: bytes = b""
    reason: str = ""
