"""Draining and closing an HTTP service, with real connections."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.proxyd.io import http_service
from services.proxyd.io.http_service import HttpService, LibraryLog
from shared.io import log
from tests.waiting import run_async, until

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Slow:
    """Answers ``begin`` at once and ``end`` when released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.started = 0
        self.cancelled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.started += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begin ", "more_body": True})
        try:
            if scope["path"] == "/slow":
                await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await send({"type": "http.response.body", "body": b"end"})


def serving(test: Callable[[HttpService, Slow, int], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        app = Slow()
        service = HttpService("test", app)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await service.listen("api", listener)
        try:
            await test(service, app, port)
        finally:
            await service.close(0)

    run_async(run())


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """One request on an open connection; its head and body."""
    writer.write(GET)
    return await reader.readuntil(b"0\r\n\r\n")


def test_draining_finishes_what_runs_and_answers_open_connections(monkeypatch: Any) -> None:
    monkeypatch.setattr(http_service, "IDLE_SECONDS", 1.0)

    async def test(service: HttpService, app: Slow, port: int) -> None:
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(GET.replace(b"/ ", b"/slow "))
        fresh = await asyncio.open_connection("127.0.0.1", port)
        kept = await asyncio.open_connection("127.0.0.1", port)
        assert b"connection: close" not in await exchange(*kept)
        await until(lambda: app.started == 2 and service.connections == 3, 5, "all connections are there")
        drain = asyncio.ensure_future(service.drain())
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
        looked = asyncio.get_running_loop().time() + 3 * http_service.POLL_SECONDS
        await until(lambda: asyncio.get_running_loop().time() > looked, 5, "the service has looked for idle ones")
        for reader, writer in (fresh, kept):
            assert b"connection: close" in await exchange(reader, writer)
            assert await reader.read() == b""
            writer.close()
        assert not drain.done()
        app.release.set()
        assert b"end" in await slow_reader.readuntil(b"0\r\n\r\n")
        await asyncio.wait_for(drain, 5)
        slow_writer.close()

    serving(test)


def test_draining_closes_connections_that_stay_idle(monkeypatch: Any) -> None:
    monkeypatch.setattr(http_service, "IDLE_SECONDS", 0.2)

    async def test(service: HttpService, app: Slow, port: int) -> None:
        idle = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: service.connections == 1, 5, "the connection is there")
        await asyncio.wait_for(service.drain(), 5)
        assert await idle[0].read() == b""
        idle[1].close()

    serving(test)


def test_closing_ends_a_stream_visibly_and_cancels_its_work() -> None:
    async def test(service: HttpService, app: Slow, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/slow "))
        await reader.readuntil(b"begin")
        await service.close(0.05)
        try:
            rest = await reader.read()
        except ConnectionResetError:
            rest = b""
        assert b"0\r\n\r\n" not in rest
        assert app.cancelled == 1
        assert service.connections == 0
        writer.close()

    serving(test)


def test_closing_lets_a_short_request_finish() -> None:
    async def test(service: HttpService, app: Slow, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/slow "))
        await reader.readuntil(b"begin")
        close = asyncio.ensure_future(service.close(5))
        app.release.set()
        assert b"end" in await reader.readuntil(b"0\r\n\r\n")
        await close
        assert app.cancelled == 0
        writer.close()

    serving(test)


def test_a_listener_can_be_replaced_while_serving() -> None:
    async def test(service: HttpService, app: Slow, port: int) -> None:
        kept = await asyncio.open_connection("127.0.0.1", port)
        await exchange(*kept)
        listener = socket.create_server(("127.0.0.1", 0))
        other = listener.getsockname()[1]
        await service.listen("api", listener)
        assert b"end" in await exchange(*await asyncio.open_connection("127.0.0.1", other))
        assert b"end" in await exchange(*kept), "connections of the old listener live on"

    serving(test)


def test_a_connection_that_never_asks_is_closed_and_others_are_not(monkeypatch: Any) -> None:
    monkeypatch.setattr(http_service, "SILENT_SECONDS", 0.5)

    async def test(service: HttpService, app: Slow, port: int) -> None:
        tick = asyncio.ensure_future(service.tick())
        silent = await asyncio.open_connection("127.0.0.1", port)
        silent[1].write(b"GET / HT")
        kept = await asyncio.open_connection("127.0.0.1", port)
        await exchange(*kept)
        assert await asyncio.wait_for(silent[0].read(), 10) == b""
        assert b"end" in await exchange(*kept)
        tick.cancel()
        silent[1].close()
        kept[1].close()

    serving(test)


def test_what_libraries_log_becomes_one_line_and_a_flood_stays_readable() -> None:
    text = io.StringIO()
    log.use_stream(text)
    try:
        handler = LibraryLog()
        for _ in range(100):
            handler.emit(logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "Invalid HTTP request", (), None))
        try:
            raise ValueError("two\nlines")
        except ValueError:
            record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "in app", (), sys.exc_info())
        handler.emit(record)
    finally:
        log.use_stream(sys.stdout)
    lines = text.getvalue().splitlines()
    assert len(lines) == 8, "1, 2, 4 … 64, and the error"
    assert "event=library_error" in lines[-1]
    assert "ValueError" in lines[-1]
