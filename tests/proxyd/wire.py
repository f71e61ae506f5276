"""Small things tests of the inference port do on sockets and in threads."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from tests.proxyd.plane import Plane

CHAT = "/v1/chat/completions"
T = TypeVar("T")


def send_chat(plane: Plane, path: str = CHAT, **fields: object) -> socket.socket:
    """A request whose answer is not waited for."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    connection.sendall(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )
    return connection


def events(text: bytes) -> list[bytes]:
    return [part for part in text.split(b"\n\n") if part]


def read_until(connection: socket.socket, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        data = connection.recv(65536)
        assert data, f"the connection ended before {text!r}: {seen!r}"
        seen += data
    return seen


def in_background(work: Callable[[], T]) -> list[T]:
    """Runs it in a thread; the list gets its result."""
    result: list[T] = []
    threading.Thread(target=lambda: result.append(work()), daemon=True).start()
    return result
