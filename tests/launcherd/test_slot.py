"""A slot's last word."""

from __future__ import annotations

import pytest

from tests.launcherd.table import World, config


@pytest.mark.parametrize(
    ("how", "ended_by"),
    [("owner", "owner"), ("eviction", "eviction"), ("idle", "idle"), ("dropped", "dropped"), ("crash", "replaced")],
)
def test_the_last_word_on_a_slot_says_who_ended_it(how: str, ended_by: str) -> None:
    """electiond leaves a node to its owner only after the owner's own unload."""
    world = World(config(idle_minutes=1.0))
    if how == "dropped":
        world.bring_up("a")
        world.acquire("a")
        waiting = world.acquire("b")
        slot_id = world.slot("b").slot_id
        world.withdraw(waiting)
    else:
        slot_id = world.bring_up("a")
    if how == "owner":
        world.unload("a")
    elif how == "eviction":
        world.load("b")
    elif how == "idle":
        world.advance(61)
    elif how == "crash":
        world.crash("a")
    if how not in ("dropped", "crash"):
        assert world.slots[slot_id].ended_by == ""
        world.stopped("a")
    assert (world.slots[slot_id].state, world.slots[slot_id].ended_by) == ("unloaded", ended_by)


def test_an_unload_is_the_owners_even_of_what_was_leaving_already() -> None:
    """The owner's word counts, whoever spoke before."""
    for state in ("draining", "stopping", "loading"):
        world = World()
        if state == "loading":
            world.load("a")
        else:
            slot_id = world.bring_up("a")
            if state == "draining":
                world.acquire("a")
            world.load("b")
        slot_id = world.slot("a").slot_id
        assert world.slots[slot_id].state == state
        world.unload("a")
        if state == "draining":
            world.give_back(slot_id)
        world.stopped("a")
        assert world.slots[slot_id].ended_by == "owner"
