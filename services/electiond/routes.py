"""Routes: from healthy hosts only, never from intentions. Source: docs/spec/routes.md."""

from __future__ import annotations

from collections.abc import Sequence

from services.electiond.view import Node
from shared.ids import ModelName
from shared.messages.models import Route, RouteHost


def build_routes(nodes: Sequence[Node]) -> tuple[Route, ...]:
    """One route for each model that some node hosts, by name; hosts by peer id."""
    hosts: dict[ModelName, list[RouteHost]] = {}
    types = {}
    for node in sorted(nodes, key=lambda node: node.peer_id):
        for item in node.hosted:
            if not node.peer_id:
                continue
            types[item.model] = item.type
            hosts.setdefault(item.model, []).append(
                RouteHost(peer_id=node.peer_id, addresses=node.addresses, parallel=item.parallel)
            )
    return tuple(Route(model=name, type=types[name], hosts=tuple(hosts[name])) for name in sorted(hosts))
