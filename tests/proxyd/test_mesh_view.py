"""What a model name means, for every state the daemons can report, and when some of them are silent."""

from __future__ import annotations

import pytest

from services.proxyd.mesh_view import (
    MeshView,
    NoneReady,
    NotReady,
    Ready,
    Unknown,
    Unnamed,
    Unsettled,
    WrongType,
)
from shared.ids import MeshId, ModelName, PeerId, SlotId
from shared.messages.mesh import Announcement, LoadRecord, MemberChanged, MemberState, ModelLoad, TunnelChanged
from shared.messages.models import (
    CatalogChanged,
    CatalogStatus,
    InventoryChanged,
    LocalModel,
    MeshModel,
    ModelType,
    Route,
    RouteHost,
    RoutesChanged,
    SlotChanged,
    SlotState,
)

ME = PeerId("me")
OTHER = PeerId("other")


def mesh_model(name: str, type: ModelType = "llm", status: CatalogStatus = "unloaded", size: int = 1) -> MeshModel:
    return MeshModel(name=ModelName(name), type=type, status=status, reason=f"{name} {status}", file_size_bytes=size)


def catalog(*models: MeshModel) -> CatalogChanged:
    return CatalogChanged(models=models)


def inventory(*names: str, scanning: bool = False) -> InventoryChanged:
    models = tuple(LocalModel(name=ModelName(name), type="llm", path="/m", file_size_bytes=1) for name in names)
    return InventoryChanged(models=models, scanning=scanning)


def slot(model: str, state: SlotState, type: ModelType = "llm", slot_id: str = "", parallel: int = 4) -> SlotChanged:
    return SlotChanged(
        slot_id=SlotId(slot_id or f"slot-{model}"), model=ModelName(model), type=type, state=state,
        reason=f"{model} is {state}", origin="request", parallel=parallel,
    )  # fmt: skip


def routes(**models: tuple[str, ...]) -> RoutesChanged:
    return RoutesChanged(
        routes=tuple(
            Route(model=ModelName(name), type="llm", hosts=tuple(RouteHost(peer_id=PeerId(p)) for p in peers))
            for name, peers in models.items()
        )
    )


def member(peer_id: PeerId, *loads: ModelLoad, state: MemberState = "alive") -> MemberChanged:
    announcement = Announcement(
        peer_id=peer_id, incarnation=1, seq=1, mesh_id=MeshId("m"), version="1", name="attic", role="host",
        state="active",
    )  # fmt: skip
    record = LoadRecord(peer_id=peer_id, incarnation=1, seq=1, mesh_id=MeshId("m"), loads=loads)
    return MemberChanged(announcement=announcement, state=state, reason="", load=record if loads else None)


@pytest.fixture
def view() -> MeshView:
    made = MeshView()
    made.apply(TunnelChanged(peer_id=ME, port=1, addresses=()))
    made.apply(inventory("a", "b"))
    made.apply(catalog(mesh_model("a"), mesh_model("b"), mesh_model("e", "embedding")))
    return made


def test_a_ready_slot_here_is_a_host_although_electionds_routes_lag(view: MeshView) -> None:
    view.apply(slot("a", "ready"))
    found = view.resolve("a", "llm")
    assert isinstance(found, Ready)
    assert found.local
    assert [host.peer_id for host in found.hosts] == [ME]
    [listed] = [model for model in view.models() if model.name == "a"]
    assert (listed.status, listed.hosts) == ("ready", (ME,))


def test_a_route_to_this_node_is_not_believed_when_launcherd_has_no_ready_slot(view: MeshView) -> None:
    view.apply(routes(a=("me",)))
    assert isinstance(view.resolve("a", "llm"), NotReady)
    view.apply(slot("a", "ready"))
    view.apply(slot("a", "unloaded"))
    assert isinstance(view.resolve("a", "llm"), NotReady)


def test_hosts_elsewhere_come_from_the_routes(view: MeshView) -> None:
    view.apply(routes(a=("other", "me")))
    found = view.resolve("a", "llm")
    assert isinstance(found, Ready)
    assert ([host.peer_id for host in found.hosts], found.local) == ([OTHER], False)
    view.apply(slot("a", "ready"))
    found = view.resolve("a", "llm")
    assert isinstance(found, Ready)
    assert ([host.peer_id for host in found.hosts], found.local) == ([ME, OTHER], True)


