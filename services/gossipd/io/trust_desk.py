"""The desk where identity, trust, invites and joining are asked for: requests in, decisions kept, told and sent on.

``Trust`` and ``Joining`` decide; here is what they need of the world: keys are made, files written before anything is
answered, tunneld asked for this node's signing request and for the way to another mesh, claims handed to peers.

A token is read and handed on, never logged; what is published about a join has no place for it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import uuid
from collections.abc import Iterable
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric import ec

from services.gossipd.credentials import Credentials, admitted, found_mesh
from services.gossipd.io.trust_exchange import TrustExchange
from services.gossipd.io.trust_keeping import Surroundings, TrustKeeping
from services.gossipd.joining import (
    Adopt,
    Enroll,
    EnrollAnswered,
    JoinAsked,
    Joining,
    JoinReply,
    PublishJoin,
    Ticket,
)
from services.gossipd.joining import Stimulus as JoinStimulus
from services.gossipd.membership import DrainAsked
from services.gossipd.trust import Trust
from shared import codec
from shared.certificates import make_issuer_csr
from shared.errors import CertificateRefused, InviteRefused, MeshError, RequestRefused
from shared.ids import InviteId, MeshId, PeerId
from shared.invites import parse_token
from shared.io import log
from shared.io.bus import BusClient
from shared.io.drive import Tasks
from shared.messages.daemon import Done, Refused
from shared.messages.mesh import TunnelChanged
from shared.messages.models import AssignmentsChanged
from shared.messages.trust import (
    BanPeer,
    CreateInvite,
    DrainNode,
    EnrollAt,
    Enrolled,
    InitMesh,
    InviteList,
    JoinMesh,
    LeaveMesh,
    ListInvites,
    MeshJoined,
    NodeIdentity,
    PeerAddresses,
    RedeemInvite,
    RevokeInvite,
    TrustPeer,
    WhoAmI,
)
from shared.messages.tunnel import FromPeer, LinkChanged
from shared.paths import NodePaths
from shared.peer_names import find_peer

ENROLL_SECONDS = 50.0
"""tunneld tries every address of a token within it; meshctl waits a little longer."""
GOODBYE_SECONDS = 2.0
PEERS_LIMIT = 128
"""Of so many peers one that joins hears at once; gossip tells it of the others."""
ADDRESSES_LIMIT = 8
"""Of each of them; a token names twice as many of its maker."""


class TrustDesk:
    """Everything of gossipd that has to do with keys and certificates. Raises: StateError for damaged files."""

    def __init__(self, paths: NodePaths, tunneld: BusClient, tasks: Tasks, around: Surroundings) -> None:
        self.keeping = TrustKeeping(paths, tunneld, tasks, around)
        self.exchange = TrustExchange(self.keeping)
        self.joining = Joining()
        self._addresses: tuple[str, ...] = ()
        self._waiting: dict[int, asyncio.Future[MeshJoined | Refused]] = {}
        self._replies = 0

    def start(self) -> None:
        self.exchange.start()

    @property
    def trust(self) -> Trust:
        return self.keeping.trust

    @property
    def bootstrap(self) -> tuple[PeerAddresses, ...]:
        """Who was in the mesh when this node joined it: whom to dial before gossip knows anybody."""
        return self.trust.credentials.bootstrap

    def snapshot(self) -> list[codec.Message]:
        return [self.keeping.message(), self.joining.join]

    # -- what the other daemons say -----------------------------------------------------------------------------------

    def on_snapshot(self, messages: Iterable[codec.Message]) -> None:
        """A whole copy of one daemon's state; its messages come by :meth:`on_message` too."""
        messages = list(messages)
        if any(isinstance(message, TunnelChanged) for message in messages):
            self.exchange.only_links(message.peer_id for message in messages if isinstance(message, LinkChanged))

    def on_message(self, message: codec.Message) -> None:
        match message:
            case TunnelChanged(addresses=addresses):
                self._addresses = addresses
                self.exchange.wake()
            case LinkChanged():
                self.exchange.on_link(message)
                self._join_step(message)
            case AssignmentsChanged():
                self._join_step(message)
            case FromPeer(channel="enroll"):
                self.exchange.on_peer(message)

    def on_mesh(self) -> None:
        """The membership machine took another mesh id: an idle node was configured."""
        self.keeping.publish()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def answer(self, request: codec.Message) -> codec.Message | None:
        """The reply, or None when the request is for somebody else. Raises: MeshError."""
        match request:
            case InitMesh():
                return await self._init(request)
            case JoinMesh():
                return await self._join(request)
            case LeaveMesh():
                return await self._leave()
            case CreateInvite():
                return await self._invite(request)
            case ListInvites():
                return InviteList(invites=self.trust.invites(now_unix_seconds=self.keeping.unix_seconds()))
            case RevokeInvite(invite_id=invite_id):
                self.exchange.decided(self.trust.revoke(invite_id, now_unix_seconds=self.keeping.unix_seconds()))
                return Done(detail=f"Invite {invite_id[:64]} is revoked. Nodes that joined with it stay.")
            case RedeemInvite():
                return self._redeem(request)
            case BanPeer():
                return self._ban(request)
            case TrustPeer(peer=peer):
                self.trust.issuing(self._issuers())
                peer_id = find_peer(peer, self._names(), unknown=True)
                self.exchange.decided(self.trust.trust_guest(peer_id))
                return Done(detail=f"{self._called(peer_id)} is trusted like a member, on every node of the mesh.")
            case DrainNode(off=off):
                self.keeping.around.post(DrainAsked(not off))
                if off:
                    return Done(detail="This node takes requests of the mesh again.")
                return Done(
                    detail="This node takes no new requests from other nodes; running ones finish. It stays so over a "
                    "restart, until 'meshctl drain --off'."
                )
            case WhoAmI():
                return self._identity()
        return None

    async def _init(self, request: InitMesh) -> MeshJoined:
        """Raises: MeshError."""
        name = request.name.strip()
        if len(name) > 64 or not name.isprintable():
            raise RequestRefused("bad_name", "a mesh's name has at most 64 printable characters")
        async with self.keeping.lock:
            identity = self.keeping.identity()
            known = self.trust.mesh_known(identity, others=self.keeping.others())
            named = not name or name == identity.mesh_name
            # A node that joined this mesh, or a mesh that has the name already: nothing to make.
            if self.trust.credentials.root is not None and named and not (request.switch and not name):
                return self._joined(already=True)
            if not known.alone and not request.switch:
                raise RequestRefused(
                    "in_another_mesh",
                    f"this node is in mesh {identity.mesh_name or identity.mesh_id} with others; add --switch to leave "
                    "it for a new one",
                )
            fresh = bool(self.trust.credentials.root is not None)
            if not known.alone:
                await self._say_goodbye()
            await self._found(name, MeshId(str(uuid.uuid4())) if fresh else identity.mesh_id)
        return self._joined(already=False)

    async def _leave(self) -> Done:
        """Raises: MeshError."""
        async with self.keeping.lock:
            identity = self.keeping.identity()
            if not identity.mesh_id:
                raise RequestRefused("idle", "this node is in no mesh; 'meshctl up' starts one")
            if (
                self.trust.mesh_known(identity, others=self.keeping.others()).alone
                and self.trust.credentials.root is None
            ):
                return Done(detail="This node is in a mesh of its own already; there is nobody to leave.")
            await self._say_goodbye()
            self.keeping.adopt(Credentials(mesh_id=MeshId(str(uuid.uuid4()))))
            log.info("left_mesh", mesh=identity.mesh_id)
        name = identity.mesh_name or f"the unnamed mesh {identity.mesh_id}"
        return Done(detail=f"This node left {name} and is in a mesh of its own. 'meshctl join TOKEN' joins another.")

    async def _invite(self, request: CreateInvite) -> codec.Message:
        """Raises: MeshError."""
        async with self.keeping.lock:
            if self.trust.credentials.root is None:
                await self._found("", self.keeping.identity().mesh_id)
        self.trust.issuing(self._issuers())
        text = base64.b32encode(os.urandom(16)).decode("ascii").rstrip("=").lower()
        addresses = self._addresses[: 2 * ADDRESSES_LIMIT]
        made = self.trust.invite(request, InviteId(text), addresses, now_unix_seconds=self.keeping.unix_seconds())
        self.keeping.keep_decisions()
        log.info("invited", invite=text, grant=request.grant, uses=request.uses)
        return made

    def _redeem(self, request: RedeemInvite) -> Enrolled:
        """Raises: MeshError."""
        try:
            enrolled, made = self.trust.redeem(request, self._peers(), now_unix_seconds=self.keeping.unix_seconds())
        except (InviteRefused, CertificateRefused, RequestRefused) as error:
            self.keeping.around.bus.count("enrolments_refused")
            self.keeping.once(f"enrolment {error.code}", "enrolment_refused", code=error.code, reason=error.detail)
            raise
        self.exchange.decided(made)
        log.info("admitted", grant=enrolled.grant, peers=len(enrolled.peers))
        return enrolled

    def _ban(self, request: BanPeer) -> Done:
        """Raises: MeshError."""
        self.trust.issuing(self._issuers())
        names = self._names()
        if request.lift and self.trust.claims is not None:
            names = {**dict.fromkeys(self.trust.claims.banned, ""), **names}
        peer_id = find_peer(request.peer, names, unknown=True)
        called = self._called(peer_id)
        self.exchange.decided(self.trust.ban(peer_id, lift=request.lift))
        log.info("ban_lifted" if request.lift else "banned", peer=peer_id)
        if request.lift:
            return Done(detail=f"{called} may take part again. If its certificate expired meanwhile, it has to join.")
        return Done(detail=f"{called} is banned from the mesh; its connections are cut on every node that hears of it.")

    def _identity(self) -> NodeIdentity:
        identity = self.keeping.identity()
        own = next((member for member in self.keeping.around.members() if member.is_self), None)
        return NodeIdentity(
            peer_id=identity.peer_id,
            name=own.announcement.name if own else "",
            mesh_id=identity.mesh_id,
            mesh_name=identity.mesh_name,
            grant=self.trust.credentials.grant(),
            certificate_expires_in_seconds=self.trust.certificate_seconds(now_unix_seconds=self.keeping.unix_seconds()),
            root_fingerprint=self.trust.root_fingerprint,
            addresses=self._addresses,
            models=tuple(item.model for item in own.announcement.hosted) if own else (),
        )

    # -- joining ------------------------------------------------------------------------------------------------------

    async def _join(self, request: JoinMesh) -> MeshJoined:
        """Raises: MeshError."""
        ticket, refused = None, None
        try:
            signed = parse_token(request.token)
        except InviteRefused as error:
            refused = Refused(code=error.code, detail=error.detail)
        else:
            invite = signed.invite
            mine = self.trust.credentials
            if mine.issuer is not None and mine.root is not None and invite.mesh_id == mine.mesh_id:
                raise RequestRefused(
                    "own_mesh",
                    "this node admits others to that mesh itself; use the token on another machine: meshctl join TOKEN",
                )
            ticket = Ticket(
                mesh_id=invite.mesh_id,
                mesh_name=invite.mesh_name,
                root_fingerprint=invite.root_fingerprint,
                addresses=invite.addresses,
                invite=signed.token.encode("ascii"),
            )
        self._replies += 1
        reply_to = self._replies
        answered: asyncio.Future[MeshJoined | Refused] = asyncio.get_running_loop().create_future()
        self._waiting[reply_to] = answered
        try:
            self._join_step(self.trust.mesh_known(self.keeping.identity(), others=self.keeping.others()))
            self._join_step(JoinAsked(reply_to, ticket, refused, client=request.client, switch=request.switch))
            reply = await answered
        finally:
            del self._waiting[reply_to]
        if isinstance(reply, Refused):
            raise RequestRefused(reply.code, reply.detail, reply.retry_after_seconds)
        return reply

    def _join_step(self, stimulus: JoinStimulus) -> None:
        for effect in self.joining.handle(stimulus):
            match effect:
                case PublishJoin(join=join):
                    self.keeping.around.bus.publish(join)
                    if join.steps:
                        step = join.steps[-1]
                        log.info("join", step=step.name, state=step.state, detail=step.detail)
                case Enroll(request=asked):
                    self.keeping.tasks.start(self._enroll(asked), "enrolment")
                case JoinReply(reply_to=reply_to, message=message):
                    waiting = self._waiting.get(reply_to)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                case Adopt():
                    # Kept before the machine was told: nothing counts that is not on disk.
                    for link in list(self.exchange.links.values()):
                        self.joining.handle(link)

    async def _enroll(self, asked: EnrollAt) -> None:
        answer: Enrolled | Refused
        try:
            answer = await self._admitted(asked)
        except MeshError as error:
            answer = Refused(code=error.code, detail=error.detail)
        self._join_step(EnrollAnswered(answer))

    async def _admitted(self, asked: EnrollAt) -> Enrolled:
        """Raises: MeshError."""
        _csr_der, own = await self.keeping.signing_request()
        key = ec.generate_private_key(ec.SECP256R1())
        request = replace(asked, issuer_csr_der=make_issuer_csr(key, own))
        answer = await self.keeping.tunneld.request(request, deadline_seconds=ENROLL_SECONDS)
        if not isinstance(answer, Enrolled):
            raise RequestRefused("not_for_me", "tunneld answered something else; see 'meshctl version'")
        made = admitted(answer, key, own, asked.root_fingerprint, now=self.keeping.now())
        async with self.keeping.lock:
            if made.mesh_id != self.keeping.identity().mesh_id:
                await self._say_goodbye()
            self.keeping.adopt(made)
        return answer

    # -- another mesh -------------------------------------------------------------------------------------------------

    async def _found(self, name: str, mesh_id: MeshId) -> None:
        """A mesh of this node's own. Raises: MeshError."""
        csr_der, _own = await self.keeping.signing_request()
        made = found_mesh(
            ec.generate_private_key(ec.SECP256R1()),
            ec.generate_private_key(ec.SECP256R1()),
            csr_der,
            mesh_id=mesh_id or MeshId(str(uuid.uuid4())),
            mesh_name=name,
            now=self.keeping.now(),
        )
        self.keeping.adopt(made)
        log.info("mesh_made", mesh=made.mesh_id, name=name or "unnamed")

    def _joined(self, *, already: bool) -> MeshJoined:
        mine = self.trust.credentials
        return MeshJoined(
            mesh_id=mine.mesh_id, mesh_name=mine.mesh_name, grant=mine.grant() or "member", already=already
        )

    async def _say_goodbye(self) -> None:
        goodbye = self.keeping.around.goodbye
        if goodbye is None:
            return
        with contextlib.suppress(TimeoutError, MeshError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await goodbye()

    # -- who is meant ------------------------------------------------------------------------------------------------

    def _names(self) -> dict[PeerId, str]:
        known = {member.announcement.peer_id: member.announcement.name for member in self.keeping.around.members()}
        return {**dict.fromkeys(self.exchange.links, ""), **known}

    def _issuers(self) -> list[str]:
        return [member.announcement.name for member in self.keeping.members() if member.grant == "issuer"]

    def _called(self, peer_id: PeerId) -> str:
        name = self._names().get(peer_id, "")
        return f"{name} ({peer_id})" if name else peer_id

    def _peers(self) -> tuple[PeerAddresses, ...]:
        """Where one that joins finds the others; this node first."""
        members = sorted(self.keeping.members(), key=lambda member: not member.is_self)[:PEERS_LIMIT]
        return tuple(
            PeerAddresses(
                peer_id=member.announcement.peer_id, addresses=member.announcement.addresses[:ADDRESSES_LIMIT]
            )
            for member in members
        )
