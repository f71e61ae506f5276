"""uvicorn's HTTP protocol with two changes: answers leave in fewer writes, and half-closed clients get theirs.

The head of an answer waits for the first bytes of its body, which follow at once: one segment and one system call
instead of two, which is a fifth of the cost of a small answer.

An end of stream from the client means one of two things: it has no more to send (half-close, legal HTTP), or it is
gone. uvicorn takes it for the second and drops the answer. Here the connection stays, and who is there is found out:

=============================  ==============================================================================
client on this machine         the kernel's socket table tells whether a process still holds its end (Linux)
client elsewhere, no answer    an interim ``100 Continue``, which every HTTP/1.1 client skips: a client that is
yet                            gone answers it with a reset, and the next one fails
answer under way               its own bytes do the same
=============================  ==============================================================================

Source: TRAPS 26 (client gone during prefill), 33 (half-close).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

LOCAL_CHECK_SECONDS = 0.005
"""So soon a client on this machine that is gone is noticed; by then its process has let go of its end."""
FIRST_CHECK_SECONDS = 0.1
CHECK_SECONDS = 0.3
TABLE_SECONDS = 0.05
"""How long one reading of the kernel's table serves all connections."""
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

Presence = Literal["present", "gone", "unknown"]


class LeanCycle(RequestResponseCycle):
    """One request and its answer. ``send`` does what uvicorn's does, with one write per message that has bytes."""

    _head = b""

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if not self.response_started:
            if kind != "http.response.start":
                raise RuntimeError(f"expected http.response.start, got {kind}")
            self.response_started = True
            self.waiting_for_100_continue = False
            self._head = self._build_head(message["status"], message.get("headers", ()))
            return
        if self.response_complete or kind != "http.response.body":
            raise RuntimeError(f"unexpected {kind}")
        body = message.get("body", b"")
        more_body = message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            body = b""
        elif self.chunked_encoding:
            framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = framed if more_body else framed + b"0\r\n\r\n"
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("body longer than Content-Length")
        if self._head:
            body = self._head + body
            self._head = b""
        if body:
            self.transport.write(body)
        if more_body:
            return
        if self.expected_content_length != 0:
            raise RuntimeError("body shorter than Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _build_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        parts = [STATUS_LINE[status]]
        lines = 2
        closes = False
        for name, value in (*self.default_headers, *headers):
            if name == b"content-length":
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.chunked_encoding = True
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
                closes = True
            parts += (name, b": ", value, b"\r\n")
            lines += 1
        if not self.keep_alive and not closes:
            parts.append(b"connection: close\r\n")
            lines += 1
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            parts.append(b"transfer-encoding: chunked\r\n")
            lines += 1
        parts.append(b"\r\n")
        head = b"".join(parts)
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise RuntimeError("line break in a header")
        return head


class InferenceProtocol(HttpToolsProtocol):
    """One client connection."""

    _serving: RequestResponseCycle | None = None
    _check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Under asyncio, a listener that was made without a protocol number gives connections without it.
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        # uvicorn makes the cycle in the middle of a long method; its task runs only after this returns.
        cycle.__class__ = LeanCycle
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        newest = self.cycle
        if newest is None or newest.response_complete or newest.more_body:
            return None
        newest.keep_alive = False
        self._check = self.loop.call_later(LOCAL_CHECK_SECONDS, self._check_client, True)
        return True

    def _check_client(self, first: bool = False) -> None:
        """`first`: only the kernel's table is asked; most half-closed clients have their answer before the next."""
        self._check = None
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            return
        presence = client_presence(self.client, self.server)
        if presence == "gone":
            self.transport.abort()
            return
        serving = self._serving
        if presence == "unknown" and not first and serving is not None and not serving.response_started:
            self.transport.write(INTERIM)
        self._check = self.loop.call_later(FIRST_CHECK_SECONDS if first else CHECK_SECONDS, self._check_client)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        serving = self._serving
        if serving is not None and serving is not self.cycle and not serving.response_complete:
            # uvicorn tells only the newest of several pipelined requests.
            serving.disconnected = True
            serving.message_event.set()
        super().connection_lost(exc)


_table: tuple[float, str] = (float("-inf"), "")


def client_presence(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> Presence:
    """Whether a process still holds the client's end of a connection that it has shut down at least half."""
    if client is None or server is None or server[1] is None or sys.platform != "linux":
        return "unknown"
    try:
        client_address = ipaddress.ip_address(client[0].partition("%")[0])
        server_address = ipaddress.ip_address(server[0].partition("%")[0])
    except ValueError:
        return "unknown"
    if not client_address.is_loopback and client_address != server_address:
        return "unknown"
    pairs = [
        f" {table_address(client_address, client[1], form)} {table_address(server_address, server[1], form)} "
        for form in (False, True)
    ]
    # A table read a moment ago may lack a new connection, or show an old one between the same ports.
    presence = _presence_in(_socket_table(TABLE_SECONDS), pairs)
    return _presence_in(_socket_table(0.0), pairs) if presence == "gone" else presence


def _presence_in(table: str, pairs: list[str]) -> Presence:
    if not table:
        return "unknown"
    for pair in pairs:
        at = table.find(pair)
        if at >= 0:
            # local remote state queues timer retransmits uid timeout inode: no inode, no process.
            return "gone" if table[at:].split(None, 9)[8] == "0" else "present"
    return "gone"


def table_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, mapped: bool) -> str:
    """As ``/proc/net/tcp`` writes it: words of 32 bits in the machine's byte order. ``mapped``: IPv4 as IPv6."""
    packed = address.packed
    if mapped and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"


def _socket_table(max_age_seconds: float) -> str:
    global _table
    now = time.monotonic()
    if now - _table[0] >= max_age_seconds:
        text = ""
        for name in ("/proc/net/tcp", "/proc/net/tcp6"):
            try:
                with open(name, encoding="ascii") as file:
                    text += file.read()
            except OSError:
                continue
        _table = (now, text)
    return _table[1]
