"""docs/spec/identity.md, rules 1 and 4."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import SchemaError
from shared.ids import PeerId
from shared.peer_ids import (
    ALPHABET,
    base58_decode,
    base58_encode,
    multiaddrs,
    peer_id_of,
    public_key_of,
)

VECTOR_KEY = bytes.fromhex("a77f1d92fedb59dddaea5a1c4abd1ac2fbde7d7b879ed364501809923d7c11b9")
VECTOR_ID = "12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv"
ME = PeerId(VECTOR_ID)


def test_the_vector_of_the_libp2p_tls_specification() -> None:
    assert peer_id_of(VECTOR_KEY) == VECTOR_ID
    assert public_key_of(VECTOR_ID) == VECTOR_KEY


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_is_52_characters_and_holds_its_key(key: bytes) -> None:
    peer_id = peer_id_of(key)
    assert re.fullmatch(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}", peer_id)
    assert public_key_of(peer_id) == key


@given(st.binary(max_size=60))
def test_base58_comes_back_with_its_leading_zeros(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data
    assert base58_encode(b"\0" + data) == "1" + base58_encode(data)


@given(st.text(ALPHABET, max_size=60))
def test_every_text_of_the_alphabet_stands_for_one_value(text: str) -> None:
    assert base58_encode(base58_decode(text)) == text


@given(st.text(max_size=200) | st.text(ALPHABET, min_size=50, max_size=54))
def test_other_texts_are_refused_and_nothing_else_happens(text: str) -> None:
    try:
        assert peer_id_of(public_key_of(text)) == text
    except SchemaError:
        pass


@pytest.mark.parametrize(
    "text",
    [
        "",
        VECTOR_ID[:-1],
        VECTOR_ID + "1",
        "1" + VECTOR_ID,
        VECTOR_ID.replace("K", "0", 1),
        VECTOR_ID + " ",
        VECTOR_ID.lower(),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # an RSA id: a SHA-256 multihash
        "z" * 1_000_000,
        "../../etc/passwd",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_peer_id_of_an_ed25519_key_is_refused(text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        public_key_of(text)
    assert len(caught.value.detail) < 150


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_has_32_bytes(size: int) -> None:
    with pytest.raises(SchemaError):
        peer_id_of(bytes(size))


def test_addresses_are_quic_and_tls_for_each_interface() -> None:
    assert multiaddrs(["10.0.0.2"], 9340, ME) == (
        f"/ip4/10.0.0.2/udp/9340/quic-v1/p2p/{ME}",
        f"/ip4/10.0.0.2/tcp/9340/tls/p2p/{ME}",
    )
    assert multiaddrs(["fd00::1"], 1, ME)[1] == f"/ip6/fd00::1/tcp/1/tls/p2p/{ME}"


def hosts(*addresses: str) -> list[str]:
    return [text.split("/")[2] for text in multiaddrs(addresses, 1, ME)[::2]]


def test_globally_reachable_addresses_come_first_in_a_stable_order() -> None:
    """Globally reachable ones first; loopback only when there is nothing else; link-local never."""
    some = ["192.168.1.5", "10.0.0.2", "127.0.0.1", "8.8.8.8", "2a00::1", "fd00::1", "fe80::1%eth0", "169.254.1.1"]
    ordered = ["8.8.8.8", "2a00::1", "10.0.0.2", "192.168.1.5", "fd00::1"]
    assert hosts(*some) == hosts(*reversed(some)) == hosts(*some, *some) == ordered


def test_loopback_only_when_there_is_nothing_else() -> None:
    assert hosts("127.0.0.1", "::1", "fe80::1%lo", "0.0.0.0", "224.0.0.1") == ["127.0.0.1", "::1"]
    assert hosts("127.0.0.1", "10.0.0.2") == ["10.0.0.2"]
    assert hosts() == hosts("169.254.7.7") == []
