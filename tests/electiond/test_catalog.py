"""docs/spec/catalog.md"""

from __future__ import annotations

import itertools

import pytest

from services.electiond.catalog import build_catalog, nearest_names, resolve
from shared.messages.models import MeshModel
from tests.electiond.nodes import GB, model, name, node, served, slot


def entry(catalog: tuple[MeshModel, ...], text: str) -> MeshModel:
    return next(item for item in catalog if item.name == text)


def test_it_is_the_union_of_disks_and_wishes() -> None:
    """The catalog is the union of what nodes have on disk and what their owners named."""
    nodes = [
        node("a", 8 * GB, model("both"), model("one")),
        node("b", 8 * GB, model("both"), requested=(name("wish"), name("one"))),
    ]
    catalog = build_catalog(nodes, [], [])
    assert [item.name for item in catalog] == ["both", "one", "wish"]
    assert entry(catalog, "both").nodes_on_disk == ("a", "b")
    assert [entry(catalog, text).requested for text in ("both", "one", "wish")] == [False, True, True]


def test_everything_known_about_a_model_is_in_its_entry() -> None:
    full = model("m", GB, architecture="llama", quantization="Q4_K_M", parameters=7, context_tokens=4096, builtin=True)
    nodes = [node("a", 8 * GB, full, hosts=("m",)), node("b", 8 * GB, full, serving=(served("m"),))]
    assert build_catalog(nodes, [], []) == (
        MeshModel(
            name=name("m"),
            type="llm",
            status="ready",
            reason="served by node-a",
            file_size_bytes=GB,
            need_bytes=11 * GB // 10,
            context_tokens=4096,
            architecture="llama",
            quantization="Q4_K_M",
            parameters=7,
            nodes_on_disk=("a", "b"),  # type: ignore[arg-type]
            nodes_serving=("a", "b"),  # type: ignore[arg-type]
            hosts=("a",),  # type: ignore[arg-type]
            builtin=True,
        ),
    )


@pytest.mark.parametrize(
    ("own_slot", "assigned", "hosts", "status", "reason"),
    [
        (None, False, ("m",), "ready", "served by node-a"),
        ("failed", False, ("m",), "ready", "served by node-a"),
        ("queued", False, (), "loading", "queued for a test"),
        ("loading", False, (), "loading", "loading for a test"),
        ("restarting", False, (), "loading", "restarting for a test"),
        ("failed", True, (), "failed", "failed for a test"),
        ("draining", True, (), "unloaded", "draining for a test"),
        ("stopping", True, (), "unloaded", "stopping for a test"),
        (None, True, (), "loading", "about to be loaded"),
        (None, False, (), "unloaded", "on disk; loads when it is asked for"),
    ],
)
def test_every_entry_has_a_status_and_a_reason_in_words(
    own_slot: str | None, assigned: bool, hosts: tuple[str, ...], status: str, reason: str
) -> None:
    slots = [slot("m", own_slot)] if own_slot else []
    catalog = build_catalog(
        [node("a", 8 * GB, model("m"), hosts=hosts, is_self=True)], slots, [name("m")] if assigned else []
    )
    assert (catalog[0].status, catalog[0].reason) == (status, reason)


def test_needs_capacity_comes_with_the_numbers() -> None:
    nodes = [node("a", 8 * GB, model("big", 40 * GB)), node("b", 16 * GB, model("big", 40 * GB)), node("c", 99 * GB)]
    big = entry(build_catalog(nodes, [], [name("big")]), "big")
    assert big.status == "needs_capacity"
    assert "needs 44.0 GB and the largest node that has it, node-b, offers 16.0 GB" in big.reason


def test_a_wish_without_a_file_says_what_to_do() -> None:
    wish = build_catalog([node("a", 8 * GB, requested=(name("qwen"),))], [], [])[0]
    assert wish.status == "needs_capacity"
    assert "put qwen.gguf into a models folder" in wish.reason


def test_a_model_that_runs_stays_listed_when_its_file_is_gone() -> None:
    gone = build_catalog([node("a", 8 * GB, hosts=("gone",))], [], [])[0]
    assert (gone.status, gone.hosts, gone.nodes_on_disk) == ("ready", ("a",), ())
    assert "its file is gone" in gone.reason


def test_a_node_without_an_id_is_not_listed_but_its_models_are() -> None:
    """With gossipd down, this node's models stay in the catalog."""
    mine = build_catalog([node("", 8 * GB, model("m"), hosts=("m",))], [], [])[0]
    assert (mine.status, mine.nodes_on_disk, mine.hosts) == ("ready", (), ())


def test_permuting_the_nodes_changes_nothing() -> None:
    nodes = [
        node("a", 8 * GB, model("m"), model("x", 90 * GB), hosts=("m",)),
        node("b", 8 * GB, model("m", quantization="Q8_0"), model("x", 90 * GB), hosts=("m",)),
        node("c", 4 * GB, model("x", 90 * GB), requested=(name("w"),)),
    ]
    answers = {build_catalog(order, [], []) for order in itertools.permutations(nodes)}
    assert len(answers) == 1


CATALOG = build_catalog([node("a", 8 * GB, model("qwen3-8b"), model("qwen3-14b"), model("bge-m3"))], [], [])


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("qwen3-8b.gguf", "qwen3-8b"),
        ("/models/qwen3-8b.gguf", "qwen3-8b"),
        ("org/qwen3-8b", "qwen3-8b"),
        ("qwen3", None),
        ("QWEN3-8B", None),
        ("", None),
        ("../../etc/passwd", None),
    ],
)
def test_a_name_may_be_a_file_or_path_and_nothing_else_is_guessed(text: str, resolved: str | None) -> None:
    assert resolve(text, CATALOG) == resolved


def test_near_names_are_few_and_near() -> None:
    assert nearest_names("qwen-8b", CATALOG)[0] == "qwen3-8b"
    assert nearest_names("zzzzzzzz", CATALOG) == ()
    assert len(nearest_names("qwen3", CATALOG, limit=1)) == 1
    assert nearest_names("q" * 5_000_000, CATALOG) == (), "and megabytes of name cost nothing"
