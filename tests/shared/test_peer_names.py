"""shared.peer_names: a node is found by what a person sees of it, or the doubt is named."""

from __future__ import annotations

import pytest

from shared.errors import RequestRefused
from shared.ids import MeshId, PeerId
from shared.messages.mesh import Announcement, MemberChanged, MemberState
from shared.peer_ids import peer_id_of
from shared.peer_names import find_peer, member_names, subjects_by_daemon

NAMES = {
    PeerId("12D3KooWaaaaXXXX"): "desk",
    PeerId("12D3KooWbbbbYYYY"): "server",
    PeerId("12D3KooWccccYYYY"): "server",
}


@pytest.mark.parametrize("text", ["desk", "12D3KooWaaaaXXXX", "12D3KooWa", "XXXX", "12D3KooW…XXXX", " desk "])
def test_a_peer_is_found_by_name_or_part_of_its_id(text: str) -> None:
    assert find_peer(text, NAMES) == "12D3KooWaaaaXXXX"


@pytest.mark.parametrize(
    ("text", "code"),
    [("server", "ambiguous_peer"), ("12D3", "ambiguous_peer"), ("YYYY", "ambiguous_peer"), ("XX", "no_such_peer")],
)
def test_a_peer_that_is_not_clear_is_refused(text: str, code: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        find_peer(text, NAMES)
    assert caught.value.code == code


def test_a_whole_id_may_be_unknown_here() -> None:
    stranger = peer_id_of(bytes(32))
    assert find_peer(stranger, NAMES, unknown=True) == stranger
    with pytest.raises(RequestRefused):
        find_peer(stranger, NAMES)
    with pytest.raises(RequestRefused):
        find_peer("12D3KooWnonsense", NAMES, unknown=True)


def test_what_means_a_node_is_asked_by_its_id_where_names_are_not_known() -> None:
    assert subjects_by_daemon("desk", NAMES) == {"tunneld": "12D3KooWaaaaXXXX"}
    assert subjects_by_daemon("XXXX", NAMES) == {"tunneld": "12D3KooWaaaaXXXX", "gossipd": "12D3KooWaaaaXXXX"}
    assert subjects_by_daemon("server", NAMES) == {}, "two nodes have the name"
    assert subjects_by_daemon("qwen3-8b", NAMES) == {}


def member(peer_id: str, name: str, state: MemberState) -> MemberChanged:
    said = Announcement(
        peer_id=PeerId(peer_id),
        incarnation=1,
        seq=1,
        mesh_id=MeshId("mesh"),
        version="0.1.0",
        name=name,
        role="host",
        state="active",
    )
    return MemberChanged(announcement=said, state=state, reason="")


def test_a_node_that_is_gone_leaves_its_name_to_one_that_is_there() -> None:
    """A machine that was set up anew has its old name and another id."""
    names = member_names(
        [member("new", "desk", "suspect"), member("old", "desk", "left"), member("x", "attic", "dead")]
    )
    assert names == {"new": "desk", "old": "", "x": "attic"}
    assert find_peer("desk", names) == "new"
