"""Why two nodes do not meet, case by case: each names what fails and one line that mends it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.ids import PeerId
from shared.messages.tunnel import ProbeCheck
from shared.multiaddrs import parse_addresses
from shared.probe import PLACE_LIMIT, Asked, Handshake, Judged, Path, Place, judge, places_of, settle
from shared.version import VERSION

PLACE = Place("ip4", "192.168.1.7", 9340)
GOOD = Path(
    PLACE, ip="192.168.1.7", local_ip="192.168.1.2", interface="eth0", mtu_bytes=1500, tcp="ok"
)
OK = Handshake(peer_id=PeerId("12peer"), version=VERSION)
NO_UDP = Handshake(error="no answer over UDP within 4 s")
NO_TLS = Handshake(error="no answer over TCP within 3 s")
ASKED = Asked(own=PeerId("12own"))


def refusal(words: str) -> Handshake:
    return Handshake(error=words, is_refusal=True)


def levels(judged: Judged) -> dict[str, str]:
    return {check.name: check.level for check in judged.checks}


def failed(judged: Judged) -> list[ProbeCheck]:
    found = [check for check in judged.checks if check.level == "fail"]
    assert all(check.fix and "\n" not in check.fix for check in found)
    return found


def test_all_is_well() -> None:
    judged = judge(GOOD, OK, OK, ASKED)
    names = ("route", "tcp", "udp", "mtu", "clock", "version", "mesh")
    assert levels(judged) == dict.fromkeys(names, "ok")
    assert judged.works
    assert not any(check.fix for check in judged.checks)


@pytest.mark.parametrize(
    ("path", "quic", "tls", "name", "detail", "fix"),
    [
        (replace(GOOD, name_error="not known"), None, None, "name", "not found", "/etc/hosts"),
        (replace(GOOD, route_error="Network is unreachable"), NO_UDP, NO_TLS, "route", "no route", "VPN"),
        (replace(GOOD, tcp="refused", udp_refused=True), NO_UDP, NO_TLS, "tcp", "nothing listens", "meshctl up"),
        (replace(GOOD, tcp="refused", udp_refused=True), NO_UDP, NO_TLS, "udp", "nothing listens", "meshctl status"),
        (replace(GOOD, tcp="silent"), NO_UDP, NO_TLS, "tcp", "firewall", "TCP and UDP 9340 on the machine at 192.168"),
        (replace(GOOD, tcp="unreachable", tcp_detail="No route"), NO_UDP, NO_TLS, "tcp", "No route", "ping"),
        (GOOD, NO_UDP, refusal("12x is banned"), "udp", "UDP is blocked", "sudo ufw allow 9340/udp"),
        (GOOD, NO_UDP, NO_TLS, "tcp", "its node hangs", "meshctl restart tunneld"),
        (GOOD, NO_UDP, NO_TLS, "udp", "no handshake over TCP either", "meshctl restart tunneld"),
        (replace(GOOD, mtu_bytes=1000), NO_UDP, NO_TLS, "mtu", "only packets of 1000 bytes", "mtu 1280"),
        (GOOD, refusal("the node certificate expired 3.0 days ago: …"), None, "clock", "3.0 days", "set-ntp true"),
        (GOOD, refusal("the node certificate is valid only in 2.0 hours: …"), None, "clock", "2.0 h", "set-ntp true"),
        (GOOD, refusal("it refuses this node: the node certificate expired 2 h ago"), None, "clock", "this", "join"),
        (GOOD, None, refusal("its certificate is not yet valid"), "clock", "not yet", "set-ntp"),
        (GOOD, refusal("it greets in another version; update"), OK, "version", "greets", "update meshd"),
        (GOOD, refusal("12x is banned from this mesh"), OK, "mesh", "banned", "--lift"),
        (GOOD, refusal("the node is of another mesh: the root …"), OK, "mesh", "another mesh", "join TOKEN --switch"),
        (GOOD, refusal("12a answers there, not 12b"), OK, "mesh", "another node has", "whoami"),
        (GOOD, refusal("12own answers there, not 12b"), OK, "mesh", "the dialling node itself", "whoami"),
    ],
)  # fmt: skip
def test_what_fails_and_what_mends_it(
    path: Path, quic: Handshake | None, tls: Handshake | None, name: str, detail: str, fix: str
) -> None:
    found = {check.name: check for check in failed(judge(path, quic, tls, ASKED))}
    assert detail in found[name].detail  # type: ignore[index]
    assert fix in found[name].fix  # type: ignore[index]


def test_udp_blocked_is_worth_a_look_where_tcp_carries_everything() -> None:
    assert levels(judge(GOOD, NO_UDP, OK, ASKED))["udp"] == "warn"
    joining = judge(GOOD, NO_UDP, None, replace(ASKED, joining=True))
    assert failed(joining)[0].fix.endswith("joining needs it")


def test_tcp_that_connects_and_then_is_silent_may_be_the_mtu() -> None:
    (mtu,) = [check for check in judge(GOOD, NO_UDP, NO_TLS, ASKED).checks if check.name == "mtu"]
    assert (mtu.level, "large packets are lost" in mtu.detail) == ("warn", True)
    assert mtu.fix.endswith("dev eth0 mtu 1280")


def test_tcp_blocked_is_worth_a_look_where_quic_works() -> None:
    (tcp,) = [check for check in judge(replace(GOOD, tcp="silent"), OK, NO_TLS, ASKED).checks if check.name == "tcp"]
    assert tcp.level == "warn"
    assert "TCP 9340" in tcp.fix


def test_the_docker_bridge_and_loopback_are_explained_only_where_they_do_not_work() -> None:
    bridge = replace(GOOD, place=Place("ip4", "172.17.0.2", 9340), ip="172.17.0.2", tcp="silent")
    (check,) = failed(judge(bridge, NO_UDP, NO_TLS, ASKED))
    assert (check.name, "--network host" in check.fix) == ("container", True)
    loopback = replace(GOOD, place=Place("ip4", "127.0.0.1", 9340), ip="127.0.0.1")
    assert failed(judge(loopback, NO_UDP, NO_TLS, ASKED))[0].name == "route"
    assert not failed(judge(loopback, OK, OK, ASKED))
    assert not failed(judge(replace(bridge, tcp="ok"), OK, OK, ASKED))


def test_another_version_works_but_is_said() -> None:
    (check,) = [check for check in judge(GOOD, replace(OK, version="0.0.1"), OK, ASKED).checks if check.level != "ok"]
    assert (check.name, check.level) == ("version", "warn")
    assert "0.0.1" in check.detail


def test_who_joins_learns_whether_it_would_be_admitted() -> None:
    joining = Asked(joining=True, root_fingerprint="ab")
    assert "admits" in judge(GOOD, Handshake(), None, joining).checks[-1].detail
    assert "no issuer" in failed(judge(GOOD, refusal("No common ALPN protocols"), None, joining))[0].detail
    other = failed(judge(GOOD, refusal("what answers there is of another mesh than the token"), None, joining))
    assert (other[0].name, "meshctl invite" in other[0].fix) == ("mesh", True)
    unpinned = judge(GOOD, refusal("what answers …"), None, Asked(joining=True))
    assert levels(unpinned)["mesh"] == "warn"


def test_once_one_place_works_the_others_are_no_failure() -> None:
    good = judge(GOOD, OK, OK, ASKED)
    bad = judge(replace(GOOD, place=Place("ip4", "10.0.0.1", 9340), tcp="silent"), NO_UDP, NO_TLS, ASKED)
    loopback = judge(replace(GOOD, place=Place("ip6", "::1", 9340), tcp="refused"), NO_UDP, NO_TLS, ASKED)
    assert not [check for check in settle([good, bad, loopback]) if check.level == "fail"]
    (only,) = [check for check in settle([good, bad, loopback]) if check.detail.startswith("[::1]:9340 ")]
    assert only.level == "ok"
    assert [check for check in settle([bad, loopback]) if check.level == "fail"]


def test_places_are_hosts_and_ports_nearest_first_and_few() -> None:
    texts = ["/ip4/203.0.113.9/udp/1/quic-v1", "/ip4/192.168.1.7/udp/9340/quic-v1", "/ip4/192.168.1.7/tcp/9340/tls"]
    assert [str(place) for place in places_of(parse_addresses(tuple(texts)))] == ["192.168.1.7:9340", "203.0.113.9:1"]
    many = parse_addresses(tuple(f"/ip4/10.0.0.{number}/udp/1/quic-v1" for number in range(1, 30)))
    assert len(places_of(many)) == PLACE_LIMIT
