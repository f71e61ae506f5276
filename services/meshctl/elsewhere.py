"""``--node NAME``: what is asked of another node, through the two tunnelds. It answers those with an issuer's grant."""

from __future__ import annotations

from collections.abc import Callable

import click

from services.meshctl.completion import complete_peer
from services.meshctl.node import Node
from shared.errors import MeshError
from shared.ids import PeerId
from shared.messages.mesh import MemberChanged
from shared.messages.tunnel import AdminAction, AdminReply, AdminRequest

ASK_SECONDS = 15.0
"""tunneld gives up on the other node after 10 s, with the better words."""

on_node: Callable[..., Callable[..., object]] = click.option(
    "--node",
    "where",
    metavar="NODE",
    shell_complete=complete_peer,
    help="Another node of the mesh, by name or id. Needs an issuer's grant.",
)


class NotOnAnotherNode(MeshError):
    """The option means nothing for another node."""

    code = "only_here"


def other_node(node: Node, where: str | None) -> PeerId | None:
    """Whom ``--node`` names; None for this node itself, and without the option.

    Raises: NodeDown, RequestRefused for a name that nobody or several have, MeshError when gossipd is down.
    """
    if where is None:
        return None
    from shared.peer_names import find_peer, member_names

    node.running()
    said = node.survey(["gossipd"]).snapshots["gossipd"]
    if said is None:
        raise MeshError("gossipd does not answer, so nobody knows the other nodes; see 'meshctl status'")
    members = [item for item in said if isinstance(item, MemberChanged)]
    peer_id = find_peer(where, member_names(members))
    own = any(item.is_self and item.announcement.peer_id == peer_id for item in members)
    return None if own else peer_id


def ask_node(
    node: Node, peer_id: PeerId, action: AdminAction, subject: str = "", *, lines: int = 100
) -> tuple[str, ...]:
    """The other node's answer, line by line. Raises: RequestRefused with its words, PeerUnreachable's as such."""
    request = AdminRequest(peer=peer_id, action=action, subject=subject, lines=lines)
    reply = node.ask("tunneld", request, deadline_seconds=ASK_SECONDS)
    if not isinstance(reply, AdminReply):
        raise MeshError(f"tunneld answered {type(reply).__name__}; see 'meshctl version'")
    return reply.lines
