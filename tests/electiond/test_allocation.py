"""docs/spec/allocation.md: the stateless rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.electiond.allocation import assign_model, assign_named, why_unassigned
from services.electiond.view import Node, model_need_bytes
from shared.messages.models import MODEL_TYPES, Assignment
from tests.electiond.nodes import GB, model, name, node

ONE_EACH = dict.fromkeys(MODEL_TYPES, 1)


def names_of(assignments: tuple[Assignment, ...]) -> list[str]:
    return [item.model for item in assignments]


def test_named_models_are_served_the_largest_that_fits_first() -> None:
    """A node whose owner names models serves those, the largest that fit first; the rest are wishes."""
    me = node("a", 8 * GB, model("small", GB), model("large", 5 * GB), model("huge", 50 * GB))
    named = [name("small"), name("huge"), name("large"), name("absent")]
    assert names_of(assign_named(me, named, ONE_EACH)) == ["large"]
    assert names_of(assign_named(me, named, {"llm": 2})) == ["large", "small"]
    assert names_of(assign_named(me, named, {"llm": -1})) == ["large", "small"]
    assert names_of(assign_named(me, [], {"llm": -1})) == []


def test_as_many_as_may_be_loaded_at_once_of_each_type() -> None:
    me = node(
        "a",
        90 * GB,
        model("l1"),
        model("l2"),
        *(model(f"e{at}", type="embedding") for at in range(4)),
        model("r", type="reranking"),
    )
    named = list(me.models)
    chosen = names_of(assign_named(me, named, {"llm": 5, "embedding": 2}))
    assert chosen == ["e0", "e1", "l1", "l2", "r"], "a type without a limit of its own has 1"


def test_named_models_share_the_memory() -> None:
    me = node("a", 8 * GB, model("a", 4 * GB), model("b", 4 * GB), model("c", 3 * GB))
    assert names_of(assign_named(me, [name("a"), name("b"), name("c")], {"llm": -1})) == ["a", "c"]


def test_a_named_model_that_is_assigned_is_not_pushed_out_by_a_larger_file() -> None:
    me = node("a", 8 * GB, model("small", GB), model("large", 5 * GB))
    named = [name("small"), name("large")]
    assert names_of(assign_named(me, named, ONE_EACH, assigned=[name("small")])) == ["small"]


def test_ties_go_to_the_first_name() -> None:
    me = node("a", 8 * GB, model("y"), model("x"))
    assert names_of(assign_named(me, [name("y"), name("x"), name("y")], ONE_EACH)) == ["x"]


def test_the_mesh_places_the_largest_that_fits_and_nobody_serves() -> None:
    me = node("a", 8 * GB, model("tiny"), model("mid", 4 * GB), model("big", 6 * GB), model("huge", 90 * GB))
    other = node("b", 8 * GB, hosts=("big",))
    found = assign_model(me, [me, other], [])
    assert found is not None
    assert (found.model, found.origin) == ("mid", "allocation")
    assert "4.4 GB of 8.0 GB" in found.reason
    alone = assign_model(me, [me], [])
    assert alone is not None
    assert alone.model == "big", "what this node serves itself is no reason against it"


def test_a_model_that_ships_with_meshd_comes_last() -> None:
    guide = model("guide", 3 * GB, builtin=True)
    with_own = node("a", 8 * GB, guide, model("own", 1))
    without = node("a", 8 * GB, guide)
    assert assign_model(with_own, [with_own], []).model == "own"
    assert assign_model(without, [without], []).model == "guide"


def test_only_llms_are_placed_and_nothing_that_was_declined() -> None:
    me = node("a", 8 * GB, model("e", 5 * GB, type="embedding"), model("x", 4 * GB), model("y", GB))
    assert assign_model(me, [me], [name("x")]).model == "y"
    assert assign_model(me, [me], [name("x"), name("y")]) is None


def test_why_nothing_is_placed_is_said_in_words() -> None:
    empty = node("a", 8 * GB, model("e", type="embedding"))
    assert "put a .gguf there" in why_unassigned(empty, [])
    large = node("a", GB, model("x", 5 * GB), model("y", 4 * GB))
    assert why_unassigned(large, []) == "no model fits: the smallest, y, needs 4.4 GB, cpu offers 1.0 GB"
    assert why_unassigned(large, [name("y")]) == "no model fits: the smallest, x, needs 5.5 GB, cpu offers 1.0 GB"
    assert why_unassigned(large, [name("y"), name("x")]).startswith("x, y: unloaded or failed; ask for it")
    fits = node("a", 8 * GB, model("x"), model("d", 1))
    assert why_unassigned(fits, [name("d")]) == "every model on its disk that fits is served by another node already"


MODELS = st.builds(
    lambda text, size, type, builtin: model(text, size, type=type, builtin=builtin),
    st.sampled_from("abcdefgh"),
    st.integers(1, 20).map(lambda units: units * GB // 2),
    st.sampled_from(["llm", "llm", "embedding"]),
    st.booleans(),
)
NODES = st.builds(
    lambda vram, models, hosts: (vram, models, hosts),
    st.integers(0, 10).map(lambda units: units * GB),
    st.lists(MODELS, max_size=6, unique_by=lambda item: item.name),
    st.lists(st.sampled_from("abcdefgh"), max_size=2, unique=True),
)


def world(parts: list[tuple[int, list[object], list[str]]]) -> list[Node]:
    return [node(f"p{at}", vram, *models, hosts=tuple(hosts)) for at, (vram, models, hosts) in enumerate(parts)]  # type: ignore[arg-type]


@given(
    st.lists(NODES, min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sets(st.sampled_from("abcdefgh"), max_size=3),
)
def test_permuting_nodes_and_models_never_changes_the_answer(parts: list, random: object, declined: set[str]) -> None:  # type: ignore[type-arg]
    nodes = world(parts)
    me = nodes[0]
    refused = [name(text) for text in declined]
    found = assign_model(me, nodes, refused)
    random.shuffle(nodes)  # type: ignore[attr-defined]
    order = list(me.models.items())
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = node(me.peer_id, me.vram_bytes, *(item for _, item in order))
    assert assign_model(shuffled, nodes, refused) == found
    assert assign_named(me, list(me.models), ONE_EACH) == assign_named(shuffled, list(shuffled.models), ONE_EACH)
    if found is None:
        assert why_unassigned(shuffled, refused)
    else:
        assert found.model not in declined
        assert me.fits(me.models[found.model])


@given(NODES, st.dictionaries(st.sampled_from(MODEL_TYPES), st.sampled_from([-1, 1, 2, 3])))
def test_named_models_never_exceed_memory_or_limits(part: tuple, limits: dict) -> None:  # type: ignore[type-arg]
    (me,) = world([part])
    chosen = [me.models[item.model] for item in assign_named(me, list(me.models), limits)]
    assert sum(map(model_need_bytes, chosen)) <= me.vram_bytes
    for type in MODEL_TYPES:
        limit = limits.get(type, 1)
        assert limit == -1 or sum(item.type == type for item in chosen) <= limit
