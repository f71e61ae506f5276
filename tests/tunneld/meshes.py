"""Meshes for tests: real certificates, and nodes that are nothing but endpoints on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.tunneld.io.connection import Connection
from services.tunneld.io.credentials import Credentials
from services.tunneld.io.quic import QuicEndpoint
from services.tunneld.io.stream import TunnelStream
from services.tunneld.io.tls import TlsEndpoint
from shared.certificates import issue, make_issuer, make_root
from shared.ids import MeshId, PeerId
from shared.messages.trust import Grant
from shared.multiaddrs import Address, Transport
from shared.peer_ids import peer_id_of

NOW = datetime.datetime.now(datetime.UTC)


class TestMesh:
    """A root and an issuer; hands out credentials."""

    __test__ = False

    def __init__(self, mesh_id: str = "mesh-1", *, now: datetime.datetime = NOW) -> None:
        self.mesh_id = MeshId(mesh_id)
        self.now = now
        self.root_key = ec.generate_private_key(ec.SECP256R1())
        self.root = make_root(self.root_key, now=now)
        self.issuer_key = ec.generate_private_key(ec.SECP256R1())
        self.issuer = make_issuer(
            self.issuer_key.public_key(), PeerId("12issuer"), self.root, self.root_key, now=now
        )

    def credentials(
        self, key: Ed25519PrivateKey | None = None, *, grant: Grant = "member", now: datetime.datetime | None = None
    ) -> Credentials:
        own = key or Ed25519PrivateKey.generate()
        leaf = issue(own.public_key(), self.mesh_id, grant, self.issuer, self.issuer_key, now=now or self.now)
        return Credentials(self.mesh_id, self.root, (leaf, self.issuer), own)


def peer_of(credentials: Credentials) -> PeerId:
    return peer_id_of(credentials.key.public_key().public_bytes_raw())


@dataclass
class EndNode:
    """One node's endpoint; ``connections`` and ``streams`` are what others brought."""

    transport: Transport
    credentials: Credentials | None
    connections: asyncio.Queue[Connection] = field(default_factory=asyncio.Queue)
    streams: asyncio.Queue[tuple[Connection, TunnelStream]] = field(default_factory=asyncio.Queue)
    enrolments: asyncio.Queue[tuple[TunnelStream, str]] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        kind = socket.SOCK_STREAM if self.transport == "tcp" else socket.SOCK_DGRAM
        self.socket = socket.socket(socket.AF_INET, kind)
        self.socket.bind(("127.0.0.1", 0))
        self.port = int(self.socket.getsockname()[1])
        self.endpoint: TlsEndpoint | QuicEndpoint
        make: Callable[..., TlsEndpoint | QuicEndpoint] = TlsEndpoint if self.transport == "tcp" else QuicEndpoint
        self.endpoint = make(
            self.socket,
            lambda: self.credentials,
            self.connections.put_nowait,
            lambda connection, stream: self.streams.put_nowait((connection, stream)),
        )

    @property
    def address(self) -> Address:
        return Address("ip4", "127.0.0.1", self.port, self.transport)

    @property
    def peer_id(self) -> PeerId:
        assert self.credentials is not None
        return peer_of(self.credentials)

    async def dial(self, other: EndNode) -> Connection:
        connection = await self.endpoint.dial(other.address, other.peer_id)
        assert await self.connections.get() is connection
        return connection

    async def next_stream(self) -> TunnelStream:
        async with asyncio.timeout(10):
            return (await self.streams.get())[1]


@contextlib.asynccontextmanager
async def end_nodes(transport: Transport, *credentials: Credentials | None) -> AsyncIterator[list[EndNode]]:
    nodes = [EndNode(transport, item) for item in credentials]
    try:
        for node in nodes:
            await node.endpoint.listen()
        yield nodes
    finally:
        for node in nodes:
            node.endpoint.close()
            node.socket.close()


async def read_all(stream: TunnelStream) -> bytes:
    parts = []
    while data := await stream.read():
        parts.append(data)
    return b"".join(parts)


def root_of(credentials: Credentials) -> x509.Certificate:
    return credentials.root
