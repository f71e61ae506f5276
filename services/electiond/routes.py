"""Routes: from healthy hosts only, never from intentions. Source: docs/spec/routes.md."""

from __future__ import annotations

from collections.abc import Sequence

from services.electiond.view import Node
from shared.ids import ModelName
from shared.messages.mesh import ModelLoad, ServedModel
from shared.messages.models import ModelType, Route, RouteHost

LOAD_STEPS = 4
"""How busy a host is, is told in quarters: finer changes would make every node publish its routes all the time."""


def build_routes(nodes: Sequence[Node]) -> tuple[Route, ...]:
    """One route for each model that some node hosts, by name; hosts by peer id.

    A host that drains is in none. A suspected one is only where there is no other.
    """
    found: dict[ModelName, list[tuple[Node, ServedModel]]] = {}
    types: dict[ModelName, ModelType] = {}
    for node in sorted(nodes, key=lambda node: node.peer_id):
        if not node.peer_id or node.standing in ("draining", "client"):
            continue
        for item in node.hosted:
            types.setdefault(item.model, item.type)
            found.setdefault(item.model, []).append((node, item))
    return tuple(Route(model=name, type=types[name], hosts=_hosts(found[name])) for name in sorted(found))


def _hosts(found: Sequence[tuple[Node, ServedModel]]) -> tuple[RouteHost, ...]:
    healthy = [(node, item) for node, item in found if node.standing != "suspect"]
    return tuple(_host(node, item) for node, item in healthy or found)


def _host(node: Node, item: ServedModel) -> RouteHost:
    local = node.local_name(item.model)
    return RouteHost(
        peer_id=node.peer_id,
        addresses=node.addresses,
        parallel=item.parallel,
        load=_busy(node.loads.get(item.model)),
        name_there=local if local != item.model else ModelName(""),
    )


def _busy(load: ModelLoad | None) -> float:
    if load is None or load.parallel < 1:
        return 0.0
    return round((load.in_use + load.waiting) / load.parallel * LOAD_STEPS) / LOAD_STEPS
