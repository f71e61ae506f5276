"""Streams that other nodes open here: the opening is read, then the stream goes to whoever serves its type.

What a peer does wrong ends its stream, is counted and logged once, and touches nothing else.

Source: docs/spec/framing.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from services.tunneld.framing import OpeningReader, StreamOpening, StreamType
from services.tunneld.io.admin import AdminDesk
from services.tunneld.io.connection import Connection
from services.tunneld.io.control_streams import CHANNEL_OF, ControlStreams
from services.tunneld.io.stream import TunnelStream
from shared.certificates import VerifiedPeer
from shared.errors import MeshError, SchemaError, StreamLost
from shared.io import log
from shared.io.drive import Tasks

OPENING_SECONDS = 10.0
ServeHttp = Callable[[TunnelStream, dict[str, Any], bytes, VerifiedPeer], Awaitable[None]]
"""``(stream, header, bytes that came with it, peer)``. Raises MeshError for what the peer did wrong."""


class IncomingStreams:
    """Give :meth:`accept` to the endpoints."""

    def __init__(
        self,
        control: ControlStreams,
        admin: AdminDesk,
        serve_http: ServeHttp,
        count: Callable[[str], None],
        tasks: Tasks,
    ) -> None:
        self._control = control
        self._admin = admin
        self._serve_http = serve_http
        self._count = count
        self._tasks = tasks
        self._refused = log.LogOnce()

    def accept(self, connection: Connection, stream: TunnelStream) -> None:
        """A verified peer opened a stream."""
        self._tasks.start(self._serve(connection, stream), f"stream of {connection.peer.peer_id}")

    async def _serve(self, connection: Connection, stream: TunnelStream) -> None:
        peer = connection.peer
        kind = "unknown"
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                opening, rest = await _read_opening(stream)
            kind = opening.type.name
            await self._dispatch(opening, rest, stream, peer)
        except StreamLost:
            # The peer or the path is gone; the link says so where it matters.
            stream.abort("lost")
        except (MeshError, TimeoutError) as error:
            reason = error.detail if isinstance(error, MeshError) else "it took too long"
            self._count("streams_refused")
            connection.count_refused()
            self._refused(
                f"{peer.peer_id} {kind} {reason}", "stream_refused", peer=peer.peer_id, type=kind, reason=reason
            )
            stream.abort(reason)

    async def _dispatch(self, opening: StreamOpening, rest: bytes, stream: TunnelStream, peer: VerifiedPeer) -> None:
        type = opening.type
        if type in CHANNEL_OF:
            await self._control.serve(stream, rest, peer, CHANNEL_OF[type])
            await stream.finish()
        elif type is StreamType.TUNNEL_HTTP:
            await self._serve_http(stream, opening.header, rest, peer)
        elif type is StreamType.ADMIN:
            await self._admin.serve(stream, rest, peer)
        else:
            raise SchemaError(f"streams of type {type.name} are not served by this version")


async def _read_opening(stream: TunnelStream) -> tuple[StreamOpening, bytes]:
    reader = OpeningReader()
    while True:
        data = await stream.read()
        if not data:
            raise SchemaError("the stream ended before it said what it is")
        opening = reader.feed(data)
        if opening is not None:
            return opening, reader.rest
