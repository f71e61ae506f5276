"""Where this node says it can be reached: its interfaces, what its owner advertises, what peers observe.

A peer behind the same router sees a private address, one beyond it the router's. What peers observe counts once it is
none of the node's own and as many peers agree as there are to ask, at most ``WITNESSES``: one peer alone could
otherwise send everybody else elsewhere.

Source: docs/spec/identity.md.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shared.config import advertised
from shared.errors import SchemaError
from shared.ids import PeerId
from shared.multiaddrs import Address, parse_address
from shared.peer_ids import multiaddrs

WITNESSES = 2
OBSERVED_LIMIT = 4


def own_addresses(
    interfaces: Iterable[str],
    port: int,
    peer_id: PeerId,
    *,
    advertise: Sequence[str] = (),
    observed: Mapping[PeerId, str] | None = None,
) -> tuple[str, ...]:
    """Multiaddrs ending in ``/p2p/peer_id``: what the owner advertises first, then interfaces, then observed ones."""
    local = tuple(interfaces)
    addresses: dict[str, None] = {}
    for place in advertise:
        for address in _advertised(place, port, peer_id):
            addresses[address] = None
    for text in multiaddrs(local, port, peer_id):
        addresses[text] = None
    for seen in _observed(observed or {}, local):
        addresses[str(replace(seen, peer_id=peer_id))] = None
    return tuple(addresses)


def _advertised(place: str, port: int, peer_id: PeerId) -> list[str]:
    found = advertised(place)
    if found is None:
        return []
    host, own_port = found
    try:
        family = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        family = "dns"
    number = own_port or port
    return [
        f"/{family}/{host}/udp/{number}/quic-v1/p2p/{peer_id}",
        f"/{family}/{host}/tcp/{number}/tls/p2p/{peer_id}",
    ]


def _observed(observed: Mapping[PeerId, str], local: tuple[str, ...]) -> list[Address]:
    witnesses: dict[Address, set[PeerId]] = {}
    for peer_id, text in observed.items():
        try:
            address = parse_address(text).without_peer()
        except SchemaError:
            continue
        if address.host not in local and address.reach in ("global", "shared", "private"):
            witnesses.setdefault(address, set()).add(peer_id)
    needed = min(WITNESSES, len(observed))
    trusted = [address for address, peers in witnesses.items() if len(peers) >= needed]
    return sorted(trusted, key=lambda address: (-len(witnesses[address]), str(address)))[:OBSERVED_LIMIT]
