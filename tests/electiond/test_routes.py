"""docs/spec/routes.md"""

from __future__ import annotations

import itertools

from services.electiond.routes import build_routes
from services.electiond.view import Node
from shared.messages.mesh import ModelLoad
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


def test_a_suspected_host_is_in_a_route_only_while_there_is_no_other_and_a_draining_one_never() -> None:
    suspect = node("a", hosts=("m",), standing="suspect")
    healthy = node("b", hosts=("m",))
    drains = node("c", hosts=("m",), standing="draining")
    client = node("d", hosts=("m",), standing="client")

    def hosts_of(*nodes: Node) -> list[str]:
        return [host.peer_id for route in build_routes(nodes) for host in route.hosts]

    assert hosts_of(suspect, healthy, drains, client) == ["b"]
    assert hosts_of(suspect, drains, client) == ["a"]
    assert hosts_of(drains, client) == []


def test_how_busy_a_host_is_is_told_in_quarters() -> None:
    def load_of(in_use: int, waiting: int, parallel: int) -> float:
        load = ModelLoad(model=name("m"), in_use=in_use, waiting=waiting, parallel=parallel)
        return build_routes([node("a", hosts=("m",), loads={name("m"): load})])[0].hosts[0].load

    assert [load_of(0, 0, 4), load_of(3, 0, 8), load_of(4, 4, 4), load_of(1, 0, 0)] == [0.0, 0.5, 2.0, 0.0]