def test_a_host_elsewhere_is_as_busy_as_its_node_says(view: MeshView) -> None:
    view.apply(routes(a=("other",)))
    view.apply(
        member(
            OTHER,
            ModelLoad(model=ModelName("a"), in_use=2, waiting=1, parallel=2),
            ModelLoad(model=ModelName("b"), in_use=0, waiting=0, parallel=8),
        )
    )
    found = view.resolve("a", "llm")
    assert isinstance(found, Ready)
    assert [(host.load, host.parallel) for host in found.hosts] == [(1.5, 2)]


def test_a_suspected_host_is_marked_until_it_is_heard_again(view: MeshView) -> None:
    view.apply(routes(a=("other",), b=("third",)))
    view.apply(slot("a", "ready"))
    view.apply(member(OTHER, state="suspect"))
    found = view.resolve("a", "llm")
    assert isinstance(found, Ready)
    assert found.suspects == {OTHER}
    other = view.resolve("b", "llm")
    assert isinstance(other, Ready)
    assert not other.suspects
    view.apply(member(OTHER))
    found = view.resolve("a", "llm")
    assert isinstance(found, Ready)
    assert not found.suspects


@pytest.mark.parametrize(
    ("state", "starting"),
    [("queued", True), ("loading", True), ("restarting", True), ("draining", False), ("failed", False)],
)
def test_a_model_that_is_not_ready_says_why(view: MeshView, state: SlotState, starting: bool) -> None:
    view.apply(slot("a", state))
    found = view.resolve("a", "llm")
    assert found == NotReady(ModelName("a"), "llm", f"a is {state}", starting)
    assert view.waiting_reason(ModelName("a")) == f"a is {state}"


def test_the_best_of_several_slots_of_a_model_counts(view: MeshView) -> None:
    view.apply(slot("a", "draining", slot_id="old"))
    view.apply(slot("a", "ready", slot_id="new"))
    assert isinstance(view.resolve("a", "llm"), Ready)
    view.apply(slot("a", "stopping", slot_id="old"))
    assert isinstance(view.resolve("a", "llm"), Ready)


def test_an_unknown_model_comes_with_the_nearest_names(view: MeshView) -> None:
    view.apply(catalog(mesh_model("qwen3-8b"), mesh_model("llama-70b")))
    found = view.resolve("qwen-8b", "llm")
    assert isinstance(found, Unknown)
    assert found.nearest[0] == "qwen3-8b"


def test_a_file_name_means_its_model(view: MeshView) -> None:
    assert isinstance(view.resolve("a.gguf", "llm"), NotReady)


def test_a_model_of_the_wrong_type(view: MeshView) -> None:
    assert view.resolve("e", "llm") == WrongType(ModelName("e"), "embedding")
    view.apply(slot("e", "ready", "embedding"))
    assert view.resolve("e", "llm") == WrongType(ModelName("e"), "embedding")
    assert isinstance(view.resolve("e", "embedding"), Ready)


def test_no_model_means_the_only_ready_one_of_the_routes_type(view: MeshView) -> None:
    assert view.resolve(None, "llm") == Unnamed(())
    view.apply(slot("a", "ready"))
    view.apply(slot("e", "ready", "embedding"))
    found = view.resolve(None, "llm")
    assert isinstance(found, Ready)
    assert found.model == "a"
    view.apply(slot("b", "ready"))
    assert view.resolve(None, "llm") == Unnamed((ModelName("a"), ModelName("b")))


def test_auto_is_the_largest_ready_one_local_first(view: MeshView) -> None:
    view.apply(catalog(mesh_model("small", size=1), mesh_model("big", size=9), mesh_model("far", size=99)))
    view.apply(routes(far=("other",)))
    found = view.resolve("auto", "llm")
    assert isinstance(found, Ready)
    assert found.model == "far"
    view.apply(slot("small", "ready"))
    view.apply(slot("big", "ready"))
    found = view.resolve("auto", "llm")
    assert isinstance(found, Ready)
    assert found.model == "big"


def test_auto_waits_for_what_is_starting_and_else_says_that_nothing_is_ready(view: MeshView) -> None:
    assert isinstance(view.resolve("auto", "llm"), NoneReady)
    view.apply(slot("a", "loading"))
    found = view.resolve("auto", "llm")
    assert isinstance(found, NotReady)
    assert found.model == "a"


