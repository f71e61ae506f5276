"""docs/spec/election.md: the rules of a split. TRAPS 9, 10, 11, 16."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.electiond.group import best_group, candidates, completes, cover, elect_host, newer_plan
from services.electiond.near import NearSets
from services.electiond.view import Node, model_need_bytes
from shared.ids import PeerId
from tests.electiond.nodes import GB, model, name, node

M = name("m")
BIG = model("m", 20 * GB)


def big(peer: str, gigabytes: int, **fields: object) -> Node:
    return node(peer, gigabytes * GB, BIG, **fields)


def distances(**rtts: float) -> NearSets:
    """From host ``h`` to the others."""
    near = NearSets()
    for peer, rtt in rtts.items():
        near.report(PeerId("h"), PeerId(peer), rtt)
    return near


def ids(nodes: tuple[Node, ...] | list[Node] | None) -> list[str] | None:
    return None if nodes is None else [item.peer_id for item in nodes]


def test_the_hosts_own_memory_first_then_by_round_trip_unknown_last_until_it_is_covered() -> None:
    host = big("h", 8)
    nodes = [big("far", 90), big("slow", 8), big("quick", 8), big("new", 8), host]
    near = distances(far=0.2, slow=0.05, quick=0.01)
    for order in itertools.permutations(nodes):
        assert ids(candidates(host, M, order, near)) == ["h", "quick", "slow", "new"]
    ordered = candidates(host, M, nodes, near)
    assert ids(cover(ordered, 22 * GB)) == ["h", "quick", "slow"]
    assert ids(cover(ordered, 8 * GB)) == ["h"], "a node that holds it alone takes no worker"
    assert cover(ordered, 33 * GB) is None


def test_memory_beyond_the_limit_does_not_count() -> None:
    """TRAPS 9: group VRAM suffices only with a peer beyond the RTT limit: no launch."""
    nodes = [big("h", 16), big("x", 16)]
    assert elect_host(M, nodes, distances(x=0.2)) is None
    assert elect_host(M, nodes, distances(x=0.01)) == "x"


def test_a_node_that_the_plan_does_not_need_changes_nothing() -> None:
    """TRAPS 10."""
    host = big("h", 8)
    nodes = [host, big("b", 8), big("c", 8)]
    before = cover(candidates(host, M, nodes, distances(b=0.03, c=0.04)), 22 * GB)
    nearer = [*nodes, big("z", 90)]
    near = distances(b=0.03, c=0.04, z=0.001)
    kept = cover(candidates(host, M, nearer, near), 22 * GB, incumbents=ids(before) or ())
    assert ids(kept) == ids(before) == ["h", "b", "c"]
    without_b = [item for item in nearer if item.peer_id != "b"]
    assert ids(cover(candidates(host, M, without_b, near), 22 * GB, incumbents=ids(before) or ())) == ["h", "z"]


def test_a_guest_a_client_and_a_node_without_the_file_take_no_part() -> None:
    nodes = [
        big("h", 8),
        big("guest", 90, trusted=False),
        big("client", 90, standing="client"),
        big("suspect", 90, standing="suspect"),
        node("empty", 90 * GB),
    ]
    assert ids(candidates(nodes[0], M, nodes, NearSets())) == ["h"]
    assert elect_host(M, nodes, NearSets()) is None
    able = [*nodes, node("fetches", 90 * GB, may_download=True)]
    assert elect_host(M, able, NearSets()) == "h", "a worker may get the file, a host has it"


def test_the_incumbent_stays_and_a_liar_is_passed_over() -> None:
    """TRAPS 16: advertised memory is a claim."""
    nodes = [big("h", 16), big("i", 16), big("liar", 1000)]
    assert elect_host(M, nodes, NearSets()) == "liar"
    assert elect_host(M, nodes, NearSets(), incumbent=PeerId("h")) == "h"
    assert elect_host(M, nodes, NearSets(), failed=[PeerId("liar")]) == "i"
    assert elect_host(M, nodes, NearSets(), incumbent=PeerId("gone")) == "liar"


def test_a_group_that_only_this_node_completes() -> None:
    nodes = [big("h", 12), big("i", 12)]
    assert completes(nodes[1], M, nodes, NearSets())
    assert not completes(nodes[1], M, [*nodes, big("j", 12)], NearSets())
    assert ids(best_group(M, nodes, NearSets())) == ["i", "h"]
    assert best_group(M, [node("x")], NearSets()) == []


def test_the_larger_term_wins_then_the_larger_id() -> None:
    assert newer_plan((2, PeerId("a")), (1, PeerId("b")))
    assert newer_plan((2, PeerId("b")), (2, PeerId("a")))
    assert not newer_plan((2, PeerId("b")), (2, PeerId("b")))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_all_elect_the_same_host_and_it_covers_the_need(parts: list, random: object) -> None:  # type: ignore[type-arg]
    nodes = [big(f"p{at}", size, trusted=trusted) for at, (size, trusted) in enumerate(parts)]
    host = elect_host(M, nodes, NearSets())
    random.shuffle(nodes)  # type: ignore[attr-defined]
    assert elect_host(M, nodes, NearSets()) == host
    trusted = sum(item.vram_bytes for item in nodes if item.trusted)
    assert (host is not None) == (trusted >= model_need_bytes(BIG))
