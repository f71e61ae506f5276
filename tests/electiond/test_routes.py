"""docs/spec/routes.md"""

from __future__ import annotations

import itertools

from services.electiond.routes import build_routes
from shared.messages.models import Route, RouteHost
from tests.electiond.nodes import GB, model, name, node, served


def test_routes_come_from_hosted_only_in_one_order() -> None:
    """Routes are made from ``hosted`` only; a route's hosts are ordered by peer id, routes by model name."""
    nodes = [
        node("b", 8 * GB, model("idle"), hosts=("m", "a")),
        node(
            "a",
            8 * GB,
            serving=(served("wanted"),),
            requested=(name("wish"),),
            hosts=("m",),
            addresses=("/ip4/1.2.3.4",),
        ),
    ]
    expected = (
        Route(model=name("a"), type="llm", hosts=(RouteHost(peer_id="b"),)),  # type: ignore[arg-type]
        Route(
            model=name("m"),
            type="llm",
            hosts=(RouteHost(peer_id="a", addresses=("/ip4/1.2.3.4",)), RouteHost(peer_id="b")),  # type: ignore[arg-type]
        ),
    )
    for order in itertools.permutations(nodes):
        assert build_routes(order) == expected


def test_a_node_that_does_not_know_its_id_is_in_no_route() -> None:
    assert build_routes([node("", 8 * GB, hosts=("m",))]) == ()
