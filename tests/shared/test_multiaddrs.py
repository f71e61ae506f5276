"""shared.multiaddrs: parsing what peers and people say, and in which order it is tried."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import SchemaError
from shared.multiaddrs import dial_order, parse_address, parse_addresses

PEER = "12D3KooWM6CgA9iBFZmcYAHA6A2qvbAxqfkmrYiRQuz3XEsk4Ksv"


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/192.168.1.7/udp/9340/quic-v1",
        f"/ip4/192.168.1.7/tcp/9340/tls/p2p/{PEER}",
        "/ip6/2001:db8::1/udp/1/quic-v1",
        f"/dns4/node.example/tcp/65535/tls/p2p/{PEER}",
        "/dns/localhost/udp/9340/quic-v1",
    ],
)
def test_an_address_reads_and_writes_the_same(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no address"),
        ("192.168.1.7:9340", "no address"),
        ("/ip4/192.168.1.7/udp/9340", "no address"),
        ("/ip4/192.168.1.7/udp/9340/tls", "no address"),
        ("/ip4/192.168.1.7/tcp/9340/tls/ws", "p2p"),
        ("/ip4/::1/tcp/9340/tls", "ip4"),
        ("/ip4/1.2.3/tcp/9340/tls", "IP address"),
        ("/ip4/0.0.0.0/tcp/9340/tls", "one machine"),
        ("/ip6/fe80::1%eth0/tcp/9340/tls", "one machine"),
        ("/ip4/224.0.0.1/tcp/9340/tls", "one machine"),
        ("/dns4/-x/tcp/9340/tls", "host name"),
        ("/dns4/a b/tcp/9340/tls", "host name"),
        ("/ip4/1.2.3.4/tcp/0/tls", "port"),
        ("/ip4/1.2.3.4/tcp/65536/tls", "port"),
        ("/ip4/1.2.3.4/tcp/٣/tls", "port"),
        ("/unix/x/tcp/1/tls", "none of"),
        ("/ip4/1.2.3.4/tcp/1/tls/p2p/nobody", "character|peer id"),
        ("/ip4/1.2.3.4/tcp/1/tls" + "/" * 300, "limit"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        parse_address(text)


@given(st.text(alphabet="/ip46dnstcpudlqv-1.:%2aé", max_size=60))
def test_any_text_is_only_refused(text: str) -> None:
    with contextlib.suppress(SchemaError):
        assert str(parse_address(str(parse_address(text)))) == str(parse_address(text))


@pytest.mark.parametrize(
    ("host", "reach"),
    [
        ("/ip4/127.0.0.1", "loopback"),
        ("/ip6/::1", "loopback"),
        ("/ip4/169.254.1.1", "link-local"),
        ("/ip4/172.17.0.2", "container"),
        ("/ip4/10.1.2.3", "private"),
        ("/ip6/fd00::1", "private"),
        ("/ip4/100.64.0.9", "shared"),
        ("/ip4/8.8.8.8", "global"),
        ("/dns4/node.example", "name"),
    ],
)
def test_from_where_it_can_be_reached(host: str, reach: str) -> None:
    assert parse_address(f"{host}/tcp/9340/tls").reach == reach


def test_the_near_ones_first_and_what_worked_before_them() -> None:
    order = ["/ip4/10.0.0.1", "/ip4/100.64.0.9", "/ip4/8.8.8.8", "/dns4/n.example", "/ip4/127.0.0.1", "/ip4/172.17.0.2"]
    addresses = parse_addresses(tuple(f"{host}/tcp/9340/tls" for host in order))
    assert dial_order(tuple(reversed(addresses))) == addresses
    good = parse_address(f"/ip4/8.8.8.8/tcp/9340/tls/p2p/{PEER}")
    assert dial_order(addresses, known_good=good)[0] == addresses[2]


def test_unreadable_and_repeated_ones_are_left_out() -> None:
    good = "/ip4/10.0.0.1/tcp/9340/tls"
    assert [str(address) for address in parse_addresses((good, "nonsense", good, "/ip9/x/tcp/1/tls"))] == [good]
