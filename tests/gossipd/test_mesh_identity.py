"""docs/spec/identity.md, rules 6 to 8."""

from __future__ import annotations

import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gossipd.mesh_identity import MeshIdentity, next_life
from shared.errors import StateError
from shared.ids import MeshId, PeerId

RANDOM = bytes(range(16))
KNOWN = MeshIdentity(mesh_id=MeshId("m"), mesh_name="home", incarnation=7, peer_id=PeerId("p"))


def test_the_incarnation_rises_at_each_start() -> None:
    """The incarnation rises at each start of gossipd."""
    assert next_life(KNOWN, configured=True, random_bytes=RANDOM).incarnation == 8
    assert next_life(MeshIdentity(), configured=False, random_bytes=RANDOM).incarnation == 1


def test_a_configured_node_without_a_mesh_creates_an_unnamed_one() -> None:
    """A configured node without a mesh creates an unnamed one: a random UUID, kept from then on."""
    made = next_life(MeshIdentity(), configured=True, random_bytes=RANDOM)
    assert uuid.UUID(made.mesh_id).version == 4
    assert made.mesh_name == ""
    kept = next_life(made, configured=True, random_bytes=bytes(16))
    assert kept.mesh_id == made.mesh_id
    assert next_life(made, configured=False, random_bytes=bytes(16)).mesh_id == made.mesh_id
    assert next_life(MeshIdentity(), configured=True, random_bytes=bytes(16)).mesh_id != made.mesh_id


def test_an_idle_node_is_in_no_mesh() -> None:
    assert next_life(MeshIdentity(), configured=False, random_bytes=RANDOM).mesh_id == ""


@given(st.builds(MeshIdentity, mesh_id=st.text(), mesh_name=st.text(), incarnation=st.integers(0), peer_id=st.text()))
def test_what_is_written_is_read(identity: MeshIdentity) -> None:
    assert MeshIdentity.from_json(identity.to_json(), "mesh.json") == identity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "5",
        '{"mesh_id": "m"}',
        "[" * 100000,
        KNOWN.to_json().replace("7", '"x"'),
        KNOWN.to_json().replace("7", "Infinity"),
        KNOWN.to_json().replace("7", "null"),
    ],
)
def test_a_damaged_file_is_refused_with_the_way_out(text: str) -> None:
    """``state/mesh.json`` is never replaced silently when damaged."""
    with pytest.raises(StateError, match=r"mesh\.json is damaged .*; restore it from a backup, or move it away"):
        MeshIdentity.from_json(text, "mesh.json")


def test_unknown_keys_of_a_later_version_are_ignored() -> None:
    text = json.dumps({**json.loads(KNOWN.to_json()), "later": 1})
    assert MeshIdentity.from_json(text, "x") == KNOWN
