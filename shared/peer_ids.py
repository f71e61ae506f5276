"""Peer ids and multiaddrs: how a node is named and where it is.

Source: libp2p peer-id specification (identity multihash of the protobuf public key, base58btc) and the multiaddr
specification; docs/spec/identity.md.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from shared.errors import SchemaError
from shared.ids import PeerId

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
ED25519_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
"""identity multihash, 36 bytes; protobuf: key type Ed25519, 32 bytes of key."""
PEER_ID_BYTES = 38


def base58_encode(data: bytes) -> str:
    """base58btc; leading zero bytes become ``1``."""
    number = int.from_bytes(data, "big")
    text = ""
    while number:
        number, digit = divmod(number, 58)
        text = ALPHABET[digit] + text
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + text


def base58_decode(text: str) -> bytes:
    """Raises: SchemaError for a character outside the alphabet or an overlong text."""
    if len(text) > 128:
        raise SchemaError("base58 text is longer than 128 characters")
    number = 0
    for char in text:
        digit = ALPHABET.find(char)
        if digit < 0:
            raise SchemaError(f"{char!r} is not a base58 character")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip("1"))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a raw 32-byte Ed25519 public key: 52 characters, ``12D3KooW…``."""
    if len(public_key) != 32:
        raise SchemaError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return PeerId(base58_encode(ED25519_PREFIX + public_key))


def public_key_of(peer_id: str) -> bytes:
    """The raw 32-byte public key inside a peer id. Raises: SchemaError for anything that is not one."""
    data = base58_decode(peer_id)
    if len(data) != PEER_ID_BYTES or not data.startswith(ED25519_PREFIX):
        raise SchemaError(f"{peer_id[:64]!r} is not the peer id of an Ed25519 key")
    return data[len(ED25519_PREFIX) :]


def multiaddrs(ip_addresses: Iterable[str], port: int, peer_id: PeerId) -> tuple[str, ...]:
    """QUIC and TLS multiaddrs for each IP address: reachable from afar first, then a stable order.

    Link-local addresses are left out (they need a zone); loopback ones stay only when there is nothing else.
    """
    parsed = {ipaddress.ip_address(text.split("%")[0]) for text in ip_addresses}
    usable = [ip for ip in parsed if not ip.is_link_local and not ip.is_unspecified and not ip.is_multicast]
    outside = [ip for ip in usable if not ip.is_loopback]
    chosen = sorted(outside or usable, key=lambda ip: (not ip.is_global, ip.version, int(ip)))
    return tuple(
        f"/ip{ip.version}/{ip}/{transport}/p2p/{peer_id}"
        for ip in chosen
        for transport in (f"udp/{port}/quic-v1", f"tcp/{port}/tls")
    )
