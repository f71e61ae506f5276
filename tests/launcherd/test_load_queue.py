"""The queue itself: order, words, and changes underneath it."""

from __future__ import annotations

from shared.config import EngineSection, ModelsSection, NodeConfig
from shared.errors import OptionRefused
from tests.launcherd.table import World, config


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
