"""What is asked of the slot table is answered: pins and limits; loads and leases are in test_slots and test_leases."""

from __future__ import annotations

from shared.messages.daemon import Done, Refused
from shared.messages.models import LimitsChanged
from tests.launcherd.table import World, config


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


def test_pins_survive_a_crash() -> None:
    world = World()
    world.bring_up("a")
    world.pin("a")
    world.crash("a")
    assert world.slot("a").pinned
    world.advance(2)
    world.ready("a")
    assert world.slot("a").pinned


def test_limits_are_told_with_their_reason() -> None:
    world = World(config((2,)))
    said = [message for message in world.published if isinstance(message, LimitsChanged)]
    assert said == [LimitsChanged(max_loaded_models=(2,) * 5, reason="as configured")]
    assert isinstance(world.set_limits(3, 1), Done)
    said = [message for message in world.published if isinstance(message, LimitsChanged)]
    assert said[-1].max_loaded_models == (3, 1, 1, 1, 1)
    assert "set while the node runs" in said[-1].reason
