"""Two nodes' data planes over a real connection: proxyd's end is played, launcherd and the engine are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httptools

from services.tunneld.framing import OpeningReader
from services.tunneld.io.connection import Connection
from services.tunneld.io.data_socket import DataSocket
from services.tunneld.io.engine_relay import EngineRelay
from services.tunneld.io.stream import TunnelStream
from shared import codec
from shared.errors import MeshError, PeerUnreachable
from shared.ids import HolderId, ModelName, PeerId, RequestId
from shared.io.bus import BusClient, Mirror
from shared.io.drive import Tasks
from shared.io.fresh_ids import new_boot_id
from shared.io.lease_client import LeaseClient
from shared.messages.tunnel import OpenHttp
from shared.multiaddrs import Transport
from shared.paths import NodePaths
from tests.tunneld.meshes import EndNode, TestMesh, end_nodes

MESH = TestMesh()


class Answer:
    """What proxyd's end got: the daemon's message, and HTTP as far as it came."""

    def __init__(self) -> None:
        self.opened: codec.Message | None = None
        self.status = 0
        self.body = b""
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


@dataclass
class Scene:
    """``a`` asks, ``b`` serves."""

    a: EndNode
    b: EndNode
    connection: Connection
    socket_path: Path
    leases: LeaseClient
    counts: Counter[str]
    served: list[TunnelStream]
    """``b``'s ends of the streams, as they came."""

    async def open(
        self, model: str = "alpha", *, peer: PeerId | None = None, deadline_seconds: float = 20.0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection as proxyd makes it, the first message sent."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket_path))
        request = OpenHttp(
            peer_id=peer or self.b.peer_id,
            model=ModelName(model),
            request_id=RequestId("r1"),
            deadline_seconds=deadline_seconds,
        )
        payload = codec.encode(request)
        writer.write(len(payload).to_bytes(4) + payload)
        return reader, writer

    async def request(self, head: bytes, body: bytes = b"", model: str = "alpha") -> Answer:
        """One whole request; the answer as far as it came."""
        answer = Answer()
        reader, writer = await self.open(model)
        try:
            answer.opened = await read_message(reader)
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            while data := await reader.read(65536):
                answer.feed(data)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
        return answer


async def read_message(reader: asyncio.StreamReader) -> codec.Message:
    size = int.from_bytes(await reader.readexactly(4))
    return codec.decode(await reader.readexactly(size))


@contextlib.asynccontextmanager
async def tunnel_scene(home: Path, transport: Transport = "tcp") -> AsyncIterator[Scene]:
    """``home`` is that of a node whose launcherd runs."""
    tasks = Tasks()
    counts: Counter[str] = Counter()
    client = BusClient("launcherd", NodePaths(home))
    leases = LeaseClient(client, tasks, HolderId(f"tunneld-{new_boot_id()}"), daemon="tunneld")
    Mirror(
        "launcherd", NodePaths(home), leases.on_snapshot, leases.on_message, lambda _boot: leases.on_new_boot()
    ).start(tasks)

    def count(what: str) -> None:
        counts[what] += 1

    served: list[TunnelStream] = []
    relay = EngineRelay(leases, count)
    async with end_nodes(transport, MESH.credentials(), MESH.credentials()) as (a, b):
        connection = await a.dial(b)

        async def open_stream(peer_id: PeerId) -> TunnelStream:
            if peer_id != b.peer_id:
                raise PeerUnreachable(f"no link with {peer_id}: it is not known here")
            return await connection.open_stream()

        async def serve() -> None:
            while True:
                came, stream = await b.streams.get()
                served.append(stream)
                tasks.start(_serve_one(relay, came, stream), "serve")

        tasks.start(serve(), "accept")
        data = DataSocket(home / "run" / "tunneld.data", open_stream, count, tasks)
        await data.start()
        try:
            yield Scene(a, b, connection, home / "run" / "tunneld.data", leases, counts, served)
        finally:
            data.close()
            await leases.close()
            await tasks.cancel()
            client.close()


async def _serve_one(relay: EngineRelay, connection: Connection, stream: TunnelStream) -> None:
    opening = OpeningReader()
    with contextlib.suppress(MeshError):
        while (head := opening.feed(await stream.read())) is None:
            pass
        await relay.serve(stream, head.header, opening.rest, connection.peer)
