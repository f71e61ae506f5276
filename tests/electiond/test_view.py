"""The view: this node at first hand, the others from their announcements."""

from __future__ import annotations

from services.electiond.view import Node, View, model_need_bytes, node_of, own_node
from shared.ids import PeerId
from tests.electiond.nodes import GB, device, inventory, local, member, model, name, node, served, slot


def test_this_node_is_what_launcherd_says_not_what_gossipd_announced() -> None:
    """gossipd adds only its name, id and addresses, and may be down."""
    stale = member("me", model("old"), vram_bytes=1, hosted=(served("old"),), addresses=("/ip4/10.0.0.1",))
    own = own_node(stale, (local("new"),), device(5 * GB), [slot("new", "ready")], (name("wish"),))
    assert (own.peer_id, own.name, own.addresses) == ("me", "node-me", ("/ip4/10.0.0.1",))
    assert list(own.models) == ["new"]
    assert own.vram_bytes == 5 * GB
    assert own.hosted == (served("new", parallel=4),)
    assert own.requested == ("wish",)
    assert own.is_self


def test_without_gossipd_this_node_is_still_known() -> None:
    own = own_node(None, (local("a"),), None, [], ())
    assert (own.peer_id, own.name, own.vram_bytes, own.device) == ("", "this node", 0, "cpu")
    assert own.has(name("a"))


def test_only_ready_slots_are_hosted() -> None:
    states = ("queued", "loading", "ready", "draining", "stopping", "restarting", "failed")
    own = own_node(None, (), None, [slot(state, state) for state in states], ())
    assert [item.model for item in own.hosted] == ["ready"]


def test_another_node_is_what_it_announced() -> None:
    other = node_of(
        member("b", model("a"), is_self=False, vram_bytes=7, serving=(served("a"),), requested_models=(name("w"),))
    )
    assert other == Node(
        peer_id=PeerId("b"),
        name="node-b",
        vram_bytes=7,
        device="cpu",
        models={name("a"): model("a")},
        serving=(served("a"),),
        requested=(name("w"),),
    )


def test_a_model_fits_up_to_the_last_byte() -> None:
    exact = model_need_bytes(model("a", GB))
    assert exact == 11 * GB // 10
    assert node("a", exact).fits(model("a", GB))
    assert not node("a", exact - 1).fits(model("a", GB))


def test_a_view_has_living_nodes_in_order() -> None:
    view = View(
        members={
            PeerId(item.announcement.peer_id): item
            for item in (
                member("z"),
                member("b", is_self=False),
                member("a", is_self=False),
                member("c", is_self=False, state="dead"),
                member("d", is_self=False, state="suspect"),
                member("e", is_self=False, state="left"),
            )
        },
        inventory=inventory(local("x")),
    )
    nodes = view.nodes((name("x"),))
    assert [one.peer_id for one in nodes] == ["a", "b", "d", "z"]
    assert [one.standing for one in nodes] == ["active", "active", "suspect", "active"]
    assert [one.is_self for one in nodes] == [False, False, False, True]
    assert nodes[3].requested == ("x",)
