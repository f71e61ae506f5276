"""The way to a place as the system sees it: name, route, MTU, and whether its ports answer. No handshake.

Source: docs/spec/probe.md; ip(7) for ``IP_MTU``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import replace

import psutil

from shared.probe import Ending, Path, Place

NAME_SECONDS = 3.0
CONNECT_SECONDS = 3.0
REFUSAL_SECONDS = 0.5
"""How long a machine may take to say that nothing has a UDP port."""
IP_MTU = 14
IPV6_MTU = 24
"""Linux; Python has no names for them."""
FAMILIES = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}
FAR = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM)


async def read_path(place: Place) -> Path:
    """What can be learned within seconds. Never raises an OSError: each is part of the answer."""
    loop = asyncio.get_running_loop()
    path = Path(place)
    try:
        async with asyncio.timeout(NAME_SECONDS):
            found = await loop.getaddrinfo(
                place.host, place.port, family=FAMILIES.get(place.family, 0), type=socket.SOCK_DGRAM
            )
    except TimeoutError:
        return replace(path, name_error=f"no name server answered within {NAME_SECONDS:g} s")
    except (OSError, UnicodeError) as error:
        return replace(path, name_error=getattr(error, "strerror", None) or str(error))
    family, _, _, _, remote = found[0]
    path = replace(path, ip=str(remote[0]))
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.setblocking(False)
        try:
            udp.connect(remote)
        except OSError as error:
            return replace(path, route_error=error.strerror or str(error))
        local_ip = str(udp.getsockname()[0])
        path = replace(path, local_ip=local_ip, interface=_interface_of(local_ip), mtu_bytes=_mtu_of(udp))
        (tcp, detail), refused = await asyncio.gather(_connect(family, remote), _is_refused(udp))
    return replace(path, tcp=tcp, tcp_detail=detail, udp_refused=refused)


async def _connect(family: int, remote: object) -> tuple[Ending, str]:
    with socket.socket(family, socket.SOCK_STREAM) as tcp:
        tcp.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(tcp, remote)  # type: ignore[arg-type]
        except TimeoutError:
            return "silent", ""
        except ConnectionRefusedError:
            return "refused", ""
        except OSError as error:
            words = os.strerror(error.errno) if error.errno else str(error)
            return ("unreachable" if error.errno in FAR else "silent"), words
    return "ok", ""


async def _is_refused(udp: socket.socket) -> bool:
    """One byte, which no QUIC server answers: only the machine does, when nobody has the port."""
    loop = asyncio.get_running_loop()
    try:
        udp.send(b"\0")
        async with asyncio.timeout(REFUSAL_SECONDS):
            await loop.sock_recv(udp, 1)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    return False


def _interface_of(ip: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == ip for address in addresses):
            return name
    return ""


def _mtu_of(udp: socket.socket) -> int | None:
    level, option = (socket.IPPROTO_IPV6, IPV6_MTU) if udp.family == socket.AF_INET6 else (socket.IPPROTO_IP, IP_MTU)
    try:
        return udp.getsockopt(level, option)
    except OSError:
        return None
