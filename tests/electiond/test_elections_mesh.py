"""The machine of one node among others: names, settling, placing requests elsewhere, degenerate meshes in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.electiond.pace import DEBOUNCE_SECONDS, PEER_WAIT_SECONDS, SETTLE_SECONDS
from services.electiond.promises import TAKE_SECONDS
from services.electiond.stimuli import LauncherReplaced, MembersReplaced, PlaceRequested, Reply
from shared.ids import MeshId, PeerId
from shared.io.drive import Tick
from shared.messages.daemon import Refused
from shared.messages.mesh import LoadRecord, MemberChanged, ModelLoad, PeerRtt
from shared.messages.models import CatalogChanged, ModelPlaced, RoutesChanged
from shared.messages.trust import PeerAddresses, PeersWanted
from tests.electiond.machine import Machine, config, launcher, published, settled
from tests.electiond.nodes import GB, device, inventory, local, member, model, name, served, slot

NO_PEERS = PeersWanted(peers=())
SOME_PEERS = PeersWanted(peers=(PeerAddresses(peer_id=PeerId("b"), addresses=()),))


def other(peer: str, *texts: str, hosts: tuple[str, ...] = (), **fields: Any) -> MemberChanged:
    state = fields.pop("member_state", "alive")
    models = tuple(model(text, GB) for text in texts)
    return member(
        peer,
        *models,
        is_self=False,
        state=state,
        vram_bytes=8 * GB,
        hosted=tuple(served(text) for text in hosts),
        serving=tuple(served(text) for text in hosts),
        **fields,
    )


def wait(machine: Machine, seconds: float) -> None:
    machine.now += seconds
    machine.tell(Tick())


def placed(machine: Machine, text: str, *avoid: str) -> ModelPlaced | Refused:
    reply = machine.tell(PlaceRequested(1, name(text), tuple(map(PeerId, avoid))))[-1]
    assert isinstance(reply, Reply)
    return reply.message


def in_a_mesh(*members: MemberChanged, **sizes: int) -> Machine:
    return Machine(config(), launcher(**sizes), SOME_PEERS, MembersReplaced((member(), *members)))


# -- settle and debounce ------------------------------------------------------------------------------------------


def test_a_mesh_of_one_places_at_once() -> None:
    machine = Machine(config(), launcher(a=GB), NO_PEERS, MembersReplaced((member(),)))
    assert machine.assigned == {"a": "allocation"}
    assert machine.elections.next_deadline() is None


def test_among_others_a_node_waits_until_the_mesh_has_settled() -> None:
    machine = in_a_mesh(other("b", "a", hosts=("a",)), a=GB, c=GB)
    assert machine.assigned == {}
    assert "settled" in machine.why
    assert machine.elections.next_deadline() == machine.now + SETTLE_SECONDS
    wait(machine, SETTLE_SECONDS - 0.1)
    assert machine.assigned == {}
    wait(machine, 0.1)
    assert machine.assigned == {"c": "allocation"}
    assert machine.elections.next_deadline() is None


def test_a_node_that_starts_in_a_mesh_waits_to_hear_of_the_others_but_not_for_ever() -> None:
    machine = in_a_mesh(a=GB)
    assert "hear" in machine.why
    wait(machine, PEER_WAIT_SECONDS)
    assert machine.assigned == {"a": "allocation"}


def standing_by(**fields: Any) -> Machine:
    """Its only model is the guide, which node b serves: a further host of it is not wanted."""
    guide = LauncherReplaced(inventory=inventory(local("guide", builtin=True)), device=device(), slots=())
    machine = Machine(config(), guide, SOME_PEERS, MembersReplaced((member(), other("b", hosts=("guide",), **fields))))
    wait(machine, 20)
    assert machine.why == "every model on its disk that fits is served by another node already"
    return machine


@pytest.mark.parametrize("how", ["dead", "left"])
def test_what_a_dead_host_served_is_placed_here_once_its_death_has_settled(how: str) -> None:
    machine = standing_by()
    machine.tell(other("b", hosts=("guide",), member_state=how))
    wait(machine, DEBOUNCE_SECONDS - 0.1)
    assert machine.assigned == {}
    wait(machine, 0.1)
    assert machine.assigned == {"guide": "allocation"}


def test_a_host_that_is_back_within_three_seconds_causes_nothing() -> None:
    machine = standing_by()
    for at in range(4):
        machine.tell(other("b", hosts=("guide",), member_state="dead"))
        wait(machine, 2.5)
        machine.tell(other("b", hosts=("guide",)))
        wait(machine, 1.0)
        assert machine.assigned == {}, at
    wait(machine, 30)
    assert machine.assigned == {}


def test_a_suspected_host_still_serves_and_a_draining_one_no_longer() -> None:
    machine = standing_by()
    machine.tell(other("b", hosts=("guide",), member_state="suspect"))
    wait(machine, 30)
    assert machine.assigned == {}
    assert [route.model for route in machine.elections.routes.routes] == ["guide"]
    drains = other("b", hosts=("guide",))
    machine.tell(replace(drains, announcement=replace(drains.announcement, state="draining")))
    assert machine.elections.routes.routes == ()
    wait(machine, DEBOUNCE_SECONDS)
    assert machine.assigned == {"guide": "allocation"}


def test_what_runs_here_stays_whoever_else_serves_it() -> None:
    machine = settled(slot("a", "ready"), a=GB, b=GB)
    machine.tell(other("z", "a", hosts=("a",)))
    wait(machine, 30)
    assert machine.assigned == {"a": "allocation"}


def test_a_node_that_was_given_a_model_and_does_not_take_it_is_passed_over() -> None:
    """The others compute that one of them takes it; the first may be held by its owner and not say so."""
    machine = in_a_mesh(*(other(peer, "a") for peer in "bcdefgh"), a=GB)
    for _ in range(8):
        wait(machine, TAKE_SECONDS)
    assert machine.assigned == {"a": "allocation"}


# -- requests ---------------------------------------------------------------------------------------------------------


def busy_here(*members: MemberChanged) -> Machine:
    machine = settled(slot("own", "ready"), own=2 * GB, x=GB, y=GB)
    for item in members:
        machine.tell(item)
    return machine


def test_a_request_goes_to_an_idle_node_that_has_the_file() -> None:
    machine = busy_here(other("b", "x", "y"), other("c", "x", hosts=("z",)))
    reply = placed(machine, "x")
    assert isinstance(reply, ModelPlaced)
    assert (reply.peer_id, reply.reason) == ("b", "node-b has the file and the room")
    assert machine.assigned == {"own": "allocation"}, "nothing is loaded here"
    assert "sent to node-b" in machine.elections.explain("x")[-1]


def test_the_next_request_for_it_goes_there_too_and_one_for_another_model_elsewhere() -> None:
    machine = busy_here(other("b", "x", "y"), other("c", "x", "y", hosts=("z",)))
    machine.now += 100
    machine.tell(other("c", "x", "y", hosts=("z",)))
    assert placed(machine, "x").peer_id == "b"  # type: ignore[union-attr]
    assert placed(machine, "x").peer_id == "b"  # type: ignore[union-attr]
    assert placed(machine, "y").peer_id == "me"  # type: ignore[union-attr]
    machine.tell(other("b", "x", "y", hosts=("x",)))
    assert placed(machine, "x").peer_id == "b"  # type: ignore[union-attr]


def test_alternating_requests_do_not_displace_what_has_just_become_ready() -> None:
    machine = settled(own=2 * GB)
    machine.tell(other("b", "x", "y", "w"))
    machine.tell(other("c", "x", "y", "w"))
    machine.now += 70
    machine.tell(other("c", "x", "y", "w", hosts=("y",)))
    machine.now += 1
    machine.tell(other("b", "x", "y", "w", hosts=("x",)))
    machine.now += 59.5
    assert placed(machine, "w").peer_id == "c", "what c has is over a minute old, b's is not"  # type: ignore[union-attr]


def test_what_was_tried_in_vain_is_asked_last() -> None:
    machine = busy_here(other("b", "x"), other("c", "x"))
    assert placed(machine, "x", "b").peer_id == "c"  # type: ignore[union-attr]
    assert placed(machine, "x", "b", "c").peer_id == "me"  # type: ignore[union-attr]
    far = settled(own=GB)
    far.tell(other("b", "x"))
    refused = placed(far, "x", "b")
    assert isinstance(refused, Refused)
    assert refused.code == "needs_capacity"


def test_a_request_is_never_placed_on_a_client_a_suspect_or_a_draining_node() -> None:
    machine = settled(own=GB)
    machine.tell(other("b", "x", member_state="suspect"))
    assert isinstance(placed(machine, "x"), Refused)
    drains = other("b", "x")
    machine.tell(replace(drains, announcement=replace(drains.announcement, state="draining")))
    refused = placed(machine, "x")
    assert isinstance(refused, Refused)
    assert refused.detail == "node-b could serve it but takes nothing new; copy the file to another node"
    machine.tell(replace(other("b", "x"), grant="client"))
    assert placed(machine, "x").code == "model_not_found"  # type: ignore[union-attr]


# -- names ------------------------------------------------------------------------------------------------------------


def test_another_file_of_the_same_name_is_another_model_and_each_node_is_told_its_own_name() -> None:
    hashed = LauncherReplaced(inventory=inventory(local("q", file_hash="a" * 64)), device=device(), slots=())
    machine = Machine(config(), hashed, NO_PEERS, MembersReplaced((member(),)))
    assert machine.assigned == {"q": "allocation"}
    machine.tell(slot("q", "ready"))
    theirs = (model("q", GB, file_hash="b" * 64),)
    for peer in "xyz":
        machine.tell(member(peer, *theirs, is_self=False, vram_bytes=8 * GB, hosted=(served("q"),)))
    assert machine.assigned == {"q": "allocation"}, "launcherd knows it by this name"
    routes = {route.model: route.hosts for route in machine.elections.routes.routes}
    assert {model: [host.peer_id for host in hosts] for model, hosts in routes.items()} == {
        "q": ["x", "y", "z"],
        "q@aaaaaaaa": ["me"],
    }
    assert routes[name("q@aaaaaaaa")][0].name_there == "q"
    assert machine.elections.explain("q@aaaaaaaa")[1].startswith("It belongs on this node")
    reply = placed(machine, "q@aaaaaaaa")
    assert isinstance(reply, ModelPlaced)
    assert (reply.peer_id, reply.name_there) == ("me", "q")


# -- what moves all the time ----------------------------------------------------------------------------------------


def test_load_and_round_trips_are_taken_up_together_and_in_steps() -> None:
    machine = settled(other("b", "x", hosts=("x",)), a=GB)

    def busy(in_use: int, rtt: float) -> MemberChanged:
        load = ModelLoad(model=name("x"), in_use=in_use, waiting=0, parallel=8)
        record = LoadRecord(peer_id=PeerId("b"), incarnation=1, seq=in_use, mesh_id=MeshId("m"), loads=(load,))
        return replace(other("b", "x", hosts=("x",)), load=record, rtt_seconds=rtt)

    assert machine.tell(busy(4, 0.01)) == []
    assert machine.tell(busy(5, 0.02)) == []
    due = machine.elections.next_deadline()
    assert due is not None
    machine.now = due
    (routes,) = published(machine.tell(Tick()), RoutesChanged)
    assert routes.routes[0].hosts[0].load == 0.5
    machine.tell(busy(4, 0.03))
    wait(machine, 1)
    assert published(machine.said, CatalogChanged)
    assert len(published(machine.said, RoutesChanged)) == 2, "half a place more is nobody's news"


# -- degenerate meshes --------------------------------------------------------------------------------------------


def test_one_model_one_node() -> None:
    machine = settled(slot("a", "ready"), a=GB)
    assert machine.elections.explain("a")[:2] == (
        "a is ready: served by node-me.",
        "It belongs on this node: the largest model on node-me's disk that fits (1.1 GB of 8.0 GB) and that no other "
        "node serves.",
    )


def test_one_model_many_nodes() -> None:
    machine = in_a_mesh(other("b", "a", hosts=("a",)), other("c", "a", hosts=("a",)), a=GB)
    wait(machine, SETTLE_SECONDS)
    assert machine.assigned == {"a": "allocation"}
    assert machine.elections.explain("a")[:2] == (
        "a is ready: served by node-b, node-c.",
        "It belongs on this node: on node-me's disk and fits (1.1 GB of 8.0 GB); 2 nodes serve it, one more adds "
        "capacity.",
    )


def test_many_models_each_solo() -> None:
    machine = in_a_mesh(other("b", "a", hosts=("a",)), other("c", "b", hosts=("b",)), c=GB)
    wait(machine, SETTLE_SECONDS)
    machine.tell(slot("c", "ready"))
    routes = {route.model: [host.peer_id for host in route.hosts] for route in machine.elections.routes.routes}
    assert routes == {"a": ["b"], "b": ["c"], "c": ["me"]}
    assert machine.elections.explain("a") == ("a is ready: served by node-b.",)
    assert machine.elections.explain("c")[0] == "c is ready: served by node-me."


@pytest.mark.parametrize("by", ["grant", "configuration"])
def test_a_client_only_node_serves_nothing_and_says_so(by: str) -> None:
    me = member() if by == "configuration" else replace(member(), grant="client")
    settings = replace(config("a"), client=by == "configuration")
    machine = Machine(settings, launcher(a=GB), SOME_PEERS, MembersReplaced((me, other("b", "x", hosts=("x",)))))
    wait(machine, 30)
    assert machine.assigned == {}
    assert machine.why == "this node is a client: it serves nothing and asks the others"
    assert machine.elections.explain("x") == (
        "x is ready: served by node-b.",
        "This node serves nothing: this node is a client: it serves nothing and asks the others.",
    )
    assert [item.name for item in machine.elections.catalog.models] == ["a", "x"]
    assert machine.status("a") == "needs_capacity"


def test_a_model_too_large_for_every_node_says_what_the_near_ones_offer() -> None:
    huge = model("huge", 20 * GB)
    machine = settled(huge=20 * GB)
    machine.tell(member("b", huge, is_self=False, vram_bytes=6 * GB))
    rtts = (PeerRtt(peer_id=PeerId("b"), rtt_seconds=0.4),)
    table = LoadRecord(peer_id=PeerId("far"), incarnation=1, seq=1, mesh_id=MeshId("m"), rtts=rtts)
    machine.tell(replace(member("far", huge, is_self=False, vram_bytes=9 * GB), rtt_seconds=0.5, load=table))
    refused = placed(machine, "huge")
    assert isinstance(refused, Refused)
    assert refused.detail == (
        "huge needs 22.0 GB and the largest node that has it, node-far, offers 9.0 GB on cpu; "
        "the near nodes that have it offer 8.0 GB + 6.0 GB; add a node or use a smaller quantization"
    )
    machine.tell(member("c", huge, is_self=False, vram_bytes=8 * GB))
    assert "but one model runs on one node in this version" in placed(machine, "huge").detail  # type: ignore[union-attr]


# -- entering a mesh ------------------------------------------------------------------------------------------------


def entering(*members: MemberChanged, **sizes: int) -> Machine:
    """Alone, serving its largest model, then in another mesh with ``members``."""
    machine = settled(**sizes)
    (model_,) = machine.assigned
    machine.tell(slot(model_, "ready"))
    me = member()
    machine.tell(replace(me, announcement=replace(me.announcement, mesh_id=MeshId("other"))))
    machine.tell(SOME_PEERS)
    for item in members:
        machine.tell(item)
    return machine


def test_a_newcomer_makes_room_for_a_model_that_the_mesh_lacks() -> None:
    """``meshctl join`` starts a node before it is in the mesh."""
    machine = entering(other("b", "a", hosts=("a",)), a=2 * GB, c=GB)
    assert machine.assigned == {"a": "allocation"}
    for _ in range(3):
        wait(machine, 3)
    assert machine.assigned == {"c": "allocation"}
    machine.tell(slot("a", "ready", in_use=1))
    assert machine.assigned == {"c": "allocation"}, "its engine still runs, and is not wanted back for that"
    assert "gave way to c" in machine.elections.explain("a")[-1]
    machine.tell(slot("a", "unloaded", ended_by="eviction"))
    assert machine.assigned == {"c": "allocation"}
    assert placed(machine, "a").peer_id == "b"  # type: ignore[union-attr]


def test_a_newcomer_that_has_nothing_the_mesh_lacks_stays() -> None:
    machine = entering(other("b", "a", hosts=("a",)), a=2 * GB)
    for _ in range(5):
        wait(machine, 5)
    assert machine.assigned == {"a": "allocation"}
    lonely = entering(other("b", "z", hosts=("z",)), a=2 * GB, c=GB)
    for _ in range(5):
        wait(lonely, 5)
    assert lonely.assigned == {"a": "allocation"}, "nobody else serves it"


def test_who_is_in_a_mesh_is_not_moved_by_who_enters() -> None:
    machine = settled(slot("a", "ready"), a=2 * GB, c=GB)
    machine.tell(other("b", "a", hosts=("a",)))
    for _ in range(5):
        wait(machine, 5)
    assert machine.assigned == {"a": "allocation"}
