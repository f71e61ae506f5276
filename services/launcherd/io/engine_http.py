"""The few HTTP calls launcherd makes to an engine: is it there, does it answer.

One connection per call, bounded in time by the caller and in size here. Requests of users never pass through this.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import httptools

REPLY_LIMIT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """Where an engine listens, and the key it asks for."""

    host: str
    port: int
    api_key: str


class _Reply:
    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


async def call_engine(
    address: EngineAddress, path: str, body: object = None, content_type: str = "application/json"
) -> tuple[int, bytes]:
    """GET, or POST of `body`, as JSON if it is no bytes; returns status and body.

    Raises: OSError when the connection fails or breaks, or the peer does not speak HTTP. Waits as long as the
    caller lets it.
    """
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
        f"Authorization: Bearer {address.api_key}\r\nConnection: close\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(head.encode() + payload)
        await writer.drain()
        reply = _Reply()
        parser = httptools.HttpResponseParser(reply)
        received = 0
        while not reply.complete:
            data = await reader.read(65_536)
            if not data:
                break
            received += len(data)
            if received > REPLY_LIMIT_BYTES:
                raise ConnectionError(f"the reply to {path} is longer than {REPLY_LIMIT_BYTES} bytes")
            parser.feed_data(data)
        if received == 0 or parser.get_status_code() == 0:
            raise ConnectionError(f"no reply to {path}")
        return parser.get_status_code(), bytes(reply.body)
    except httptools.HttpParserError as error:
        raise ConnectionError(f"not an HTTP reply to {path}: {error}") from error
    finally:
        writer.transport.abort()
