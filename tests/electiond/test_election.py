"""docs/spec/election.md"""

from __future__ import annotations

import itertools
from dataclasses import replace

from services.electiond.election import elect_hosts, place
from tests.electiond.nodes import GB, model, name, node

M = name("m")


def test_every_node_that_holds_a_model_whole_is_a_host_strongest_first() -> None:
    """Hosts are ordered by (vram_bytes, peer_id), strongest first; permuting the nodes changes nothing."""
    nodes = [
        node("c", 8 * GB, hosts=("m",)),
        node("b", 8 * GB, hosts=("m",)),
        node("a", 4 * GB, hosts=("m",)),
        node("d", 90 * GB, hosts=("other",)),
        node("e", 99 * GB, model("m")),
        node("", 99 * GB, hosts=("m",)),
    ]
    for order in itertools.permutations(nodes):
        assert elect_hosts(M, order) == ("b", "c", "a")
    assert elect_hosts(name("nobody"), nodes) == ()


def test_a_request_is_placed_here_if_it_can_be_else_on_the_node_with_most_memory() -> None:
    big = node("big", 64 * GB, model("m", 4 * GB))
    twin = node("twin", 64 * GB, model("m", 4 * GB))
    me = node("me", 8 * GB, model("m", 4 * GB), is_self=True)
    no_file = node("no-file", 900 * GB)
    no_room = node("no-room", 4 * GB, model("m", 4 * GB))
    for order in itertools.permutations([big, twin, me, no_file, no_room]):
        assert place(M, order) is me
        assert place(M, [item for item in order if item is not me]) is big
    small = replace(me, vram_bytes=GB)
    assert place(M, [small, big]) is big
    assert place(M, [small, no_room, no_file]) is None
