"""tunneld's data socket as proxyd sees it, with engines of other nodes behind it (docs/spec/tunnel_http.md).

A bare engine (``raw_upstream``) stands for each far node. What the real tunneld does is tested with the real one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shared import codec
from shared.ids import PeerId
from shared.messages.daemon import Refused
from shared.messages.tunnel import OpenHttp, StreamOpened


@dataclass
class FarNodes:
    """``engines``: port of the engine on each node. Nodes that are not in it cannot be reached."""

    path: Path
    engines: dict[PeerId, int] = field(default_factory=dict)
    refusals: dict[PeerId, Refused] = field(default_factory=dict)
    held: set[PeerId] = field(default_factory=set)
    """Nodes that do not answer yet."""
    opened: list[OpenHttp] = field(default_factory=list)
    left: list[PeerId] = field(default_factory=list)
    """Requests whose client went away while they waited."""
    released: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.released.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            size = int.from_bytes(_exactly(connection, 4))
            request = codec.decode(_exactly(connection, size))
            assert isinstance(request, OpenHttp)
            self.opened.append(request)
            peer = request.peer_id
            if peer in self.held:
                connection.settimeout(0.02)
                while peer in self.held and not self.released.is_set():
                    try:
                        if not connection.recv(1):
                            self.left.append(peer)
                            return
                    except TimeoutError:
                        continue
                connection.settimeout(None)
            if peer in self.refusals:
                _send(connection, self.refusals[peer])
                return
            if peer not in self.engines:
                _send(connection, Refused(code="peer_unreachable", detail=f"no link with {peer}: it left"))
                return
            _send(connection, StreamOpened())
            with socket.create_connection(("127.0.0.1", self.engines[peer])) as engine:
                threading.Thread(target=_copy, args=(connection, engine), daemon=True).start()
                _copy(engine, connection)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("it closed")
        data += part
    return data


def _send(connection: socket.socket, message: codec.Message) -> None:
    payload = codec.encode(message)
    connection.sendall(len(payload).to_bytes(4) + payload)


@contextlib.contextmanager
def far_nodes(path: Path) -> Iterator[FarNodes]:
    nodes = FarNodes(path)
    nodes.start()
    try:
        yield nodes
    finally:
        nodes.stop()
