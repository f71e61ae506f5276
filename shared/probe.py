"""Why two nodes do not meet: what was tried at one place, in words, with the one line that mends it.

:mod:`shared.io.probe` reads the path, tunneld adds its handshakes; the rules are here. The words hold for both
directions: they name the machine by its address, and the one that dials as *the dialling machine*.

Source: docs/spec/probe.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shared.ids import PeerId
from shared.messages.tunnel import ProbeCheck, ProbeLevel, ProbeSubject
from shared.multiaddrs import Address, Family, Reach, dial_order
from shared.version import VERSION

PLACE_LIMIT = 8
MIN_MTU_BYTES = 1280
"""QUIC's datagrams of 1,200 bytes with headers fit; also the least that IPv6 allows."""

Ending = Literal["ok", "refused", "silent", "unreachable"]
NOWHERE: tuple[Reach, ...] = ("loopback", "container", "link-local")
"""Addresses that mean another machine elsewhere; every node has some."""


@dataclass(frozen=True, slots=True)
class Place:
    """One host and port, for UDP and TCP alike."""

    family: Family
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reach(self) -> Reach:
        return self.address("quic").reach

    def address(self, transport: Literal["quic", "tcp"]) -> Address:
        return Address(self.family, self.host, self.port, transport)


@dataclass(frozen=True, slots=True)
class Path:
    """What the system says of the way to a place, without any handshake."""

    place: Place
    ip: str = ""
    name_error: str = ""
    local_ip: str = ""
    """Of the dialling machine on this way."""
    interface: str = ""
    mtu_bytes: int | None = None
    route_error: str = ""
    tcp: Ending = "silent"
    tcp_detail: str = ""
    udp_refused: bool = False
    """The machine itself said that nothing has the UDP port."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """One transport's handshake. Without ``error`` both ends verified each other."""

    error: str = ""
    is_refusal: bool = False
    """Something answered, and one of the two did not accept the other."""
    peer_id: PeerId | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks for what. ``joining``: without a certificate, like a node with a token."""

    own: PeerId | None = None
    joining: bool = False
    root_fingerprint: str = ""
    """When joining: the root that the place has to show; "" if it is not known."""
    version: str = VERSION


@dataclass(frozen=True, slots=True)
class Judged:
    place: Place
    checks: tuple[ProbeCheck, ...]
    works: bool


def places_of(addresses: Sequence[Address]) -> tuple[Place, ...]:
    """Where to look, nearest first; a place is looked at once for both transports."""
    ordered = dial_order(tuple(addresses))
    return tuple(dict.fromkeys(Place(item.family, item.host, item.port) for item in ordered))[:PLACE_LIMIT]


def judge(path: Path, quic: Handshake | None, tls: Handshake | None, asked: Asked) -> Judged:
    """Everything about one place; handshakes that were not tried are None, and then TCP has to do for an answer."""
    works = any(shake is not None and not shake.error for shake in (quic, tls))
    if quic is None and tls is None:
        works = path.tcp == "ok"
    return Judged(path.place, tuple(_checks(path, quic, tls, asked, works)), works)


def settle(judged: Iterable[Judged]) -> tuple[ProbeCheck, ...]:
    """All places together: once one of them works, the others are no failure."""
    found = list(judged)
    one_works = any(item.works for item in found)
    checks: list[ProbeCheck] = []
    for item in found:
        if item.works or not one_works:
            checks += [_at(item.place, check) for check in item.checks]
        elif item.place.reach in NOWHERE:
            detail = f"{item.place} leads nowhere from the dialling machine, as expected; another address works"
            checks.append(ProbeCheck(name="route", level="ok", detail=detail))
        else:
            checks += [
                _at(item.place, replace(check, level="warn")) for check in item.checks if check.level != "ok"
            ]
    return tuple(checks)


def _at(place: Place, check: ProbeCheck) -> ProbeCheck:
    return replace(check, detail=f"{place}: {check.detail}")


def _check(name: ProbeSubject, level: ProbeLevel, detail: str, fix: str = "") -> ProbeCheck:
    return ProbeCheck(name=name, level=level, detail=detail, fix=fix)


# -- the path -------------------------------------------------------------------------------------------------


def _checks(
    path: Path, quic: Handshake | None, tls: Handshake | None, asked: Asked, works: bool
) -> Iterable[ProbeCheck]:
    place = path.place
    if path.name_error:
        yield _check(
            "name", "fail", f"the name is not found: {path.name_error}",
            "use the machine's IP address, or add the name to DNS or to /etc/hosts of the dialling machine",
        )  # fmt: skip
        return
    if place.reach == "name":
        yield _check("name", "ok", f"is {path.ip}")
    if _is_container(path) and not works:
        yield _check(
            "container", "fail", "that is Docker's bridge network, the same on every machine: no way to another one",
            f'run that container with --network host, or let its node advertise the host: mesh.advertise = '
            f'["HOST:{place.port}"]',
        )  # fmt: skip
        return
    if path.route_error:
        yield _check(
            "route", "fail", f"no route from the dialling machine: {path.route_error}",
            f"put both machines into one network or VPN; 'ip route get {path.ip}' shows the way",
        )  # fmt: skip
        return
    if place.reach == "loopback" and not works:
        answered = any(shake is not None and shake.is_refusal for shake in (quic, tls))
        yield _check(
            "route", "warn" if answered else "fail",
            "a loopback address leads to the dialling machine itself, never to another one",
            'let that node listen on its network: mesh.host = "0.0.0.0" in its mesh.toml, then restart it',
        )  # fmt: skip
    else:
        on = f" on {path.interface}" if path.interface else ""
        yield _check("route", "ok", f"from {path.local_ip}{on}")
    yield _tcp(path, quic, tls, works)
    if quic is not None:
        yield _udp(path, quic, tls, asked)
    yield from _mtu(path, quic, tls, works)
    yield from _verdicts(path, quic, tls, asked)


def _is_container(path: Path) -> bool:
    try:
        return Place("ip4", path.ip or path.place.host, path.place.port).reach == "container"
    except ValueError:
        return False


def _tcp(path: Path, quic: Handshake | None, tls: Handshake | None, works: bool) -> ProbeCheck:
    port = path.place.port
    bad: ProbeLevel = "warn" if works else "fail"
    if path.tcp == "ok":
        if tls is not None and tls.error and not tls.is_refusal:
            return _check(
                "tcp", bad, f"TCP port {port} connects, but then {tls.error}: its node hangs, or it is another program",
                f"at {path.place.host}: meshctl restart tunneld; meshctl logs tunneld",
            )  # fmt: skip
        return _check("tcp", "ok", f"TCP port {port} answers")
    if path.tcp == "refused":
        return _check("tcp", bad, f"TCP port {port} refuses: nothing listens there", _not_listening(path))
    if path.tcp == "unreachable":
        return _check(
            "tcp", bad, f"TCP port {port} cannot be reached: {path.tcp_detail}",
            f"is the machine on and in this network ('ping {path.ip}')? If so its firewall rejects: {_open(path, '')}",
        )  # fmt: skip
    return _check("tcp", bad, f"TCP port {port} does not answer: a firewall drops it, or the machine is off",
                  _open(path, "" if quic is None or quic.error else "/tcp"))  # fmt: skip


def _udp(path: Path, quic: Handshake, tls: Handshake | None, asked: Asked) -> ProbeCheck:
    port = path.place.port
    if not quic.error or quic.is_refusal:
        return _check("udp", "ok", f"QUIC over UDP port {port} answers")
    tcp_works = tls is not None and not tls.error
    bad: ProbeLevel = "warn" if tcp_works else "fail"
    if "mesh port" in quic.error:
        return _check("udp", bad, quic.error, 'set mesh.host = "::" on the dialling machine, or use an IPv4 address')
    if path.udp_refused:
        return _check("udp", bad, f"UDP port {port} refuses: nothing listens there", _not_listening(path))
    if path.tcp == "ok" and tls is not None and tls.error and not tls.is_refusal:
        # The system takes TCP connections for a node that hangs; so this says nothing about UDP.
        return _check(
            "udp", bad, f"UDP port {port}: {quic.error}, and no handshake over TCP either",
            f"at {path.place.host}: meshctl restart tunneld; if that does not help: {_open(path, '/udp')}",
        )  # fmt: skip
    if path.tcp == "ok":
        instead = "joining needs it" if asked.joining else 'or set mesh.transport = "tcp" on both nodes'
        return _check("udp", bad, f"UDP is blocked: {quic.error}, while TCP port {port} answers",
                      f"{_open(path, '/udp')}; {instead}")  # fmt: skip
    return _check("udp", bad, f"UDP port {port}: {quic.error}", _open(path, ""))


def _not_listening(path: Path) -> str:
    return (
        f"is the node at {path.place.host} up and in a mesh? 'meshctl status' there shows its port, "
        f"'meshctl up' starts it"
    )


def _open(path: Path, protocol: str) -> str:
    """``protocol``: "", "/tcp" or "/udp"."""
    what = {"": "TCP and UDP", "/tcp": "TCP", "/udp": "UDP"}[protocol]
    port = path.place.port
    return f"open {what} {port} on the machine at {path.place.host}: sudo ufw allow {port}{protocol}"


def _mtu(path: Path, quic: Handshake | None, tls: Handshake | None, works: bool) -> Iterable[ProbeCheck]:
    fix = f"on both machines: sudo ip link set dev {path.interface or 'INTERFACE'} mtu {MIN_MTU_BYTES}"
    bad: ProbeLevel = "warn" if works else "fail"
    if path.mtu_bytes is not None and path.mtu_bytes < MIN_MTU_BYTES:
        yield _check("mtu", bad, f"only packets of {path.mtu_bytes} bytes fit, QUIC needs {MIN_MTU_BYTES}", fix)
    elif path.tcp == "ok" and tls is not None and tls.error.startswith("no answer over TCP"):
        words = "TCP connects, then nothing comes: if the node there does not hang, large packets are lost (VPN, PPPoE)"
        yield _check("mtu", "warn", words, fix)
    elif path.mtu_bytes is not None and quic is not None and (not quic.error or quic.is_refusal):
        yield _check("mtu", "ok", f"packets of {path.mtu_bytes} bytes leave here, QUIC's arrive")


# -- who answers ----------------------------------------------------------------------------------------------


def _verdicts(path: Path, quic: Handshake | None, tls: Handshake | None, asked: Asked) -> Iterable[ProbeCheck]:
    tried = [shake for shake in (quic, tls) if shake is not None]
    refused = [shake.error for shake in tried if shake.is_refusal]
    done = next((shake for shake in tried if not shake.error), None)
    if refused:
        yield from _refusals(path, refused, asked)
        return
    if done is None:
        return
    if asked.joining:
        yield _check("mesh", "ok", "it is in the token's mesh and admits nodes")
        return
    yield _check("clock", "ok", "both certificates are valid now, by both clocks")
    if done.version and done.version != asked.version:
        yield _check("version", "warn", f"it runs meshd {done.version}, the dialling node {asked.version}",
                     "update meshd on the older one, then: meshctl down && meshctl up")  # fmt: skip
    elif done.version:
        yield _check("version", "ok", f"both run meshd {done.version}")
    yield _check("mesh", "ok", f"{done.peer_id} is of the same mesh, and each accepts the other")


def _refusals(path: Path, refused: Sequence[str], asked: Asked) -> Iterable[ProbeCheck]:
    seen: set[ProbeSubject] = set()
    for error in refused:
        check = explain_refusal(path, error, asked)
        if check.name not in seen:
            seen.add(check.name)
            yield check


def explain_refusal(path: Path, error: str, asked: Asked) -> ProbeCheck:
    """A refusal of either end by its words, which are :mod:`shared.certificates`' and OpenSSL's."""
    words = error.lower()
    if asked.joining and not asked.root_fingerprint:
        return _check("mesh", "warn", "a node of a mesh answers; which one, this node cannot prove without a token",
                      "meshctl doctor --peer TOKEN, with a token made there by 'meshctl invite'")  # fmt: skip
    if any(sign in words for sign in ("expired", "valid only in", "not yet valid", "clock")):
        return _check("clock", "fail", error, "on both machines: timedatectl set-ntp true; if both clocks are right, "
                      "the node whose certificate that is joins again: meshctl join TOKEN")  # fmt: skip
    if "greets in" in words:
        return _check("version", "fail", error, "update meshd on the older node, then: meshctl down && meshctl up")
    if "banned" in words:
        return _check("mesh", "fail", error, "if that is a mistake, on an issuer: meshctl peers ban --lift PEER; "
                      "else join with a token of another issuer")  # fmt: skip
    if "alpn" in words:
        return _check("mesh", "fail", "the node there admits nobody: it is no issuer, or another program",
                      "take a token from the node that made the mesh: meshctl invite")  # fmt: skip
    if "answers there, not" in words:
        if asked.own is not None and words.startswith(asked.own.lower()):
            return _check("mesh", "fail", "that is the dialling node itself", "take the address that 'meshctl whoami' "
                          "shows on the other machine")  # fmt: skip
        return _check("mesh", "fail", f"another node has this address now: {error}",
                      "ask with the address that 'meshctl whoami' shows on the node you mean")  # fmt: skip
    if asked.joining:
        return _check("mesh", "fail", error, f"is the node at {path.place.host} still in that mesh? Make a new token: "
                      "meshctl invite")  # fmt: skip
    return _check("mesh", "fail", error, "join that mesh with a token made there: meshctl join TOKEN --switch; else "
                  "check the address")  # fmt: skip
