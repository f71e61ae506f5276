"""A real bus server with a small state of its own, and bare ZeroMQ clients that know nothing of our code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import zmq

from shared import codec
from shared.ids import ModelName
from shared.io.bus import BusServer, Mirror
from shared.io.drive import Tasks
from shared.messages.daemon import Done, StoryEntry
from shared.messages.mesh import CountUnserved
from shared.paths import NodePaths

NAME = "gossipd"
PROBE = "probe "
"""Words that only test whether publications arrive."""


class State:
    """A daemon whose whole state is a list of words, published one by one as ``CountUnserved``."""

    def __init__(self) -> None:
        self.facts: list[codec.Message] = []
        self.asked: list[codec.Message] = []
        self.snapshots = 0
        self.answer_with: Callable[[codec.Message, float], Awaitable[codec.Message]] | None = None

    def state_line(self) -> str:
        return f"{len(self.facts)} words"

    def snapshot(self) -> list[codec.Message]:
        self.snapshots += 1
        return list(self.facts)

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return tuple(StoryEntry(age_seconds=0.0, stimulus=str(n), effects=()) for n in range(limit))

    async def answer(self, request: codec.Message, deadline_seconds: float) -> codec.Message:
        self.asked.append(request)
        if self.answer_with is not None:
            return await self.answer_with(request, deadline_seconds)
        return Done(detail=f"answer {len(self.asked)}")


class LossyPublisher:
    """The server's real PUB socket, behind a switch that loses what is sent."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.losing = False

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        if not self.losing:
            self._socket.send_multipart(frames, flags)

    def close(self) -> None:
        self._socket.close()


class Daemon:
    """One life of the daemon."""

    def __init__(self, paths: NodePaths, state: State | None = None) -> None:
        self.state = state or State()
        self.tasks = Tasks()
        self.server = BusServer(NAME, paths, self.state, self.state.answer, self.tasks)
        self.network = LossyPublisher(self.server._publisher)
        self.server._publisher = self.network  # type: ignore[assignment]
        self.server.start()

    def say(self, text: str) -> None:
        """Change the state and publish the change."""
        fact = word(text)
        self.state.facts.append(fact)
        self.server.publish(fact)

    async def end(self) -> None:
        await self.tasks.cancel()
        self.server.close()


def word(text: str) -> CountUnserved:
    return CountUnserved(model=ModelName(text))


@asynccontextmanager
async def daemon(paths: NodePaths) -> AsyncIterator[Daemon]:
    one = Daemon(paths)
    try:
        yield one
    finally:
        await one.end()


class Copy:
    """What a mirror has made of the publications."""

    def __init__(self, paths: NodePaths) -> None:
        self.words: list[str] = []
        self.snapshots = 0
        self.boots: list[str] = []
        self.mirror = Mirror(NAME, paths, self.replace, self.add, self.boots.append)
        self.tasks = Tasks()
        self.mirror.start(self.tasks)

    def replace(self, messages: list[codec.Message]) -> None:
        self.snapshots += 1
        self.words = [message.model for message in messages if not message.model.startswith(PROBE)]

    def add(self, message: codec.Message) -> None:
        if not message.model.startswith(PROBE):
            self.words.append(message.model)

    async def end(self) -> None:
        await self.tasks.cancel()
        self.mirror.close()


@asynccontextmanager
async def copy_of(paths: NodePaths) -> AsyncIterator[Copy]:
    one = Copy(paths)
    try:
        yield one
    finally:
        await one.end()


class Bare:
    """``zmq.REQ`` and ``zmq.SUB`` with plain msgpack. Blocking calls run in a thread beside the server's loop."""

    def __init__(self, paths: NodePaths, daemon_name: str = NAME) -> None:
        self._paths = paths
        self._name = daemon_name
        self._sockets: list[zmq.Socket[bytes]] = []

    def socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, 5000)
        made.setsockopt(zmq.SNDTIMEO, 5000)
        made.connect(address)
        self._sockets.append(made)
        return made

    def req(self) -> zmq.Socket[bytes]:
        return self.socket(zmq.REQ, self._paths.requests(self._name))

    def dealer(self) -> zmq.Socket[bytes]:
        return self.socket(zmq.DEALER, self._paths.requests(self._name))

    def sub(self, topic: bytes = b"") -> zmq.Socket[bytes]:
        made = self.socket(zmq.SUB, self._paths.publisher(self._name))
        made.setsockopt(zmq.SUBSCRIBE, topic)
        return made

    async def ask(
        self,
        tag: str,
        fields: dict[str, Any] | None = None,
        *,
        request_id: str = "r",
        deadline_seconds: float = 5.0,
        socket: zmq.Socket[bytes] | None = None,
    ) -> list[Any]:
        """``[request_id, tag, fields]`` of the reply."""
        req = socket or self.req()

        def exchange() -> list[Any]:
            req.send(msgpack.packb([request_id, deadline_seconds, tag, fields or {}]))
            reply: list[Any] = msgpack.unpackb(req.recv())
            return reply

        return await asyncio.to_thread(exchange)

    async def hear(self, sub: zmq.Socket[bytes]) -> tuple[bytes, list[Any]]:
        """Topic and ``[boot_id, seq, tag, fields]`` of the next publication."""
        frames = await asyncio.to_thread(sub.recv_multipart)
        assert len(frames) == 2
        return frames[0], msgpack.unpackb(frames[1])

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
