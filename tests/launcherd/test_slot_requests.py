"""What is asked of the slot table is answered: pins and limits; loads and leases are in test_slots and test_leases."""

from __future__ import annotations

from shared.messages.daemon import Done, Refused
from shared.messages.models import LimitsChanged, ModelLoaded
from tests.launcherd.restarting_world import RestartingWorld
from tests.launcherd.table import DEFAULT_MODELS, GIB, World, config


def test_a_pin_names_a_model_as_a_load_does() -> None:
    world = World()
    world.bring_up("a")
    assert isinstance(world.pin("a.gguf"), Done)
    assert world.slot("a").pinned
    answer = world.pin("aa")
    assert isinstance(answer, Refused)
    assert (answer.code, "did you mean 'a'" in answer.detail) == ("model_not_found", True)


def test_a_pinned_model_whose_file_is_gone_can_be_unpinned() -> None:
    world = World()
    world.pin("a")
    after = World(models=(), memory=world.memory)
    assert isinstance(after.pin("a", False), Done)
    assert after.memory.pinned == frozenset()


def test_a_refused_load_pins_nothing() -> None:
    world = World()
    assert isinstance(world.reply(world.load("zz", pinned=True)), Refused)
    assert world.memory.pinned == frozenset()


def test_a_load_pins_and_unpins_a_model_that_is_loaded_without_reloading_it() -> None:
    world = World()
    slot_id = world.bring_up("a")
    for pinned in (True, False):
        world.load("a", pinned=pinned)
        assert world.slot("a").pinned is pinned
    world.load("a", pinned=None)
    assert world.slot("a").slot_id == slot_id
    assert not world.stop_order


def test_who_waits_on_a_node_that_becomes_a_client_is_told_so_and_may_ask_another() -> None:
    """Refused as "unloaded" the request would end: its owner wants it gone. A client only wants it elsewhere."""
    world = World()
    for of_client, code in ((False, "unloaded"), (True, "client")):
        waiting = world.acquire("a")
        assert world.loading
        if of_client:
            world.become_client()
        else:
            world.unload("a", wait=False)
        answer = world.reply(waiting)
        assert isinstance(answer, Refused)
        assert answer.code == code
        world.stopped("a")


def test_pins_survive_a_crash() -> None:
    world = World()
    world.bring_up("a")
    world.pin("a")
    world.crash("a")
    assert world.slot("a").pinned
    world.advance(2)
    world.ready("a")
    assert world.slot("a").pinned


def test_an_unused_model_that_is_pinned_while_it_goes_is_kept() -> None:
    """A pinned model is not unloaded when it is idle, not even when that had begun."""
    world = RestartingWorld(config(idle_minutes=1), capacity_bytes=10 * GIB, models=DEFAULT_MODELS)
    world.idle_holders = {"h1"}
    slot_id = world.bring_up("a")
    world.acquire("a", "h1")
    world.live_for(61, "h1")
    assert world.state("a") == "draining"
    world.pin("a")
    assert (world.slot("a").slot_id, world.state("a")) == (slot_id, "ready")
    world.give_back(slot_id, "h1")
    assert not world.stopping


def test_a_load_that_pins_a_model_while_it_goes_keeps_it() -> None:
    world = World()
    slot_id = world.bring_up("a")
    world.acquire("a")
    other = world.load("b")
    assert world.state("a") == "draining"
    token = world.load("a", pinned=True)
    kept = world.reply(token)
    assert isinstance(kept, ModelLoaded)
    assert (kept.slot_id, kept.already) == (slot_id, True)
    assert isinstance(world.reply(other), Refused), "only a pinned model could make room for it"


def test_limits_are_told_with_their_reason() -> None:
    world = World(config((2,)))
    said = [message for message in world.published if isinstance(message, LimitsChanged)]
    assert said == [LimitsChanged(max_loaded_models=(2,) * 5, reason="as configured")]
    assert isinstance(world.set_limits(3, 1), Done)
    said = [message for message in world.published if isinstance(message, LimitsChanged)]
    assert said[-1].max_loaded_models == (3, 1, 1, 1, 1)
    assert "set while the node runs" in said[-1].reason


def test_unloading_where_nothing_is_loaded_is_said_in_words() -> None:
    world = World()
    for name, words in ((None, "no model is loaded"), ("a", "a is not loaded")):
        answer = world.reply(world.unload(name))
        assert isinstance(answer, Done)
        assert answer.detail == f"{words}: nothing to do"
