"""One HTTP port on uvicorn's protocol, without uvicorn's server: listening sockets come and go from the keeper, and
ending has two ways.

``uvicorn.Server`` closes connections that are accepted but have no request yet, which clients see as a reset, and
wakes ten times a second. Here a draining service answers every connection it accepted: each response says
``Connection: close``, and only a connection that stays idle for ``IDLE_SECONDS`` is closed.

Source: PLUMBING measurements of restarts under load; uvicorn's ``Server.startup`` and ``Server.shutdown``.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import socket
import traceback
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from shared.io import log

KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of common clients keep connections (httpx 5 s, Node 60 s), so that they close first."""
IDLE_SECONDS = 6.0
"""While draining: how long a connection without a request is kept. Longer than httpx reuses one."""
SILENT_SECONDS = 60.0
"""A connection that never completes the head of its first request is closed after this."""
POLL_SECONDS = 0.1
BACKLOG = 2048


class HttpService:
    """Serves ``app`` (plain ASGI) on any number of listening sockets."""

    def __init__(self, name: str, app: Any, protocol: Any = "httptools") -> None:
        """``protocol``: a uvicorn protocol class, or its name."""
        self.name = name
        self._config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=BACKLOG,
        )
        self._config.load()
        self.state = ServerState()
        self._servers: dict[str, asyncio.Server] = {}
        self._ending = False
        self._set_headers()

    @property
    def connections(self) -> int:
        return len(self.state.connections)

    async def listen(self, key: str, listener: socket.socket) -> None:
        """Accept on ``listener`` (owned from here on) in place of the one given before under ``key``."""
        self.stop_listening(key)
        self._servers[key] = await asyncio.get_running_loop().create_server(
            self._protocol, sock=listener, backlog=BACKLOG
        )

    def stop_listening(self, key: str) -> None:
        server = self._servers.pop(key, None)
        if server is not None:
            server.close()

    async def tick(self) -> None:
        """For ever: the Date header each second, silent connections now and then."""
        silent: dict[Any, float] = {}
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            self._set_headers()
            now = loop.time()
            fresh: set[Any] = {connection for connection in self._connections() if connection.cycle is None}
            silent = {connection: silent.get(connection, now) for connection in fresh}
            for connection, since in silent.items():
                if now - since > SILENT_SECONDS:
                    connection.transport.close()

    async def drain(self) -> None:
        """Accept nothing more and return once every connection has ended. No time limit for running requests."""
        self._end_accepting()
        loop = asyncio.get_running_loop()
        idle_until = loop.time() + IDLE_SECONDS
        while self.state.connections:
            await asyncio.sleep(POLL_SECONDS)
            if loop.time() >= idle_until:
                self._close_idle()

    async def close(self, grace_seconds: float) -> None:
        """Accept nothing more, give running requests ``grace_seconds``, then end them."""
        self._end_accepting()
        self._close_idle()
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_seconds
        # uvicorn tells nobody when a connection ends.
        while self.state.connections and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        for connection in self._connections():
            connection.transport.abort()
        for task in list(self.state.tasks):
            task.cancel()
        await asyncio.gather(*self.state.tasks, return_exceptions=True)

    def _end_accepting(self) -> None:
        for key in list(self._servers):
            self.stop_listening(key)
        self._ending = True
        self._set_headers()

    def _close_idle(self) -> None:
        for connection in self._connections():
            connection.shutdown()

    def _connections(self) -> list[Any]:
        return list(self.state.connections)

    def _set_headers(self) -> None:
        headers = [(b"date", email.utils.formatdate(usegmt=True).encode())]
        if self._ending:
            headers.append((b"connection", b"close"))
        # In place: running responses hold this list.
        self.state.default_headers[:] = headers

    def _protocol(self) -> asyncio.Protocol:
        protocol_class: Any = self._config.http_protocol_class
        protocol: asyncio.Protocol = protocol_class(config=self._config, server_state=self.state, app_state={})
        return protocol


class LibraryLog(logging.Handler):
    """Sends what uvicorn and asyncio log to this daemon's log, floods thinned out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._write = log.LogOnce(log.warning)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().strip()
        if record.exc_info and record.exc_info[1] is not None:
            last = "".join(traceback.format_exception(record.exc_info[1])).strip().replace("\n", " | ")
            self._write(f"{message} {last[-200:]}", "library_error", logger=record.name, message=message, trace=last)
            return
        self._write(message, "library_warning", logger=record.name, message=message)

    def install(self) -> None:
        for name in ("uvicorn.error", "asyncio"):
            logger = logging.getLogger(name)
            logger.addHandler(self)
            logger.setLevel(logging.WARNING)
            logger.propagate = False
        logging.getLogger("uvicorn.access").propagate = False
