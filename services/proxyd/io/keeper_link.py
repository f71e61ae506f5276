"""One connection between the keeper and a worker: JSON lines over a unix socket, listening sockets beside them.

====================  =====================================================================================
worker → keeper       ``{"type": "hello", "pid", "started_seconds", "serving", "wanted", "offers": [{name, host,
                      port}]}`` with the offered sockets in that order and standard output; later
                      ``serving``, and ``wanted`` with {name, host, port, needs_key} when ``mesh.toml`` was read
keeper → worker       ``{"type": "listeners", "listeners": [{name, host, port, reason}], "others"}`` with the
                      sockets of those whose port is not 0, in that order; ``release`` {name}; ``drain`` {log}
                      with the successor's standard output; ``stop``
====================  =====================================================================================
"""

from __future__ import annotations

import array
import json
import os
import socket
from typing import Any

LINE_LIMIT_BYTES = 64 * 1024
DESCRIPTOR_LIMIT = 8
SEND_SECONDS = 1.0
"""Messages are a few hundred bytes into a socket buffer of 200 KB: a peer that blocks them is stuck."""


class LinkClosed(Exception):
    """The other end is gone, or it spoke nonsense."""


class Link:
    """A non-blocking connection. Every descriptor received belongs to the caller of :meth:`take_descriptors`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._buffer = b""
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        """Raises: LinkClosed."""
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())] if descriptors else []
        )
        try:
            self._connection.settimeout(SEND_SECONDS)
            sent = self._connection.sendmsg([data], ancillary)
            if sent < len(data):
                self._connection.sendall(data[sent:])
        except OSError as error:
            raise LinkClosed(str(error)) from error
        finally:
            if self._connection.fileno() >= 0:
                self._connection.setblocking(False)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, possibly none. Raises: LinkClosed."""
        size = array.array("i").itemsize
        try:
            data, ancillary, _flags, _address = self._connection.recvmsg(
                LINE_LIMIT_BYTES, socket.CMSG_SPACE(DESCRIPTOR_LIMIT * size)
            )
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkClosed(str(error)) from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % size])
                self._descriptors += numbers
                for number in numbers:
                    os.set_inheritable(number, False)
        if not data:
            raise LinkClosed("closed by the other end")
        lines = (self._buffer + data).split(b"\n")
        self._buffer = lines.pop()
        if len(self._buffer) > LINE_LIMIT_BYTES:
            raise LinkClosed("a line is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise LinkClosed(f"not JSON: {error}") from error
        if not all(isinstance(message, dict) for message in messages):
            raise LinkClosed("a message is a JSON object")
        return messages

    def take_descriptors(self, count: int) -> list[int]:
        """The next ``count`` received descriptors, in order. Raises: LinkClosed when there are fewer."""
        if len(self._descriptors) < count:
            raise LinkClosed(f"{count} sockets were announced, {len(self._descriptors)} came")
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return taken

    def close(self) -> None:
        """Close the connection and every descriptor nobody took."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._connection.close()
