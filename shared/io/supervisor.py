"""Talking to the supervisord of this node over its unix socket (XML-RPC). Source: supervisor's API documentation."""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from pathlib import Path
from typing import Any

SHUTDOWN_STATE_FAULT = 6


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__()
        self._path = path
        self._timeout_seconds = timeout_seconds

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _UnixConnection(self._path, self._timeout_seconds)


class Supervisor:
    """Blocking client; call it from a thread inside an event loop.

    Every method raises ``OSError`` when supervisord does not answer and ``xmlrpc.client.Fault`` when it refuses.
    """

    def __init__(self, url: str, timeout_seconds: float = 5.0) -> None:
        """``url`` is ``unix:///path/of/the.sock``, as in ``SUPERVISOR_SERVER_URL``."""
        self.socket_path = Path(url.removeprefix("unix://"))
        self._timeout_seconds = timeout_seconds

    def call(self, method: str, *arguments: Any) -> Any:
        """``supervisor.<method>(*arguments)``, on a connection of its own."""
        transport = _UnixTransport(str(self.socket_path), self._timeout_seconds)
        proxy = xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=transport)
        try:
            return getattr(proxy.supervisor, method)(*arguments)
        except http.client.HTTPException as error:
            raise OSError(f"supervisord at {self.socket_path} answered nonsense: {error}") from error
        finally:
            transport.close()

    def is_stopping(self) -> bool:
        """Whether supervisord is going down as a whole."""
        try:
            return int(self.call("getState")["statecode"]) < 1
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == SHUTDOWN_STATE_FAULT:
                return True
            raise

    def processes(self) -> list[dict[str, Any]]:
        """``getAllProcessInfo``: name, group, statename, pid, start, now, stdout_logfile, spawnerr …"""
        return list(self.call("getAllProcessInfo"))
