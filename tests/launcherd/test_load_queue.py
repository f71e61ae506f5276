"""The queue itself: order, words, and changes underneath it."""

from __future__ import annotations

import pytest

from shared.config import EngineSection, ModelsSection, NodeConfig
from shared.errors import OptionRefused
from shared.ids import ModelName
from shared.messages.models import LoadOrigin
from tests.launcherd.restarting_world import RestartingWorld
from tests.launcherd.table import DEFAULT_MODELS, GIB, World, config


def test_the_words_name_who_is_waited_for() -> None:
    """Queue state with a reason in words ("waits for llama-8b to finish 2 requests")."""
    world = World()
    world.bring_up("a")
    world.acquire("a")
    world.report(a=(2, 2, 2))
    world.load("b")
    world.advance(0.3)
    assert world.slot("b").reason == "waits for a to finish 2 requests"
    world.report(a=(2, 0, 2))
    world.advance(0.3)
    assert world.slot("b").reason == "waits for the last requests of a"
    world.give_back(world.running_id("a"))
    world.advance(0.3)
    assert world.slot("b").reason == "waits for a to stop"


def test_a_model_that_had_begun_to_go_is_not_loaded_anew_for_those_who_came_since() -> None:
    """What displaced it is not wanted any more: its engine serves them, with no stop and no load."""
    world = World()
    slot_id = world.bring_up("a")
    world.acquire("a")
    world.acquire("a", "h2")
    displacing = world.acquire("b")
    came_since = world.acquire("a", "h2")
    assert world.state("b") == "queued"
    world.withdraw(displacing)
    assert [slot.state for slot in world.table.book.of(ModelName("a"))] == ["ready"]
    world.give_back(slot_id)
    assert world.granted(came_since)
    assert not world.loading
    assert not world.stop_order


def test_a_model_that_goes_because_it_is_unused_is_kept_for_a_request() -> None:
    world = RestartingWorld(config(idle_minutes=1), capacity_bytes=10 * GIB, models=DEFAULT_MODELS)
    world.idle_holders = {"h1"}
    slot_id = world.bring_up("a")
    world.acquire("a", "h1")
    world.live_for(61, "h1")
    assert world.state("a") == "draining"
    request = world.acquire("a", "h2")
    assert world.table.book.slots[slot_id].state == "ready"
    world.give_back(slot_id, "h1")
    assert world.granted(request)
    assert not world.stop_order


@pytest.mark.parametrize("assigned_first", [True, False])
def test_the_assignment_that_follows_from_a_request_goes_with_it(assigned_first: bool) -> None:
    """18. A load that nobody waits for any more is dropped from the queue, and the assignment it led to with it."""
    world = World()
    world.bring_up("a")
    world.acquire("a")
    if assigned_first:
        world.assign(("b", "request"))
        request = world.acquire("b")
    else:
        request = world.acquire("b")
        world.assign(("b", "request"))
    world.withdraw(request)
    assert (world.state("b"), world.slot("b").ended_by) == ("unloaded", "dropped")
    assert world.state("a") == "ready"
    world.live_for(120)
    assert (world.state("a"), world.state("b")) == ("ready", "unloaded")
    again = world.acquire("b")
    world.give_back(world.running_id("a"))
    world.stopped("a")
    world.ready("b")
    assert world.granted(again), "asked for again, it comes as ever"


@pytest.mark.parametrize("origin", ["flag", "allocation"])
def test_what_belongs_here_anyway_stays_queued_after_its_request_went(origin: LoadOrigin) -> None:
    world = World()
    world.bring_up("a")
    world.acquire("a")
    world.assign(("b", origin))
    world.withdraw(world.acquire("b"))
    assert world.state("b") == "queued"


def test_what_another_node_asks_for_is_loaded_before_its_request_arrives() -> None:
    world = World()
    world.assign(("b", "request"))
    world.ready("b")
    assert world.state("b") == "ready"


def test_a_load_that_is_refused_lets_the_next_one_pass() -> None:
    world = World()
    world.load("a")
    world.load("huge")
    world.load("emb")
    world.ready("a")
    world.ready("emb")
    assert world.state("huge") == "failed"


def test_a_retry_goes_before_what_waits() -> None:
    world = World()
    world.load("a")
    world.load("emb")
    world.fail()
    assert next(iter(world.loading.values())).model.name == "a"


def test_a_restart_goes_before_what_waits() -> None:
    world = World(config((2,)))
    world.bring_up("a")
    world.load("b")
    world.load("emb")
    world.crash("a")
    world.advance(1.1)
    world.ready("b")
    assert next(iter(world.loading.values())).model.name == "a"


def test_raising_the_limit_saves_the_victim() -> None:
    """What has to go is computed anew at each step."""
    world = World()
    world.bring_up("a")
    world.acquire("a")
    world.load("b")
    assert world.state("a") == "draining"
    world.reconfigure(config((2,)))
    assert world.state("a") == "ready"
    assert world.state("b") == "loading"


def test_configured_engine_options_that_are_refused_are_said() -> None:
    """A bad option in mesh.toml is a message to whoever asks, not a crash."""
    node = NodeConfig(models=ModelsSection(), engine=EngineSection(extra_args=("--host", "0.0.0.0")), configured=True)
    world = World(node)
    world.assign(("a", "flag"))
    reply = world.reply(world.acquire("a"))
    assert getattr(reply, "code", "") == OptionRefused.code
    assert not world.loading
