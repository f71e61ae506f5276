"""Requests to engines of other nodes, through this node's tunneld.

One connection to tunneld's data socket per request. The far node's tunneld takes the lease before a byte of the request
flows, so what comes back from :meth:`Tunnels.open` is as good as a lease of this node's own launcherd.

Source: docs/spec/tunnel_http.md.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path

from services.proxyd.io.upstream import Carrier, NotReached, UpstreamPool, UpstreamResponse
from shared import codec
from shared.errors import PeerUnreachable, RequestRefused, SchemaError
from shared.ids import ModelName, PeerId, RequestId
from shared.messages.daemon import Refused
from shared.messages.tunnel import OpenHttp, StreamOpened

MESSAGE_LIMIT_BYTES = 64 * 1024
CONNECT_SECONDS = 2.0
ANSWER_SLACK_SECONDS = 10.0
"""tunneld itself answers a few seconds after the deadline at the latest."""


InUse = Counter[tuple[PeerId, ModelName]]


def _less(in_use: InUse, peer_id: PeerId, model: ModelName) -> None:
    in_use[peer_id, model] -= 1
    if not in_use[peer_id, model]:
        del in_use[peer_id, model]


class RemoteLease:
    """The right to run one request on an engine of another node, until closed."""

    __slots__ = ("_in_use", "_open", "carrier", "model", "peer_id")

    def __init__(self, peer_id: PeerId, model: ModelName, carrier: Carrier, in_use: InUse) -> None:
        self.peer_id = peer_id
        self.model = model
        self.carrier = carrier
        self._in_use = in_use
        self._open = True

    def close(self) -> None:
        """The request has ended, or nobody wants it any more: the far lease is released. Idempotent."""
        self.carrier.abort()
        if self._open:
            self._open = False
            _less(self._in_use, self.peer_id, self.model)


class Tunnels:
    """Opens requests through the data socket at ``path``."""

    def __init__(self, path: Path, pool: UpstreamPool) -> None:
        self._path = str(path)
        self._pool = pool
        self.in_use: InUse = Counter()
        """This node's requests on engines of others, and those that wait there: what others say of themselves lags."""

    async def open(
        self,
        peer_id: PeerId,
        model: ModelName,
        request_id: RequestId,
        deadline_seconds: float,
        *,
        name_there: ModelName | None = None,
    ) -> RemoteLease:
        """Wait until the far node has a place for the request, loading the model if need be. Cancel it to give up.

        ``name_there``: what that node calls the model, where that is another name.

        Raises: RequestRefused with the far launcherd's code and reason; NotReached when there is no way there now.
        """
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.in_use[peer_id, model] += 1
        try:
            raw.setblocking(False)
            answer = await self._ask(raw, peer_id, name_there or model, request_id, deadline_seconds)
            match answer:
                case StreamOpened():
                    return RemoteLease(peer_id, model, await self._pool.carry(raw), self.in_use)
                case Refused(code=PeerUnreachable.code, detail=detail):
                    raise NotReached(f"cannot be reached: {detail}")
                case Refused(code=code, detail=detail, retry_after_seconds=retry_after):
                    raise RequestRefused(code, detail, retry_after)
            raise NotReached(f"cannot be reached: tunneld answered {type(answer).__name__}")
        except BaseException:
            _less(self.in_use, peer_id, model)
            raw.close()
            raise

    async def _ask(
        self, raw: socket.socket, peer_id: PeerId, model: ModelName, request_id: RequestId, deadline_seconds: float
    ) -> codec.Message:
        loop = asyncio.get_running_loop()
        request = OpenHttp(peer_id=peer_id, model=model, request_id=request_id, deadline_seconds=deadline_seconds)
        payload = codec.encode(request)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.sock_connect(raw, self._path)
                await loop.sock_sendall(raw, len(payload).to_bytes(4) + payload)
            async with asyncio.timeout(deadline_seconds + ANSWER_SLACK_SECONDS):
                size = int.from_bytes(await _exactly(raw, 4))
                if size > MESSAGE_LIMIT_BYTES:
                    raise NotReached(f"cannot be reached: tunneld sent a message of {size} bytes")
                return codec.decode(await _exactly(raw, size))
        except TimeoutError:
            raise NotReached("cannot be reached: tunneld did not answer") from None
        except OSError as error:
            raise NotReached(f"cannot be reached: tunneld is away ({error.strerror or error})") from None
        except SchemaError as error:
            raise NotReached(f"cannot be reached: {error.detail}") from None

    async def request(self, lease: RemoteLease, head: bytes, body: bytes) -> UpstreamResponse:
        """Send the request and wait for its answer's head. Raises: NotReached."""
        return await self._pool.request_over(lease.carrier, head, body)


async def _exactly(raw: socket.socket, size: int) -> bytes:
    """So many bytes and no more: what follows belongs to the answer. Raises: OSError at the end of the stream."""
    loop = asyncio.get_running_loop()
    parts = b""
    while len(parts) < size:
        part = await loop.sock_recv(raw, size - len(parts))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return parts
