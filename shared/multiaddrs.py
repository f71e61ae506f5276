"""Multiaddrs: where a node may be reached, and over which transport.

``/ip4/192.168.1.7/udp/9340/quic-v1/p2p/12D3KooW…`` and ``/ip4/192.168.1.7/tcp/9340/tls/p2p/12D3KooW…``; also ``ip6``,
``dns4``, ``dns6`` and ``dns``. The peer id may be missing. They come from peers and people, so every part is checked.

Source: the multiaddr specification; docs/spec/identity.md.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Literal

from shared.errors import SchemaError
from shared.ids import PeerId
from shared.peer_ids import public_key_of

Transport = Literal["quic", "tcp"]
Family = Literal["ip4", "ip6", "dns4", "dns6", "dns"]
Reach = Literal["loopback", "link-local", "container", "private", "shared", "global", "name"]

TEXT_LIMIT = 256
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
_FAMILIES: tuple[Family, ...] = ("ip4", "ip6", "dns4", "dns6", "dns")
_CONTAINER_NETWORKS = (ipaddress.ip_network("172.17.0.0/16"),)
"""Docker's default bridge: the same on every machine, so never an address of another one."""
_SHARED_NETWORK = ipaddress.ip_network("100.64.0.0/10")
"""Carrier-grade NAT, and what mesh VPNs hand out."""


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed multiaddr."""

    family: Family
    host: str
    port: int
    transport: Transport
    peer_id: PeerId | None = None

    def __str__(self) -> str:
        how = f"udp/{self.port}/quic-v1" if self.transport == "quic" else f"tcp/{self.port}/tls"
        peer = f"/p2p/{self.peer_id}" if self.peer_id else ""
        return f"/{self.family}/{self.host}/{how}{peer}"

    def without_peer(self) -> Address:
        return replace(self, peer_id=None)

    @property
    def reach(self) -> Reach:
        """From where it can be reached, as far as the number tells."""
        if self.family not in ("ip4", "ip6"):
            return "name"
        ip = ipaddress.ip_address(self.host)
        if ip.is_loopback:
            return "loopback"
        if ip.is_link_local:
            return "link-local"
        if any(ip in network for network in _CONTAINER_NETWORKS):
            return "container"
        if ip in _SHARED_NETWORK:
            return "shared"
        return "global" if ip.is_global else "private"


def parse_address(text: str) -> Address:
    """Raises: SchemaError that says which part is wrong."""
    if len(text) > TEXT_LIMIT:
        raise SchemaError(f"an address of {len(text)} characters is over the limit of {TEXT_LIMIT}")
    parts = text.split("/")
    match parts:
        case ["", family, host, "udp", port, "quic-v1", *rest]:
            transport: Transport = "quic"
        case ["", family, host, "tcp", port, "tls", *rest]:
            transport = "tcp"
        case _:
            raise SchemaError(
                f"{text!r} is no address of a node: write /ip4/192.168.1.7/udp/9340/quic-v1 or "
                "/ip4/192.168.1.7/tcp/9340/tls"
            )
    for known in _FAMILIES:
        if family == known:
            address = Address(known, _host(known, host, text), _port(port, text), transport)
            return replace(address, peer_id=_peer(rest, text))
    raise SchemaError(f"{text!r}: {family!r} is none of {', '.join(_FAMILIES)}")


def parse_addresses(texts: tuple[str, ...]) -> tuple[Address, ...]:
    """Those that can be read, without repeats, in order: a peer of a newer version may announce others too."""
    found: dict[Address, None] = {}
    for text in texts:
        try:
            found[parse_address(text)] = None
        except SchemaError:
            continue
    return tuple(found)


_ORDER: tuple[Reach, ...] = ("private", "shared", "global", "name", "loopback", "container", "link-local")
"""Nearest first among those that lead somewhere: on one LAN the private address is the fast one."""


def dial_order(addresses: tuple[Address, ...], *, known_good: Address | None = None) -> tuple[Address, ...]:
    """In which order to try them: the one that worked last, then by reach; a total order."""
    return tuple(
        sorted(
            dict.fromkeys(addresses),
            key=lambda address: (
                known_good is None or address.without_peer() != known_good.without_peer(),
                _ORDER.index(address.reach),
                str(address),
            ),
        )
    )


def _host(family: str, host: str, text: str) -> str:
    if family in ("ip4", "ip6"):
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            raise SchemaError(f"{text!r}: {host!r} is no IP address") from None
        if f"ip{ip.version}" != family:
            raise SchemaError(f"{text!r}: {host} is no {family} address")
        if ip.is_unspecified or ip.is_multicast or "%" in host:
            raise SchemaError(f"{text!r}: {host} is not the address of one machine")
        return str(ip)
    if len(host) > 253 or not _HOST_NAME.fullmatch(host):
        raise SchemaError(f"{text!r}: {host!r} is no host name")
    return host.lower()


def _port(port: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= 65_535:
        raise SchemaError(f"{text!r}: {port!r} is no port, that is 1 to 65535")
    return int(port)


def _peer(rest: list[str], text: str) -> PeerId | None:
    match rest:
        case []:
            return None
        case ["p2p", peer]:
            public_key_of(peer)
            return PeerId(peer)
    raise SchemaError(f"{text!r}: only /p2p/PEER may follow the transport")
