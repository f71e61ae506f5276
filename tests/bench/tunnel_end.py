"""One end of `bin/bench tunnel`, a process of its own: serves or measures streams of one kind.

Kinds: ``plain`` (TCP), ``tls`` (TLS 1.3 over TCP by Python's ssl, nothing of ours), ``tcp`` and ``quic`` (tunneld's
transports). Both ends of a kind run the same few lines; only what carries the bytes differs.

    python -m tests.bench.tunnel_end serve KIND FOLDER       prints its port, serves until its input ends
    python -m tests.bench.tunnel_end measure KIND FOLDER PORT    prints a JSON object
"""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import sys
import time
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from services.tunneld.io.connection import Connection
from services.tunneld.io.credentials import Credentials
from services.tunneld.io.quic import QuicEndpoint
from services.tunneld.io.stream import TunnelStream
from services.tunneld.io.tls import TlsEndpoint
from shared.certificates import issue, make_issuer, make_root
from shared.ids import MeshId
from shared.io.lifecycle import run_loop
from shared.multiaddrs import Address
from shared.peer_ids import peer_id_of

KINDS = ("plain", "tls", "tcp", "quic")
MESSAGE_BYTES = 16 * 1024
ROUND_TRIPS = 400
WARM_UP = 50
BULK_BYTES = {"plain": 1 << 30, "tls": 1 << 29, "tcp": 1 << 29, "quic": 1 << 24}
PART_BYTES = 256 * 1024
ECHO, BULK = b"e", b"b"


class Bytes(Protocol):
    """What both ends need of a stream."""

    async def read(self) -> bytes: ...

    async def write(self, data: bytes) -> None: ...


class PlainStream:
    """asyncio's own streams in the same shape."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        return await self._reader.read(PART_BYTES)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


# -- what both ends do ------------------------------------------------------------------------------------------------


async def serve_stream(stream: Bytes) -> None:
    """The first byte says what is wanted: everything back, or so many bytes of nothing."""
    data = await stream.read()
    mode, data = data[:1], data[1:]
    if mode == ECHO:
        while data or (data := await stream.read()):
            await stream.write(data)
            data = b""
        return
    while len(data) < 8:
        data += await stream.read()
    left, part = int.from_bytes(data[:8]), bytes(PART_BYTES)
    while left > 0:
        await stream.write(part[: min(left, PART_BYTES)])
        left -= PART_BYTES


async def measure_round_trips(stream: Bytes) -> float:
    """Median, milliseconds."""
    message, seconds = bytes(MESSAGE_BYTES), []
    await stream.write(ECHO)
    for number in range(WARM_UP + ROUND_TRIPS):
        began = time.perf_counter()
        await stream.write(message)
        got = 0
        while got < MESSAGE_BYTES:
            got += len(await stream.read())
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2] * 1000


async def measure_bulk(stream: Bytes, size: int) -> float:
    """MB/s from the other end to this one."""
    await stream.write(BULK + size.to_bytes(8))
    got = len(await stream.read())
    began, counted_from = time.perf_counter(), got
    while got < size:
        got += len(await stream.read())
    return (got - counted_from) / 1e6 / (time.perf_counter() - began)


# -- credentials ------------------------------------------------------------------------------------------------------


def write_credentials(folder: Path) -> None:
    """A mesh of two, for both ends to read."""
    now = datetime.datetime.now(datetime.UTC)
    root_key = ec.generate_private_key(ec.SECP256R1())
    root = make_root(root_key, now=now)
    issuer_key, own = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
    peer_id = peer_id_of(own.public_key().public_bytes_raw())
    issuer = make_issuer(issuer_key.public_key(), peer_id, root, root_key, now=now)
    (folder / "root.pem").write_bytes(root.public_bytes(Encoding.PEM))
    for name in ("serve", "measure"):
        key = Ed25519PrivateKey.generate()
        leaf = issue(key.public_key(), MeshId("bench"), "member", issuer, issuer_key, now=now)
        pem = b"".join(part.public_bytes(Encoding.PEM) for part in (leaf, issuer))
        pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.pem").write_bytes(pem)


def read_credentials(folder: Path, name: str) -> Credentials:
    pem = (folder / f"{name}.pem").read_bytes()
    key = load_pem_private_key(pem[pem.index(b"-----BEGIN PRIVATE KEY") :], None)
    assert isinstance(key, Ed25519PrivateKey)
    root = x509.load_pem_x509_certificate((folder / "root.pem").read_bytes())
    return Credentials(MeshId("bench"), root, tuple(x509.load_pem_x509_certificates(pem)), key)


# -- the two ends -----------------------------------------------------------------------------------------------------


def endpoint(kind: str, folder: Path, name: str) -> tuple[TlsEndpoint | QuicEndpoint, int]:
    """tunneld's transport on a free port, serving whatever comes."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    raw.bind(("127.0.0.1", 0))
    credentials = read_credentials(folder, name)
    tasks: set[asyncio.Task[None]] = set()

    def on_stream(_connection: Connection, stream: TunnelStream) -> None:
        tasks.add(asyncio.get_running_loop().create_task(serve_stream(stream)))

    if kind == "tcp":
        return TlsEndpoint(raw, lambda: credentials, lambda _connection: None, on_stream), raw.getsockname()[1]
    return QuicEndpoint(raw, lambda: credentials, lambda _connection: None, on_stream), raw.getsockname()[1]


async def serve(kind: str, folder: Path) -> None:
    if kind in ("tcp", "quic"):
        made, port = endpoint(kind, folder, "serve")
        await made.listen()
    else:

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve_stream(PlainStream(reader, writer))

        context = read_credentials(folder, "serve").server_context() if kind == "tls" else None
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context, limit=PART_BYTES)
        port = server.sockets[0].getsockname()[1]
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def measure(kind: str, folder: Path, port: int) -> None:
    connection: Connection | None = None
    if kind in ("tcp", "quic"):
        made, _ = endpoint(kind, folder, "measure")
        address = Address("ip4", "127.0.0.1", port, "tcp" if kind == "tcp" else "quic")
        connection = await made.dial(address, None)

    async def stream() -> Bytes:
        if connection is not None:
            return await connection.open_stream()
        context = read_credentials(folder, "measure").client_context() if kind == "tls" else None
        name = "" if context else None
        return PlainStream(
            *await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name, limit=PART_BYTES)
        )

    figures = {
        "round_trip_ms": await measure_round_trips(await stream()),
        "bulk_mb_s": await measure_bulk(await stream(), BULK_BYTES[kind]),
    }
    print(json.dumps(figures), flush=True)


def main() -> None:
    verb, kind, folder, *rest = sys.argv[1:]
    run_loop(serve(kind, Path(folder)) if verb == "serve" else measure(kind, Path(folder), int(rest[0])))


if __name__ == "__main__":
    main()
