"""docs/spec/allocation.md: the mesh's own placements."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.electiond.placements import (
    MAX_ACTIVE,
    Placement,
    active_count,
    is_free,
    plan_placements,
    rendezvous,
    serving_names,
)
from services.electiond.view import Node
from tests.electiond.nodes import GB, model, name, node, served

X, Y, Z = model("x", 4 * GB), model("y", 2 * GB), model("z", GB)


def given_to(plan: dict[object, Placement]) -> dict[str, tuple[str, int]]:
    return {str(peer): (item.model, item.rule) for peer, item in plan.items()}


def test_a_model_that_nobody_serves_goes_to_one_free_node() -> None:
    """TRAPS 14: ten see one unserved model: one takes it. Further hosts are rule 3, not rule 2."""
    nodes = [node(f"n{at}", 8 * GB, X) for at in range(10)]
    plan = plan_placements(nodes, max_active=1)
    assert len(plan) == 1
    ((peer, placement),) = plan.items()
    assert (placement.model, placement.rule) == ("x", 2)
    assert peer == max((item.peer_id for item in nodes), key=lambda one: rendezvous(name("x"), one))


def test_ten_equal_joiners_do_not_pick_the_same_model() -> None:
    models = [model(f"m{at}", (20 - at) * GB // 4) for at in range(10)]
    plan = plan_placements([node(f"n{at}", 8 * GB, *models) for at in range(10)])
    assert sorted(item.model for item in plan.values()) == sorted(item.name for item in models)
    assert {item.rule for item in plan.values()} == {2}


def test_served_models_gain_hosts_the_one_with_fewest_first_until_the_active_group_is_full() -> None:
    hosts = [node("h1", 8 * GB, X, hosts=("x",)), node("h2", 8 * GB, Y, hosts=("y",)), node("h3", 8 * GB, hosts=("y",))]
    free = [node(f"n{at}", 8 * GB, X, Y) for at in range(3)]
    plan = plan_placements([*hosts, *free])
    assert sorted(given_to(plan).values()) == [("x", 3), ("x", 3), ("y", 3)]
    assert given_to(plan_placements([*hosts, *free], max_active=4)).values().__len__() == 1
    assert plan_placements([*hosts, *free], max_active=3) == {}, "they stand by"
    many = [node(f"n{at:02}", 8 * GB, X) for at in range(25)]
    assert len(plan_placements(many)) == MAX_ACTIVE


def test_an_unserved_model_is_placed_however_many_are_active() -> None:
    hosts = [node(f"h{at}", 8 * GB, Y, hosts=("y",)) for at in range(12)]
    assert given_to(plan_placements([*hosts, node("n", 8 * GB, X, Y)])) == {"n": ("x", 2)}


def test_a_model_that_ships_with_meshd_is_last_and_never_doubled() -> None:
    guide = model("guide", 3 * GB, builtin=True)
    plan = plan_placements([node(f"n{at}", 8 * GB, guide, Z) for at in range(3)])
    assert sorted(given_to(plan).values()) == [("guide", 2), ("z", 2), ("z", 3)]


def test_nothing_is_placed_on_nodes_that_are_not_free() -> None:
    not_free = [
        node("serving", 8 * GB, X, serving=(served("y"),)),
        node("hosting", 8 * GB, X, hosts=("y",)),
        node("named", 8 * GB, X, requested=(name("w"),)),
        node("draining", 8 * GB, X, standing="draining"),
        node("suspect", 8 * GB, X, standing="suspect"),
        node("client", 8 * GB, X, standing="client"),
        node("small", 2 * GB, X),
        node("without", 8 * GB),
        node("other-type", 8 * GB, model("x", 4 * GB, type="embedding")),
    ]
    assert [item.peer_id for item in not_free if is_free(item)] == ["small", "without", "other-type"]
    assert plan_placements(not_free) == {}
    assert given_to(plan_placements([*not_free, node("free", 8 * GB, X)])) == {"free": ("x", 2)}


def test_a_guest_serves_whole_models() -> None:
    assert given_to(plan_placements([node("g", 8 * GB, X, trusted=False)])) == {"g": ("x", 2)}


def test_a_node_that_drains_does_not_count_as_serving() -> None:
    drains = node("d", 8 * GB, X, hosts=("x",), standing="draining")
    assert serving_names([drains]) == set()
    assert active_count([drains]) == 0
    assert given_to(plan_placements([drains, node("n", 8 * GB, X)])) == {"n": ("x", 2)}


def test_a_refused_pair_passes_to_the_next() -> None:
    nodes = [node("a", 8 * GB, X), node("b", 8 * GB, X)]
    (first,) = plan_placements(nodes, max_active=1)
    other = {"a": "b", "b": "a"}[first]
    assert given_to(plan_placements(nodes, max_active=1, refused={(name("x"), first)})) == {other: ("x", 2)}


def test_only_a_node_that_can_download_gets_a_model_it_has_not_and_only_one_it_can_use() -> None:
    holder = node("h", GB, X)
    assert plan_placements([holder, node("n", 8 * GB)]) == {}
    assert given_to(plan_placements([holder, node("n", 8 * GB, may_download=True)])) == {"n": ("x", 4)}
    assert plan_placements([holder, node("n", 2 * GB, may_download=True)]) == {}
    served_already = node("s", 8 * GB, X, hosts=("x",))
    assert given_to(plan_placements([served_already, node("n", 8 * GB, may_download=True)])) == {"n": ("x", 4)}
    assert plan_placements([served_already, node("n", 8 * GB, may_download=True)], max_active=1) == {}


def test_a_model_that_runs_only_with_this_nodes_memory_comes_first() -> None:
    """Rule 1 needs nodes that can split; without that it places nothing."""
    huge = model("huge", 20 * GB)
    able = [node(f"n{at}", 12 * GB, huge, X, may_split=True) for at in range(2)]
    assert given_to(plan_placements(able)) == {"n0": ("huge", 1), "n1": ("huge", 1)}
    unable = [node(f"n{at}", 12 * GB, huge, X) for at in range(2)]
    assert sorted(given_to(plan_placements(unable)).values()) == [("x", 2), ("x", 3)]
    assert {item.rule for item in plan_placements(able[:1]).values()} == {2}


MODELS = st.builds(
    lambda text, size, builtin: model(text, size * GB, builtin=builtin),
    st.sampled_from("abcdef"),
    st.integers(1, 8),
    st.booleans(),
)
NODES = st.tuples(
    st.integers(0, 10),
    st.lists(MODELS, max_size=4, unique_by=lambda item: item.name),
    st.sampled_from(["", "", "", "a", "b", "c"]),
    st.sampled_from(["active", "active", "active", "suspect", "draining", "client"]),
    st.booleans(),
)


def world(parts: list) -> list[Node]:  # type: ignore[type-arg]
    return [
        node(
            f"p{at}",
            size * GB,
            *models,
            hosts=(hosted,) if hosted else (),
            standing=standing,
            may_download=download,
        )
        for at, (size, models, hosted, standing, download) in enumerate(parts)
    ]


@settings(deadline=None)
@given(st.lists(NODES, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_no_servable_model_is_unserved_while_a_fitting_node_idles(parts: list, random: object) -> None:  # type: ignore[type-arg]
    nodes = world(parts)
    plan = plan_placements(nodes)
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_placements(shuffled) == plan, "the order of the nodes changes nothing"
    served_then = serving_names(nodes) | {item.model for item in plan.values()}
    for one in nodes:
        if one.peer_id in plan:
            given_model = plan[one.peer_id].model
            assert is_free(one)
            assert one.may_download or one.fits(one.models[given_model])
        elif is_free(one):
            idle_could = {item.name for item in one.models.values() if one.fits(item)}
            assert idle_could <= served_then
    added = [item for item in plan.values() if item.rule == 3]
    assert not added or active_count(nodes) + len(plan) <= MAX_ACTIVE or len(added) < len(plan)