def test_a_model_that_is_called_auto_is_that_model(view: MeshView) -> None:
    view.apply(slot("a", "ready"))
    view.apply(catalog(mesh_model("auto")))
    found = view.resolve("auto", "llm")
    assert isinstance(found, NotReady)
    assert found.model == "auto"


def test_before_the_models_are_known_nothing_is_called_unknown() -> None:
    view = MeshView()
    assert isinstance(view.resolve("x", "llm"), Unsettled)
    view.apply(catalog())
    assert isinstance(view.resolve("x", "llm"), Unsettled)
    view.apply(inventory(scanning=True))
    assert isinstance(view.resolve("x", "llm"), Unsettled)
    view.apply(inventory())
    assert isinstance(view.resolve("x", "llm"), Unknown)


def test_without_electiond_this_nodes_own_models_are_known() -> None:
    view = MeshView()
    view.apply(inventory("a"))
    assert isinstance(view.resolve("a", "llm"), NotReady)
    assert isinstance(view.resolve("x", "llm", settled=True), Unknown)


def test_a_snapshot_replaces_what_its_daemon_said_and_nothing_else(view: MeshView) -> None:
    view.apply(slot("a", "ready"))
    view.replace("electiond", [catalog(mesh_model("c"))])
    assert {model.name for model in view.models()} == {"a", "b", "c"}
    assert isinstance(view.resolve("a", "llm"), Ready)
    view.replace("launcherd", [inventory("d")])
    assert {model.name for model in view.models()} == {"c", "d"}


def test_a_loading_slot_does_not_hide_that_another_node_serves_the_model(view: MeshView) -> None:
    served = MeshModel(name=ModelName("a"), type="llm", status="ready", reason="", hosts=(OTHER,))
    view.apply(catalog(served))
    view.apply(routes(a=("other",)))
    view.apply(slot("a", "loading"))
    [listed] = [model for model in view.models() if model.name == "a"]
    assert (listed.status, listed.hosts) == ("ready", (OTHER,))


def test_a_model_that_this_node_calls_by_another_name_is_one_model(view: MeshView) -> None:
    """Two files of one name: the mesh tells them apart, launcherd knows only its own."""
    theirs = mesh_model("a", status="ready")
    ours = MeshModel(
        name=ModelName("a@0001"), type="llm", status="unloaded", reason="on disk", nodes_on_disk=(ME,),
        name_here=ModelName("a"),
    )  # fmt: skip
    view.apply(catalog(theirs, ours))
    view.apply(routes(a=("other",)))
    assert [model.name for model in view.models()] == ["a", "a@0001", "b"]
    view.apply(slot("a", "loading"))
    found = view.resolve("a@0001", "llm")
    assert isinstance(found, NotReady)
    assert found.starting_here
    view.apply(slot("a", "ready"))
    found = view.resolve("a@0001", "llm")
    assert isinstance(found, Ready)
    assert ([host.peer_id for host in found.hosts], found.local) == ([ME], True)
    other = view.resolve("a", "llm")
    assert isinstance(other, Ready)
    assert ([host.peer_id for host in other.hosts], other.local) == ([OTHER], False)
    assert view.local_name(ModelName("a@0001")) == "a"
    assert view.waiting_reason(ModelName("a@0001")) == "all 4 places of a@0001 are in use"
    assert view.on_disk_here(ModelName("a@0001"))
    assert not view.on_disk_here(ModelName("a"))


def test_who_serves_what_elsewhere(view: MeshView) -> None:
    view.apply(routes(a=("other", "me"), b=("me",)))
    view.apply(member(OTHER))
    assert view.hosts_elsewhere() == {"a": ("attic",)}


def test_names_of_nodes(view: MeshView) -> None:
    announcement = Announcement(
        peer_id=OTHER, incarnation=1, seq=1, mesh_id=MeshId("m"), version="1", name="attic", role="host", state="active"
    )
    view.apply(MemberChanged(announcement=announcement, state="alive", reason=""))
    assert view.node_name(OTHER) == "attic"
    assert view.node_name(PeerId("nobody")) == "nobody"
    view.apply(MemberChanged(announcement=announcement, state="dead", reason="gone"))
    assert OTHER not in view.members


def test_each_change_moves_the_version(view: MeshView) -> None:
    before = view.version
    view.apply(slot("a", "loading"))
    assert view.version > before


def test_a_busy_model_says_how_many_places_it_has(view: MeshView) -> None:
    view.apply(slot("a", "ready", parallel=3))
    assert "3 places" in view.waiting_reason(ModelName("a"))
