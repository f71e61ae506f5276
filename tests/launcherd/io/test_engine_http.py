"""The small HTTP client: whole replies in whatever pieces they come, bounded, errors as OSError."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.launcherd.io import engine_http
from services.launcherd.io.engine_http import EngineAddress, call_engine

Run = Callable[[Coroutine[Any, Any, Any]], Any]


async def call_with(reply: list[bytes], body: object = None) -> tuple[tuple[int, bytes], bytes]:
    """What a call gives when a server sends these pieces, and what the server got."""
    received = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received = await reader.readuntil(b"\r\n\r\n")
        if body is not None:
            received += await reader.readexactly(len(json.dumps(body)))
        for piece in reply:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = EngineAddress(host="127.0.0.1", port=server.sockets[0].getsockname()[1], api_key="secret")
        return await call_engine(address, "/path", body), received


def test_a_post_carries_key_and_json(run: Run) -> None:
    reply, received = run(call_with([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"], {"a": 1}))
    assert reply == (200, b"hi")
    assert received.startswith(b"POST /path HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in received
    assert received.endswith(b'\r\n\r\n{"a": 1}')


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 503 Loading\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n"],
        [b"HTTP/1.1 503 Loading\r\nContent-Length: 3\r\n\r\nhi!"],
        [b"HTTP/1.1 503 Loading\r\n\r\nhi!"],
        [bytes([byte]) for byte in b"HTTP/1.1 503 Loading\r\nContent-Length: 3\r\n\r\nhi!"],
    ],
)
def test_replies_in_any_framing_and_pieces(run: Run, pieces: list[bytes]) -> None:
    assert run(call_with(pieces))[0] == (503, b"hi!")


@pytest.mark.parametrize("reply", [[], [b"SSH-2.0-OpenSSH\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]])
def test_no_http_is_an_os_error(run: Run, reply: list[bytes]) -> None:
    with pytest.raises(ConnectionError):
        run(call_with(reply))


def test_an_endless_reply_is_cut_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_http, "REPLY_LIMIT_BYTES", 1000)
    with pytest.raises(ConnectionError, match="longer than 1000"):
        run(call_with([b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 5000]))
