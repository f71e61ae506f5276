"""``doctor --peer``: why this node and another one do not meet. tunneld dials; without it only the path is seen."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from services.meshctl.checks import show
from services.meshctl.mesh import read_token
from services.meshctl.node import Node, run
from services.meshctl.output import clean, print_json, progress
from shared.config import MeshSection, advertised
from shared.errors import ConfigError, DaemonUnreachable, InviteRefused, MeshError, RequestRefused
from shared.ids import PeerId
from shared.invites import parse_token, signature_holds
from shared.io.probe import read_path
from shared.messages.tunnel import PeerProbed, ProbeCheck, ProbePeer
from shared.multiaddrs import parse_address, parse_addresses
from shared.peer_names import find_peer
from shared.probe import Asked, judge, places_of, settle

PROBE_SECONDS = 30.0
"""Both ways; tunneld gives up on each handshake after seconds."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom to probe. ``label`` is never the token."""

    label: str
    addresses: tuple[str, ...]
    root_fingerprint: str = ""
    peer_id: PeerId | None = None
    token_checks: tuple[ProbeCheck, ...] = ()


def examine_peer(node: Node, text: str, *, as_json: bool) -> None:
    """Print both ways; exit status 1 if something fails. Raises: MeshError for what names no node."""
    target = find_target(node, text, now_unix_seconds=time.time())
    if not as_json:
        progress(f"probing {target.label}; a silent address takes some seconds")
    probed = _probe(node, target)
    there = (*target.token_checks, *probed.checks)
    failed = {
        way: [check.name for check in checks if check.level == "fail"]
        for way, checks in (("there", there), ("back", probed.back))
    }
    if as_json:
        print_json(
            {
                "ok": not any(failed.values()),
                "peer": target.label,
                "there": [dataclasses.asdict(check) for check in there],
                "back": [dataclasses.asdict(check) for check in probed.back],
            }
        )
    else:
        click.echo(clean(f"There: from this node to {target.label}"))
        for check in there:
            show(check)
        click.echo(clean(f"Back: from {target.label} to this node"))
        for check in probed.back:
            show(check)
        click.echo("; ".join(f"{way}: {_sum_up(failed[way], checks)}" for way, checks in
                             (("there", there), ("back", probed.back))) + ".")  # fmt: skip
    if any(failed.values()):
        raise SystemExit(1)


def _sum_up(failed: Sequence[str], checks: tuple[ProbeCheck, ...]) -> str:
    if failed:
        return f"fails ({', '.join(dict.fromkeys(failed))})"
    return "works" if any(check.name == "mesh" and check.level == "ok" for check in checks) else "not proved"


def _probe(node: Node, target: Target) -> PeerProbed:
    if not target.addresses:
        return PeerProbed(checks=(), back=(_back("not probed: there is no address to try"),))
    if node.supervised is None:
        return _without_tunneld(target, "this node is not running", "meshctl up")
    request = ProbePeer(
        addresses=target.addresses, root_fingerprint=target.root_fingerprint, peer_id=target.peer_id
    )
    try:
        answer = node.ask("tunneld", request, deadline_seconds=PROBE_SECONDS)
    except DaemonUnreachable as error:
        return _without_tunneld(target, error.detail, "meshctl status")
    if not isinstance(answer, PeerProbed):
        raise MeshError("tunneld answered something else; see 'meshctl version'")
    return answer


def _without_tunneld(target: Target, why: str, fix: str) -> PeerProbed:
    """Name, route, TCP."""
    detail = f"{why}; so no handshake was tried either way, only name, route and TCP"
    return PeerProbed(checks=run(_look(target.addresses)), back=(_back(detail, f"{fix}, then this command again"),))


def _back(detail: str, fix: str = "") -> ProbeCheck:
    return ProbeCheck(name="back", level="warn", detail=detail, fix=fix)


async def _look(addresses: tuple[str, ...]) -> tuple[ProbeCheck, ...]:
    paths = await asyncio.gather(*(read_path(place) for place in places_of(parse_addresses(addresses))))
    return settle(judge(path, None, None, Asked()) for path in paths)


# -- who is meant ---------------------------------------------------------------------------------------------


def find_target(node: Node, text: str, *, now_unix_seconds: float) -> Target:
    """A token, an address, or a node of the mesh by name or id. Raises: ConfigError, RequestRefused."""
    if text == "-" or text.startswith("@"):
        return _of_token(read_token(text, None), now_unix_seconds)
    if re.match(r"meshd\d+\.", text):
        # Also what is left of a token: no part of one is looked up as a name.
        return _of_token(text, now_unix_seconds)
    if text.startswith("/"):
        address = parse_address(text)
        return Target(label=str(address.without_peer()), addresses=(text,), peer_id=address.peer_id)
    if node.supervised is not None:
        found = _of_peer(node, text)
        if found is not None:
            return found
    return _of_host(text)


def _of_peer(node: Node, text: str) -> Target | None:
    peers = {PeerId(peer.peer_id): peer for peer in node.status().peers}
    try:
        peer = peers[find_peer(text, {peer_id: peer.name for peer_id, peer in peers.items()})]
    except RequestRefused as error:
        if error.code == "ambiguous_peer":
            raise
        return None
    if peer.is_self:
        raise ConfigError(f"{text} is this node itself; name another one, or run 'meshctl doctor' for this machine")
    if not peer.addresses:
        raise ConfigError(f"{peer.name or peer.peer_id} announces no address; give one: HOST:PORT or a multiaddr")
    return Target(label=peer.name or peer.peer_id, addresses=peer.addresses, peer_id=PeerId(peer.peer_id))


def _of_host(text: str) -> Target:
    found = advertised(text)
    if found is None:
        # Not repeated: it may be a part of a token.
        raise ConfigError("that is no token, no address (HOST, HOST:PORT or a multiaddr) and no node known here")
    host, port = found
    try:
        family = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        family = "dns"
    number = port or MeshSection().port
    address = parse_address(f"/{family}/{host}/udp/{number}/quic-v1")
    return Target(label=f"{text}" if port else f"{text} port {number}", addresses=(str(address),))


def _of_token(token: str, now_unix_seconds: float) -> Target:
    try:
        signed = parse_token(token)
    except InviteRefused as error:
        check = _token("fail", error.detail, "copy the whole token again, or make a new one there: meshctl invite")
        return Target(label="the node of the token", addresses=(), token_checks=(check,))
    invite = signed.invite
    label = f"the nodes of mesh {invite.mesh_name or invite.mesh_id[:16]} that the token names"
    late = now_unix_seconds - invite.expires_unix_seconds
    if not signature_holds(signed):
        check = _token("fail", "the token was changed after it was signed", "make a new one there: meshctl invite")
    elif late > 0:
        check = _token(
            "fail",
            f"the token expired {late / 3600:.1f} hours ago by the clock of this machine",
            "compare the clocks ('date -u' on both; timedatectl set-ntp true), or make a new one there: meshctl invite",
        )
    elif not parse_addresses(invite.addresses):
        check = _token("fail", "the token names no address", "look at 'meshctl whoami' there, then: meshctl invite")
    else:
        check = _token("ok", f"whole, signed, grants {invite.grant}, good for {-late / 3600:.1f} more hours")
    return Target(
        label=label,
        addresses=invite.addresses if parse_addresses(invite.addresses) else (),
        root_fingerprint=invite.root_fingerprint,
        token_checks=(check,),
    )


def _token(level: str, detail: str, fix: str = "") -> ProbeCheck:
    return ProbeCheck(name="token", level="ok" if level == "ok" else "fail", detail=detail, fix=fix)
