"""One TLS socket against a peer that does not keep to the framing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.tunneld.chunks import END_BYTES, encode_chunk
from services.tunneld.io.tls_socket import TlsSocket, TlsStream
from shared import codec
from shared.errors import StreamLost
from tests.tunneld.bounded import bounded, until


class Pair:
    """A socket and the plain bytes that reach it: TLS is not what is tested here."""

    async def __aenter__(self) -> Pair:
        made: asyncio.Future[TlsSocket] = asyncio.get_running_loop().create_future()

        def accept() -> TlsSocket:
            made.set_result(TlsSocket())
            return made.result()

        self.server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        self.reader, self.writer = await asyncio.open_connection(*self.server.sockets[0].getsockname())
        self.socket = await made
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.writer.close()
        self.socket.close()
        self.server.close()

    def greet(self) -> None:
        self.message({"v": 1})

    def message(self, message: Any) -> None:
        payload = codec.pack(message)
        self.writer.write(len(payload).to_bytes(4) + payload)


@bounded
async def test_stream_bytes_that_come_with_the_greeting_wait_for_the_stream() -> None:
    async with Pair() as pair:
        streams: list[TlsStream] = []
        pair.greet()
        pair.writer.write(encode_chunk(b"x" * 20_000) + END_BYTES)
        assert await pair.socket.greeting(5) == {"v": 1}
        pair.socket.on_stream = lambda _socket, stream: streams.append(stream)
        await asyncio.sleep(0)
        pair.socket.carry_streams(is_opener=False)
        await until(lambda: streams)
        assert len(await streams[0].read()) == 20_000
        assert await streams[0].read() == b""


@pytest.mark.parametrize(
    "wire",
    [
        (1 << 31).to_bytes(4),
        (5000).to_bytes(4) + b"x" * 5000,
        (1).to_bytes(4) + b"\xc1",
        (1).to_bytes(4) + b"\x05",
    ],
    ids=["4 GiB", "too large", "no msgpack", "no map"],
)
@bounded
async def test_a_greeting_that_is_none_ends_the_connection(wire: bytes) -> None:
    """TRAPS 5: a length prefix of gigabytes costs four bytes."""
    async with Pair() as pair:
        pair.writer.write(wire)
        with pytest.raises(StreamLost):
            await pair.socket.greeting(5)
        assert await pair.reader.read() == b"" or pair.socket.lost


HI = encode_chunk(b"hi")


@pytest.mark.parametrize(("is_opener", "wire"), [(True, HI), (False, HI + END_BYTES + HI)])
@bounded
async def test_a_stream_at_the_wrong_end_or_after_its_end_breaks_the_connection(is_opener: bool, wire: bytes) -> None:
    async with Pair() as pair:
        streams: list[TlsStream] = []
        pair.greet()
        await pair.socket.greeting(5)
        pair.socket.on_stream = lambda _socket, stream: streams.append(stream)
        pair.socket.carry_streams(is_opener=is_opener)
        pair.writer.write(wire)
        await until(lambda: pair.socket.lost is not None)
        for stream in streams:
            with pytest.raises(StreamLost, match="broke the framing"):
                await stream.read()


@bounded
async def test_a_lost_connection_wakes_the_writer_who_waits() -> None:
    async with Pair() as pair:
        pair.greet()
        await pair.socket.greeting(5)
        pair.socket.carry_streams(is_opener=True)
        stream = pair.socket.begin()
        writing = asyncio.ensure_future(stream.write(b"x" * 64 * 1024 * 1024))
        await until(lambda: pair.socket.paused is not None)
        transport = pair.writer.transport
        transport.abort()
        with pytest.raises(StreamLost):
            await writing
