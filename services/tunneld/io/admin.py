"""ADMIN streams: logs, load, unload and drain on another node, asked by one with an issuer's grant; ``probe`` by any.

The asking tunneld opens a stream, sends one ``AdminRequest`` and reads one ``AdminReply`` or ``Refused``. The asked one
checks the grant that the peer's certificate proves and its own ``mesh.accept_admin``, and asks its own daemons. Peers
name daemons and models, never files.

Source: docs/spec/admin.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.tunneld.framing import FrameReader, StreamType, encode_frame, encode_opening
from services.tunneld.io.enrolment import read_frame
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.certificates import VerifiedPeer
from shared.errors import MeshError, PeerUnreachable, RequestRefused
from shared.ids import DAEMONS, ModelName, PeerId
from shared.io import log
from shared.messages.daemon import Refused
from shared.messages.models import LoadModel, UnloadModel
from shared.messages.trust import DrainNode
from shared.messages.tunnel import AdminReply, AdminRequest, PeerProbed

ASK_SECONDS = 10.0
"""For logs and drain. A load answers as soon as it is queued."""
LINE_LIMIT = 1_000
LINE_BYTES = 2_000
TAIL_BYTES = 1024 * 1024
"""Read from the end of a log file at most."""
FRAME_LIMIT_BYTES = 4 * 1024 * 1024

AskDaemon = Callable[[str, codec.Message], Awaitable[codec.Message]]
"""``(daemon, request) -> reply``. Raises MeshError."""
DialBack = Callable[[PeerId], Awaitable[PeerProbed]]
"""Probes a peer at the addresses this node has of it. Raises RequestRefused."""


async def ask_peer(stream: TunnelStream, request: AdminRequest) -> AdminReply | PeerProbed:
    """The asking side. Raises: RequestRefused with the peer's refusal, PeerUnreachable, StreamLost."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            await stream.write(encode_opening(StreamType.ADMIN, {}) + encode_frame(codec.encode(request)))
            await stream.finish()
            answer = codec.decode(await read_frame(stream, FrameReader(FRAME_LIMIT_BYTES)))
    except TimeoutError:
        raise PeerUnreachable(f"the node did not answer within {ASK_SECONDS:g} s") from None
    finally:
        stream.abort("done")
    match answer:
        case AdminReply() | PeerProbed():
            return answer
        case Refused(code=code, detail=detail):
            raise RequestRefused(code, detail)
    raise PeerUnreachable(f"the node answered {type(answer).__name__} to an admin request")


class AdminDesk:
    """The asked side. ``accepts`` is the configuration's word; ``own`` this node's id."""

    def __init__(
        self, own: PeerId, logs: Path, ask: AskDaemon, accepts: Callable[[], bool], dial_back: DialBack
    ) -> None:
        self._own = own
        self._logs = logs
        self._ask = ask
        self._accepts = accepts
        self._dial_back = dial_back

    async def serve(self, stream: TunnelStream, rest: bytes, peer: VerifiedPeer) -> None:
        """One request, answered. Raises: StreamLost, SchemaError."""
        async with asyncio.timeout(ASK_SECONDS):
            request = codec.decode(await read_frame(stream, FrameReader(64 * 1024), rest))
            answer: codec.Message
            try:
                answer = await self._decide(request, peer)
            except RequestRefused as error:
                answer = Refused(code=error.code, detail=error.detail)
            except MeshError as error:
                answer = Refused(code=error.code, detail=error.detail)
            await stream.write(encode_frame(codec.encode(answer)))
            await stream.finish()

    async def _decide(self, request: codec.Message, peer: VerifiedPeer) -> codec.Message:
        if not isinstance(request, AdminRequest):
            raise RequestRefused("schema", f"an ADMIN stream carries AdminRequest, not {type(request).__name__}")
        if request.action == "probe" and request.peer == self._own:
            log.info("admin", by=peer.peer_id, action=request.action)
            return await self._dial_back(peer.peer_id)
        if peer.grant != "issuer":
            self._refused(request, peer, "grant")
            raise RequestRefused(
                "not_allowed",
                f"this needs an issuer's grant; {peer.peer_id} has {peer.grant}. Ask the owner of a node that made "
                "the mesh, or the owner of this one",
            )
        if not self._accepts():
            self._refused(request, peer, "configuration")
            raise RequestRefused("not_allowed", "the owner of this node refuses that: mesh.accept_admin is false")
        if request.peer != self._own:
            raise RequestRefused("schema", f"this is {self._own}, not {request.peer}")
        log.info("admin", by=peer.peer_id, action=request.action, subject=request.subject)
        match request.action:
            case "logs":
                return AdminReply(lines=await asyncio.to_thread(self._tail, request.subject, request.lines))
            case "load":
                await self._ask("launcherd", LoadModel(model=ModelName(request.subject), wait=False))
                return AdminReply(lines=(f"{request.subject}: queued",))
            case "unload":
                model = ModelName(request.subject) if request.subject else None
                await self._ask("launcherd", UnloadModel(model=model, wait=False))
                return AdminReply(lines=(f"{request.subject or 'all models'}: unloaded as soon as idle",))
            case "drain":
                await self._ask("gossipd", DrainNode(off=request.subject == "off"))
                return AdminReply(lines=("takes requests again" if request.subject == "off" else "draining",))

    @staticmethod
    def _refused(request: AdminRequest, peer: VerifiedPeer, why: str) -> None:
        log.warning("admin_refused", by=peer.peer_id, action=request.action, grant=peer.grant, reason=why)

    def _tail(self, daemon: str, lines: int) -> tuple[str, ...]:
        if daemon not in DAEMONS:
            raise RequestRefused("schema", f"no daemon {daemon[:40]!r}; there are {', '.join(DAEMONS)}")
        try:
            with open(self._logs / f"{daemon}.log", "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise RequestRefused("no_log", f"there is no log of {daemon} on that node ({error.strerror})") from error
        wanted = max(0, min(lines, LINE_LIMIT))
        return tuple(line[:LINE_BYTES] for line in deque(text.splitlines(), maxlen=wanted))
