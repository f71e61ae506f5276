"""``peers``: the nodes of the mesh, and who of them takes part. Issuers decide; gossipd tells the others."""

from __future__ import annotations

import click

from services.meshctl.completion import complete_peer
from services.meshctl.node import Node, NodeDown
from services.meshctl.output import clean, console, print_json, short_id, size, table
from shared.messages.daemon import Done
from shared.messages.trust import BanPeer, TrustPeer
from shared.peer_view import link_words

DECIDE_SECONDS = 10.0


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def peers(ctx: click.Context, as_json: bool) -> None:
    """List the nodes of the mesh, this one first; ban one, or trust a guest.

    PEER is a name or id as the list shows it, or a unique part of an id.
    """
    if ctx.invoked_subcommand is None:
        _list(as_json)


def _list(as_json: bool) -> None:
    node = Node()
    node.running()
    view = node.status()
    if as_json:
        import dataclasses

        print_json([dataclasses.asdict(peer) for peer in view.peers])
        return
    if not view.peers:
        why = next(daemon for daemon in view.daemons if daemon.name == "gossipd")
        raise NodeDown(f"gossipd knows no node, not even this one: {why.detail}. See 'meshctl logs gossipd'")
    rows = [
        (
            (peer.name or "?") + (" (this node)" if peer.is_self else ""),
            peer.state if peer.node_state in ("active", "") else f"{peer.state}, {peer.node_state}",
            peer.role,
            short_id(peer.peer_id),
            peer.device,
            size(peer.vram_bytes),
            ", ".join(peer.hosted),
            link_words(peer.link),
        )
        for peer in sorted(view.peers, key=lambda peer: (not peer.is_self, peer.name, peer.peer_id))
    ]
    console().print(table(["NODE", "STATE", "ROLE", "ID", "DEVICE", "MEMORY", "SERVES", "LINK"], rows, state_column=1))


def state_words(state: str, node_state: str) -> str:
    """What a present node does may add to its state; of one that is gone it says nothing more."""
    present = state in ("alive", "suspect")
    return f"{state}, {node_state}" if present and node_state not in ("active", "") else state


@peers.command("ban")
@click.argument("peer", shell_complete=complete_peer)
@click.option("--lift", is_flag=True, help="Take the ban back.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ban(peer: str, lift: bool, as_json: bool) -> None:
    """Cut PEER off: every node of the mesh refuses and disconnects it. Needs an issuer's grant."""
    _decided(BanPeer(peer=peer, lift=lift), as_json)


@peers.command("trust")
@click.argument("peer", shell_complete=complete_peer)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def trust(peer: str, as_json: bool) -> None:
    """Let the guest PEER take part like a member, in splits too. Needs an issuer's grant."""
    _decided(TrustPeer(peer=peer), as_json)


def _decided(request: BanPeer | TrustPeer, as_json: bool) -> None:
    done = Node().ask("gossipd", request, deadline_seconds=DECIDE_SECONDS)
    assert isinstance(done, Done)
    if as_json:
        print_json({"peer": request.peer, "detail": done.detail})
    else:
        click.echo(clean(done.detail))
