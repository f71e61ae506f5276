"""docs/spec/catalog.md: which files are one model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.electiond.catalog import build_catalog
from services.electiond.identity import mesh_names, with_mesh_names
from services.electiond.view import Node
from tests.electiond.nodes import GB, model, name, node

A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_the_file_that_most_nodes_have_keeps_the_plain_name() -> None:
    nodes = [
        node("1", 8 * GB, model("q", file_hash=A), hosts=("q",)),
        node("2", 8 * GB, model("q", file_hash=B)),
        node("3", 8 * GB, model("q", file_hash=B)),
        node("4", 8 * GB, model("q")),
    ]
    named = {item.peer_id: item for item in with_mesh_names(nodes)}
    assert [list(named[peer].models) for peer in "1234"] == [["q@aaaaaaaa"], ["q"], ["q"], ["q"]]
    assert named["1"].hosts(name("q@aaaaaaaa"))  # type: ignore[index]
    assert not named["1"].hosts(name("q"))  # type: ignore[index]
    assert named["1"].local_name(name("q@aaaaaaaa")) == "q"  # type: ignore[index]
    assert named["1"].mesh_name(name("q")) == "q@aaaaaaaa"  # type: ignore[index]
    assert named["2"].mesh_name(name("q")) == "q"  # type: ignore[index]


def test_of_equally_many_the_smallest_hash_keeps_it() -> None:
    nodes = [node("1", 8 * GB, model("q", file_hash=B)), node("2", 8 * GB, model("q", file_hash=A))]
    assert mesh_names(nodes) == {("q", B): "q@bbbbbbbb"}


def test_one_file_is_one_model_whatever_is_not_hashed_yet() -> None:
    nodes = [node("1", 8 * GB, model("q", file_hash=A)), node("2", 8 * GB, model("q"))]
    assert mesh_names(nodes) == {}
    assert with_mesh_names(nodes) == nodes


def test_names_never_collide() -> None:
    alike = ["a" * 63 + "1", "a" * 63 + "2"]
    nodes = [
        node("1", 8 * GB, model("q", file_hash="0" * 64)),
        *(node(f"n{at}", 8 * GB, model("q", file_hash=file_hash)) for at, file_hash in enumerate(alike)),
        node("x", 8 * GB, model("q@bbbbbbbb")),
        node("y", 8 * GB, model("q", file_hash=B)),
    ]
    new = list(mesh_names(nodes).values())
    assert len(set(new)) == len(new) == 3
    assert "q@bbbbbbbb" not in new


def test_the_catalog_shows_both_and_what_this_node_calls_its_own() -> None:
    nodes = [
        node("1", 8 * GB, model("q", file_hash=A), is_self=True),
        node("2", 8 * GB, model("q", file_hash=B), hosts=("q",)),
        node("3", 8 * GB, model("q", file_hash=B)),
    ]
    shown = {item.name: item for item in build_catalog(with_mesh_names(nodes), [], [name("q")])}
    assert set(shown) == {"q", "q@aaaaaaaa"}
    assert shown[name("q")].hosts == ("2",)
    mine = shown[name("q@aaaaaaaa")]
    assert (mine.name_here, mine.status, mine.reason) == ("q", "loading", "about to be loaded")


FILES = st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from(["", A, B, C])), max_size=2, unique_by=lambda f: f[0])


@given(st.lists(FILES, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_every_file_has_one_name_and_order_changes_nothing(parts: list, random: object) -> None:  # type: ignore[type-arg]
    nodes: list[Node] = [
        node(f"p{at}", GB, *(model(text, file_hash=file_hash) for text, file_hash in files))
        for at, files in enumerate(parts)
    ]
    names = mesh_names(nodes)
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert mesh_names(shuffled) == names
    hashes: dict[str, set[str]] = {}
    for item in with_mesh_names(nodes):
        for mesh, known in item.models.items():
            hashes.setdefault(mesh, set()).update({known.file_hash} - {""})
            assert item.mesh_name(item.local_name(mesh)) == mesh
    assert all(len(found) <= 1 for found in hashes.values()), "one name, one file"
