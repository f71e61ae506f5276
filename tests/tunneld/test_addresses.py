"""Where a node says it can be reached."""

from __future__ import annotations

from services.tunneld.addresses import OBSERVED_LIMIT, own_addresses
from shared.ids import PeerId

OWN, B, C, D = (PeerId(name) for name in ("12own", "12B", "12C", "12D"))
HOME = ("192.168.1.7", "127.0.0.1")
SEEN = "/ip4/203.0.113.9/udp/41000/quic-v1"


def test_interfaces_over_both_transports() -> None:
    assert own_addresses(HOME, 9340, OWN) == (
        "/ip4/192.168.1.7/udp/9340/quic-v1/p2p/12own",
        "/ip4/192.168.1.7/tcp/9340/tls/p2p/12own",
    )


def test_what_the_owner_advertises_comes_first_with_its_own_port_or_the_nodes() -> None:
    addresses = own_addresses(HOME, 9340, OWN, advertise=("home.example", "203.0.113.7:4000", "[2001:db8::1]:1"))
    assert addresses[:6] == (
        "/dns/home.example/udp/9340/quic-v1/p2p/12own",
        "/dns/home.example/tcp/9340/tls/p2p/12own",
        "/ip4/203.0.113.7/udp/4000/quic-v1/p2p/12own",
        "/ip4/203.0.113.7/tcp/4000/tls/p2p/12own",
        "/ip6/2001:db8::1/udp/1/quic-v1/p2p/12own",
        "/ip6/2001:db8::1/tcp/1/tls/p2p/12own",
    )
    assert len(addresses) == 8


def test_one_peer_alone_is_believed_only_where_there_is_no_second() -> None:
    assert f"{SEEN}/p2p/12own" in own_addresses(HOME, 9340, OWN, observed={B: SEEN})
    other = "/ip4/198.51.100.1/udp/1/quic-v1"
    assert f"{SEEN}/p2p/12own" not in own_addresses(HOME, 9340, OWN, observed={B: SEEN, C: other})
    assert f"{SEEN}/p2p/12own" in own_addresses(HOME, 9340, OWN, observed={B: SEEN, C: SEEN, D: "nonsense"})


def test_observed_addresses_that_lead_nowhere_new_are_left_out() -> None:
    for text in ("/ip4/192.168.1.7/udp/9340/quic-v1", "/ip4/127.0.0.1/udp/1/quic-v1", "/dns/x/udp/1/quic-v1", "…"):
        assert own_addresses(HOME, 9340, OWN, observed={B: text}) == own_addresses(HOME, 9340, OWN)


def test_their_number_is_bounded() -> None:
    observed = {PeerId(f"12{n}"): f"/ip4/203.0.113.{n // 2}/udp/1/quic-v1" for n in range(40)}
    assert len(own_addresses(HOME, 9340, OWN, observed=observed)) == 2 + OBSERVED_LIMIT
