"""The mesh port: one number, bound for UDP (QUIC) and TCP (TLS) alike.

A mesh of one has nobody to talk to, so the sockets are held but do not listen: whoever connects is refused by the
kernel, and the port is known, ours and checked before the first peer is invited.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.errors import StateError

ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class MeshPort:
    """Both sockets on ``port``. Keep the object as long as the port is to be held."""

    port: int
    udp: socket.socket
    tcp: socket.socket

    def close(self) -> None:
        self.udp.close()
        self.tcp.close()


def bind_mesh_port(host: str, port: int, remembered: Path) -> MeshPort:
    """Bind ``port`` (0: the remembered one if it is free, else any free one) on ``host``.

    Raises: StateError when another process has the port, with how to find it.
    """
    if port:
        try:
            return _bind(host, port)
        except OSError as error:
            raise StateError(
                f"mesh port {port} (UDP and TCP on {host}) cannot be bound: {error.strerror or error}. "
                f"'ss -lnptu sport = :{port}' shows who has it; set another one with MESH_PORT or mesh.port"
            ) from error
    for candidate in [*_remembered(remembered), *([0] * ATTEMPTS)]:
        try:
            bound = _bind(host, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise StateError(f"cannot bind a mesh port on {host}: {error.strerror or error}") from error
            continue
        # A full disk costs only that the next start may get another number.
        with contextlib.suppress(OSError):
            remembered.write_text(str(bound.port))
        return bound
    raise StateError(f"found no port on {host} that is free for UDP and TCP in {ATTEMPTS} attempts")


def _remembered(path: Path) -> list[int]:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return []
    return [number] if 0 < number <= 65535 else []


def _bind(host: str, port: int) -> MeshPort:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tcp = socket.socket(family, socket.SOCK_STREAM)
    udp = socket.socket(family, socket.SOCK_DGRAM)
    try:
        _bind_tcp(tcp, host, port)
        number = int(tcp.getsockname()[1])
        udp.bind((host, number))
    except OSError:
        tcp.close()
        udp.close()
        raise
    return MeshPort(port=number, udp=udp, tcp=tcp)


def _bind_tcp(tcp: socket.socket, host: str, port: int) -> None:
    """Exclusively, but for what is left of an earlier life's connections (TIME_WAIT): those would hold a restart up
    for a minute. The option is cleared again, so that nobody else may share the port while it does not listen.
    """
    try:
        tcp.bind((host, port))
    except OSError as error:
        if not port or error.errno != errno.EADDRINUSE:
            raise
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((host, port))
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def interface_addresses(host: str) -> tuple[str, ...]:
    """IP addresses a bind to ``host`` can be reached at."""
    if host == "localhost":
        return ("127.0.0.1",)
    if host not in ("0.0.0.0", "::"):
        return (host,)
    families = {socket.AF_INET} if host == "0.0.0.0" else {socket.AF_INET, socket.AF_INET6}
    return tuple(
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families
    )
