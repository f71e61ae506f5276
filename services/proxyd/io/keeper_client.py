"""A worker's side of the keeper: gets the listening sockets, gives them back to a keeper that was killed.

The client holds its own copy of each listening socket for as long as the worker accepts on it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.proxyd.io.keeper_link import Link, LinkClosed
from shared.config import NodeConfig, is_loopback
from shared.io import log

RECONNECT_SECONDS = 0.05
SLOW_RECONNECT_SECONDS = 0.5
EAGER_ATTEMPTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerNote:
    """What the keeper says about one listener. ``port`` is 0 while nothing listens, for this ``reason``."""

    name: str
    host: str
    port: int
    reason: str

    @property
    def pending(self) -> bool:
        """The keeper is about to bind it."""
        return self.port == 0 and not self.reason


def wanted_listeners(config: NodeConfig) -> list[dict[str, Any]]:
    """What ``mesh.toml`` asks for, as the keeper takes it."""
    return [
        {
            "name": name,
            "host": section.host,
            "port": section.port,
            "needs_key": not is_loopback(section.host) and not config.api.allow_public_without_keys,
        }
        for name, section in (("api", config.api), ("console", config.console))
    ]


def log_to(descriptor: int) -> None:
    """Make ``descriptor`` this process's standard output and error: a replaced worker logs where its successor does."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class KeeperClient:
    """Keeps a connection to the keeper for the life of the worker.

    ``on_listeners(notes, new, others)`` gets the sockets that are not held yet, by name, and whether another worker
    answers meanwhile; ``on_release(name)`` must close
    one; ``on_drain()`` comes once a newer worker serves; ``on_stop()`` when the node goes down;
    ``on_connected(connected)`` when the keeper comes or goes.
    """

    def __init__(
        self,
        path: Path,
        wanted: list[dict[str, Any]],
        *,
        on_listeners: Callable[[list[ListenerNote], dict[str, socket.socket], bool], None],
        on_release: Callable[[str], None],
        on_drain: Callable[[], None],
        on_stop: Callable[[], None],
        on_connected: Callable[[bool], None],
    ) -> None:
        self._path = path
        self._wanted = wanted
        self._on_connected = on_connected
        self._on_listeners = on_listeners
        self._on_release = on_release
        self._on_drain = on_drain
        self._on_stop = on_stop
        self._held: dict[str, tuple[ListenerNote, socket.socket]] = {}
        self._link: Link | None = None
        self._serving = False
        self._started_seconds = time.monotonic()

    async def run(self) -> None:
        """Connect, listen to the keeper, and connect again when it is restarted; for ever."""
        attempts = 0
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, str(self._path))
            except OSError:
                connection.close()
                attempts += 1
                await asyncio.sleep(RECONNECT_SECONDS if attempts < EAGER_ATTEMPTS else SLOW_RECONNECT_SECONDS)
                continue
            attempts = 0
            self._link = Link(connection)
            try:
                self._introduce(self._link)
                self._on_connected(True)
                await self._listen(self._link)
            except (LinkClosed, KeyError, TypeError, ValueError) as error:
                log.warning("keeper_gone", reason=str(error))
            finally:
                self._link.close()
                self._link = None
                self._on_connected(False)
            await asyncio.sleep(RECONNECT_SECONDS)

    def announce_serving(self) -> None:
        """This worker answers requests: older ones may stop. Remembered for a keeper that comes later."""
        self._serving = True
        if self._link is not None:
            try:
                self._link.send({"type": "serving"})
            except LinkClosed:
                return

    def want(self, wanted: list[dict[str, Any]]) -> None:
        """The configuration was read again."""
        self._wanted = wanted
        if self._link is not None:
            try:
                self._link.send({"type": "wanted", "wanted": wanted})
            except LinkClosed:
                return

    def let_go(self, name: str) -> None:
        """Stop holding a listening socket."""
        held = self._held.pop(name, None)
        if held is not None:
            held[1].close()

    def close(self) -> None:
        """Let go of every socket. The connection ends with the task that runs :meth:`run`."""
        for name in list(self._held):
            self.let_go(name)

    def _introduce(self, link: Link) -> None:
        held = list(self._held.values())
        link.send(
            {
                "type": "hello",
                "pid": os.getpid(),
                "started_seconds": self._started_seconds,
                "serving": self._serving,
                "wanted": self._wanted,
                "offers": [{"name": note.name, "host": note.host, "port": note.port} for note, _ in held],
            },
            [*(listener.fileno() for _, listener in held), sys.stdout.fileno()],
        )

    async def _listen(self, link: Link) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        number = link.fileno()
        loop.add_reader(number, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                for message in link.receive():
                    self._handle(link, message)
        finally:
            # By number: a ValueError for a closed link here would swallow a cancellation.
            loop.remove_reader(number)

    def _handle(self, link: Link, message: dict[str, Any]) -> None:
        match message.get("type"):
            case "listeners":
                self._listeners(link, message["listeners"], bool(message["others"]))
            case "release":
                self.let_go(str(message["name"]))
                self._on_release(str(message["name"]))
            case "drain":
                if message["log"]:
                    log_to(link.take_descriptors(1)[0])
                self._on_drain()
            case "stop":
                self._on_stop()

    def _listeners(self, link: Link, entries: list[dict[str, Any]], others: bool) -> None:
        notes = [
            ListenerNote(
                name=str(entry["name"]), host=str(entry["host"]), port=int(entry["port"]), reason=str(entry["reason"])
            )
            for entry in entries
        ]
        bound = [note for note in notes if note.port]
        new: dict[str, socket.socket] = {}
        for note, number in zip(bound, link.take_descriptors(len(bound)), strict=True):
            received = socket.socket(fileno=number)
            held = self._held.get(note.name)
            if held is not None and os.path.sameopenfile(held[1].fileno(), number):
                received.close()
                self._held[note.name] = (note, held[1])
                continue
            self.let_go(note.name)
            self._held[note.name] = (note, received)
            new[note.name] = received.dup()
        self._on_listeners(notes, new, others)
