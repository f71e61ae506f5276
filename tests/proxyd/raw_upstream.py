"""An engine made of a bare socket: a test says byte for byte what it answers, and sees byte for byte what it gets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Received:
    """One request as it came over the wire."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return next((value for known, value in self.headers if known == name), None)


class Peer:
    """One connection from the proxy."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.gone = threading.Event()
        """Set when a read finds that the proxy closed the connection."""
        self._buffer = b""

    def read_request(self) -> Received | None:
        """None at the end of the connection."""
        while b"\r\n\r\n" not in self._buffer:
            if not self._more():
                return None
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        line, *rest = head.split(b"\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (item.partition(b":") for item in rest)]
        size = int(dict(headers).get(b"content-length", b"0"))
        while len(self._buffer) < size:
            if not self._more():
                return None
        body, self._buffer = self._buffer[:size], self._buffer[size:]
        return Received(line, headers, body)

    def _more(self) -> bool:
        try:
            data = self.connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self.gone.set()
        self._buffer += data
        return bool(data)

    def wait_gone(self) -> None:
        """Block until the proxy closes its end."""
        while self._more():
            pass

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def json(self, value: object, status: str = "200 OK") -> None:
        body = json.dumps(value).encode()
        self.send(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status.encode(), len(body), body)
        )

    def begin_stream(self) -> None:
        self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, text: str) -> None:
        self.chunk(b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")

    def end_stream(self) -> None:
        self.chunk(b"data: [DONE]\n\n")
        self.send(b"0\r\n\r\n")

    def close(self) -> None:
        self.connection.close()


Handler = Callable[[Peer, Received], None]


@dataclass
class RawUpstream:
    """``handler`` runs for each request, in a thread per connection; tests may replace it at any time."""

    handler: Handler
    port: int = 0
    requests: list[Received] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)


@contextmanager
def raw_upstream(handler: Handler | None = None) -> Iterator[RawUpstream]:
    """A listening engine; answers ``{"ok": true}`` by default."""
    listener = socket.create_server(("127.0.0.1", 0))
    upstream = RawUpstream(handler or (lambda peer, _request: peer.json({"ok": True})), listener.getsockname()[1])
    threads: list[threading.Thread] = []

    def serve(peer: Peer) -> None:
        try:
            while (request := peer.read_request()) is not None:
                upstream.requests.append(request)
                upstream.handler(peer, request)
        except OSError:
            peer.gone.set()
        finally:
            peer.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Peer(connection)
            upstream.peers.append(peer)
            thread = threading.Thread(target=serve, args=(peer,), daemon=True)
            threads.append(thread)
            thread.start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield upstream
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for peer in upstream.peers:
            try:
                peer.connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                peer.close()
        for thread in [accepting, *threads]:
            thread.join(5)


def refused_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
