"""Small messages between the daemons of two nodes: one lasting stream per peer and channel, a frame per message.

Best effort like a datagram: what cannot be handed over soon is dropped and counted, so that a slow peer costs nothing
but its own messages. What arrives is published on the bus as ``FromPeer``; a peer that sends faster than
``RATE_FRAMES_PER_SECOND`` is read more slowly, which its own flow control then feels.

Source: docs/spec/framing.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.tunneld.framing import FrameReader, StreamType, encode_frame, encode_opening
from services.tunneld.io.stream import TunnelStream
from shared.certificates import VerifiedPeer
from shared.errors import MeshError, SchemaError
from shared.ids import PeerId
from shared.io import log
from shared.io.drive import Tasks
from shared.messages.tunnel import FromPeer, PeerChannel, SendToPeers

STREAM_OF: dict[PeerChannel, StreamType] = {
    "gossip": StreamType.GOSSIP,
    "peer_down": StreamType.PEER_DOWN,
    "peer_leaving": StreamType.PEER_LEAVING,
    "enroll": StreamType.ENROLL,
}
CHANNEL_OF: dict[StreamType, PeerChannel] = {type: channel for channel, type in STREAM_OF.items()}
END_SECONDS = 10.0
QUEUE_BYTES = 8 * 1024 * 1024
"""Waiting for one peer on one channel: two of the largest messages."""
QUEUE_MESSAGES = 256
STREAM_SECONDS = 60.0
"""Then the next message opens another stream, on whatever connection is the right one by then."""
RATE_FRAMES_PER_SECOND = 500.0
BURST_FRAMES = 200.0
FRAME_LIMIT_BYTES: dict[PeerChannel, int] = {
    "gossip": 4 * 1024 * 1024,
    "peer_down": 16 * 1024,
    "peer_leaving": 16 * 1024,
    "enroll": 256 * 1024,
}


@dataclass(slots=True)
class _Queue:
    payloads: deque[bytes] = field(default_factory=deque)
    size: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    running: bool = False


class ControlStreams:
    """Sends and receives for all peers. ``open_stream`` raises PeerUnreachable; ``count`` counts what is dropped."""

    def __init__(
        self,
        open_stream: Callable[[PeerId], Awaitable[TunnelStream]],
        publish: Callable[[FromPeer], None],
        count: Callable[[str], None],
        tasks: Tasks,
    ) -> None:
        self._open_stream = open_stream
        self._publish = publish
        self._count = count
        self._tasks = tasks
        self._queues: dict[tuple[PeerId, PeerChannel], _Queue] = {}
        self._dropped = log.LogOnce()

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, message: SendToPeers) -> None:
        """Queue for every peer named. Never blocks."""
        for peer_id in message.peers:
            key = (peer_id, message.channel)
            queue = self._queues.setdefault(key, _Queue())
            if len(queue.payloads) >= QUEUE_MESSAGES or queue.size + len(message.payload) > QUEUE_BYTES:
                self._drop(peer_id, message.channel, "it does not read")
                continue
            queue.payloads.append(message.payload)
            queue.size += len(message.payload)
            queue.changed.set()
            if not queue.running:
                queue.running = True
                self._tasks.start(self._run(key, queue), f"{message.channel} to {peer_id}")

    def forget(self, peer_id: PeerId) -> None:
        """The link is gone: what waits for it is stale by the time there is another."""
        for (peer, _), queue in self._queues.items():
            if peer == peer_id:
                queue.payloads.clear()
                queue.size = 0

    async def _run(self, key: tuple[PeerId, PeerChannel], queue: _Queue) -> None:
        peer_id, channel = key
        stream: TunnelStream | None = None
        on_its_way = 0
        try:
            stream = await self._open_stream(peer_id)
            await stream.write(encode_opening(STREAM_OF[channel], {}))
            until = asyncio.get_running_loop().time() + STREAM_SECONDS
            while True:
                while queue.payloads:
                    payload = queue.payloads.popleft()
                    queue.size -= len(payload)
                    on_its_way = 1
                    await stream.write(encode_frame(payload))
                    on_its_way = 0
                queue.changed.clear()
                try:
                    async with asyncio.timeout_at(until):
                        await queue.changed.wait()
                except TimeoutError:
                    if queue.payloads:
                        continue
                    # From here on messages go to a new stream; this one is ended, not cut: its last ones may be unread.
                    del self._queues[key]
                    await _end(stream)
                    return
        except MeshError as error:
            for _ in range(len(queue.payloads) + on_its_way):
                self._drop(peer_id, channel, error.detail)
        finally:
            if self._queues.get(key) is queue:
                del self._queues[key]
            if stream is not None:
                stream.abort("no longer used")

    def _drop(self, peer_id: PeerId, channel: str, reason: str) -> None:
        self._count("messages_to_peers_dropped")
        self._dropped(f"{peer_id} {channel} {reason}", "not_sent", peer=peer_id, channel=channel, reason=reason)

    # -- receiving ------------------------------------------------------------------------------------------------

    async def serve(self, stream: TunnelStream, rest: bytes, peer: VerifiedPeer, channel: PeerChannel) -> None:
        """Publish every frame until the stream ends. Raises: StreamLost, SchemaError for a frame over the limit."""
        reader = FrameReader(FRAME_LIMIT_BYTES[channel])
        loop = asyncio.get_running_loop()
        allowance, at = BURST_FRAMES, loop.time()
        data = rest
        while True:
            for payload in reader.feed(data):
                now = loop.time()
                allowance = min(BURST_FRAMES, allowance + (now - at) * RATE_FRAMES_PER_SECOND) - 1
                at = now
                if allowance < 0:
                    self._count("peers_slowed_down")
                    await asyncio.sleep(-allowance / RATE_FRAMES_PER_SECOND)
                self._publish(FromPeer(peer_id=peer.peer_id, payload=payload, channel=channel, grant=peer.grant))
            data = await stream.read()
            if not data:
                reader.finish()
                return


async def _end(stream: TunnelStream) -> None:
    """Raises: StreamLost."""
    await stream.finish()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            while await stream.read():
                pass


def channel_of(type: StreamType) -> PeerChannel:
    """Raises: SchemaError for a stream that carries no messages."""
    try:
        return CHANNEL_OF[type]
    except KeyError:
        raise SchemaError(f"a {type.name} stream carries no messages") from None
