"""Assignments from electiond: loaded, declined, protected. The rules are in placement.py's docstring."""

from __future__ import annotations

from shared.messages.models import ModelLoaded
from tests.launcherd.table import World, config


def test_assigned_models_are_loaded_with_origin_and_reason() -> None:
    """Assignments from electiond are loaded (origin, reason)."""
    world = World()
    world.assign(("a", "allocation"))
    assert world.state("a") == "loading"
    world.ready("a")
    assert world.slot("a").origin == "allocation"


def test_an_unloaded_model_is_declined_until_it_is_requested_again() -> None:
    """A slot unloaded by the user is not reloaded by the same assignment."""
    world = World()
    world.assign(("a", "flag"))
    world.ready("a")
    world.unload("a")
    world.stopped("a")
    world.assign(("a", "flag"))
    world.advance(1000)
    assert not world.loading
    assert world.state("a") == "unloaded"
    token = world.acquire("a")
    world.ready("a")
    assert world.granted(token)


def test_an_evicted_model_is_declined_too() -> None:
    """An evicted one is declined until requested again: two models never displace each other in turn by themselves."""
    world = World()
    world.assign(("a", "flag"))
    world.ready("a")
    world.load("b")
    world.stopped("a")
    world.ready("b")
    world.advance(1000)
    assert world.state("a") == "unloaded"
    assert world.slot("a").reason == "makes room for b"
    assert world.memory.declined == {"a": "makes room for b"}


def test_an_assignment_given_anew_loads_again() -> None:
    """Declined until the assignment is withdrawn and given anew."""
    world = World()
    world.assign(("a", "flag"))
    world.ready("a")
    world.unload("a")
    world.stopped("a")
    world.assign()
    world.assign(("a", "flag"))
    assert world.state("a") == "loading"


def test_a_late_assignment_does_not_bring_an_evicted_model_back() -> None:
    """A load by request becomes an assignment; when that arrives the model may have been evicted already."""
    world = World()
    world.bring_up("a")
    world.bring_up("b")
    world.assign(("a", "request"), ("b", "request"))
    assert world.state("b") == "ready"
    assert not world.loading


def test_a_model_that_lost_its_assignment_stays_until_it_is_evicted() -> None:
    """A ready slot whose assignment vanished stays until evicted (no preemption)."""
    world = World()
    world.assign(("a", "allocation"))
    world.ready("a")
    world.assign()
    world.advance(1000)
    assert world.state("a") == "ready"
    world.bring_up("b")
    assert world.state("a") == "unloaded"


def test_a_queued_load_whose_assignment_vanished_is_dropped() -> None:
    """Nobody wants it any more."""
    world = World()
    world.load("a")
    world.assign(("b", "allocation"))
    assert world.state("b") == "queued"
    world.assign()
    assert world.state("b") == "unloaded"


def test_a_model_is_safe_from_placement_for_a_minute() -> None:
    """A model is safe from mesh placement for 60 s after it became ready, so alternating requests can't thrash."""
    world = World()
    world.bring_up("a")
    world.assign(("b", "request"))
    world.advance(0.3)
    assert world.slot("b").reason == "waits, because a became ready less than 60 s ago"
    world.advance(59)
    assert world.state("a") == "ready"
    world.advance(1)
    assert world.state("a") == "stopping"


def test_a_request_here_displaces_at_once_what_a_placement_may_not() -> None:
    """The protection is against placement, not against requests on this node."""
    world = World()
    world.bring_up("a")
    world.assign(("b", "request"))
    assert world.state("a") == "ready"
    token = world.acquire("b")
    assert world.state("a") == "stopping"
    world.stopped("a")
    world.ready("b")
    assert world.granted(token)


def test_allocation_never_displaces_what_belongs_here() -> None:
    """allocation, promotion: no model that is assigned itself."""
    world = World()
    world.assign(("a", "flag"))
    world.ready("a")
    world.assign(("a", "flag"), ("b", "allocation"))
    world.advance(1000)
    assert world.state("a") == "ready"
    assert world.slot("b").reason == "waits, because a belongs here as well"


def test_a_blocked_placement_does_not_hold_up_others() -> None:
    """Only loads that may have a place wait in line for one."""
    world = World()
    world.bring_up("a")
    world.assign(("b", "request"))
    token = world.load("emb")
    world.ready("emb")
    assert isinstance(world.reply(token), ModelLoaded)


def test_the_owners_flag_displaces_what_the_mesh_placed() -> None:
    """flag: everything but other flagged models."""
    world = World()
    world.assign(("a", "allocation"))
    world.ready("a")
    world.assign(("b", "flag"))
    assert world.state("a") == "stopping"


def test_an_assignment_waits_for_its_model_to_appear() -> None:
    """electiond may know a model before the folders were read."""
    world = World()
    world.assign(("later", "flag"))
    assert not world.loading
    from services.launcherd.slot_events import InventoryScanned
    from tests.launcherd.table import model

    world.do(InventoryScanned(models=(model("later"),)))
    assert world.state("later") == "loading"


def test_declined_models_are_remembered_across_a_restart() -> None:
    """TRAPS 32: a restarted launcherd does not undo what people decided."""
    world = World()
    world.assign(("a", "flag"))
    world.ready("a")
    world.unload("a")
    world.stopped("a")
    again = World(config(), memory=world.memory, prefix="t")
    again.assign(("a", "flag"))
    assert not again.loading


def test_a_failed_assignment_is_not_tried_again_by_itself() -> None:
    """Crash loops stop until somebody asks again."""
    world = World()
    world.assign(("a", "flag"))
    world.fail()
    world.fail()
    world.assign(("a", "flag"))
    world.advance(1000)
    assert world.state("a") == "failed"
    assert not world.loading
