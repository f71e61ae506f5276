"""Loading, limits and eviction: one test per rule, the rule in its docstring."""

from __future__ import annotations

from shared.ids import ModelName
from shared.messages.daemon import Done, Refused
from shared.messages.models import InventoryChanged, ModelLoaded
from tests.launcherd.table import GIB, World, config, model


def refused(reply: object) -> Refused:
    assert isinstance(reply, Refused), reply
    return reply


# -- loading -------------------------------------------------------------------------------------------------


def test_load_answers_when_the_model_is_ready() -> None:
    """LoadModel: make a model ready. Reply `ModelLoaded` when it is."""
    world = World()
    token = world.load("a")
    assert world.state("a") == "loading"
    assert world.reply(token) is None
    slot_id = world.ready("a")
    assert world.reply(token) == ModelLoaded(model=ModelName("a"), slot_id=slot_id, load_seconds=1.5, already=False)
    assert world.slot("a").pid
    assert world.slot("a").reason == "loaded in 1.5 s"


def test_load_without_waiting_answers_at_once() -> None:
    """With `wait` false the reply comes as soon as the load is queued (`Done`)."""
    world = World()
    assert isinstance(world.reply(world.load("a", wait=False)), Done)
    world.ready("a")


def test_equal_resolved_options_keep_the_engine() -> None:
    """TRAPS 24: /load of a loaded model with equal resolved options keeps the pid."""
    world = World()
    slot_id = world.bring_up("a")
    pid = world.slot("a").pid
    default_context_tokens = world.slot("a").context_tokens
    for token in (world.load("a"), world.load("a", context_tokens=default_context_tokens)):
        assert world.reply(token) == ModelLoaded(model=ModelName("a"), slot_id=slot_id, load_seconds=1.5, already=True)
    assert world.slot("a").pid == pid


def test_other_options_reload_after_the_requests_in_flight() -> None:
    """TRAPS 24: with other options it reloads; a busy model finishes first."""
    world = World()
    old = world.bring_up("a")
    lease = world.acquire("a")
    token = world.load("a", context_tokens=512)
    assert world.granted(lease)
    assert not world.stopping
    world.give_back(old)
    assert world.stopped("a") == old
    new = world.ready("a")
    assert new != old
    assert world.reply(token) == ModelLoaded(model=ModelName("a"), slot_id=new, load_seconds=1.5, already=False)
    assert world.slot("a").context_tokens == 512


def test_racing_equal_loads_agree() -> None:
    """TRAPS 24: two clients racing agree."""
    world = World()
    first, second = world.load("a"), world.load("a")
    slot_id = world.ready("a")
    assert world.reply(first) == world.reply(second)
    assert world.slot("a").slot_id == slot_id


def test_racing_different_loads_end_with_the_later_one() -> None:
    """`/load` is declarative: the last word stands, and each client is answered about what it asked for."""
    world = World()
    first, second = world.load("a", context_tokens=512), world.load("a", context_tokens=1024)
    one = world.ready("a")
    assert isinstance(world.reply(first), ModelLoaded)
    assert world.stopped("a") == one
    two = world.ready("a")
    reply = world.reply(second)
    assert isinstance(reply, ModelLoaded)
    assert reply.slot_id == two
    assert world.slot("a").context_tokens == 1024


def test_unknown_models_are_refused_with_the_nearest_name() -> None:
    """Errors say what, why and what to do next."""
    world = World()
    reply = refused(world.reply(world.load("bigg")))
    assert reply.code == "model_not_found"
    assert "did you mean 'big'" in reply.detail
    assert refused(world.reply(world.acquire("nothing-like-it"))).code == "model_not_found"


def test_file_names_and_paths_name_models() -> None:
    """Model names in requests: exact, or the file's base name with or without .gguf."""
    world = World()
    token = world.load("/somewhere/else/a.gguf")
    world.ready("a")
    assert isinstance(world.reply(token), ModelLoaded)
    assert world.granted(world.acquire("a.gguf"))


def test_loads_are_serialized_in_order() -> None:
    """Loads are serialized."""
    world = World(config((3,)))
    for name in "abc":
        world.load(name)
    assert [world.state(name) for name in "abc"] == ["loading", "queued", "queued"]
    assert world.slot("c").reason == "waits behind a in the load queue"
    world.ready("a")
    world.ready("b")
    world.ready("c")
    assert [world.state(name) for name in "abc"] == ["ready"] * 3


def test_a_request_that_goes_away_takes_its_queued_load_with_it() -> None:
    """A load that nobody waits for any more is not started, and its victim stays."""
    world = World()
    a = world.bring_up("a")
    lease = world.acquire("a")
    wanting = world.acquire("b")
    assert world.state("a") == "draining"
    world.withdraw(wanting)
    assert refused(world.reply(wanting)).code == "withdrawn"
    assert world.state("a") == "ready"
    assert ("proxy", "draining", False) in world.recalls()
    assert world.granted(lease)
    assert a in world.running


def test_a_queued_load_that_is_assigned_stays_without_its_request() -> None:
    """A wish of the mesh keeps a load that a request began."""
    world = World(config(parallel=1))
    slot_id = world.bring_up("a")
    world.acquire("a")
    waiting = world.acquire("b")
    queued = world.slot("b").slot_id
    world.assign(("b", "allocation"))
    world.withdraw(waiting)
    assert (world.slot("b").slot_id, world.slot("b").state) == (queued, "queued")
    world.live_for(61)
    world.give_back(slot_id)
    world.stopped("a")
    world.ready("b")


def test_a_caller_that_is_gone_leaves_the_queue() -> None:
    """TRAPS 26: the client is gone: its place in the queue is freed."""
    world = World()
    world.bring_up("a")
    world.acquire("a")
    world.gone(world.acquire("b"))
    assert world.state("a") == "ready"


# -- what fits -----------------------------------------------------------------------------------------------


def test_one_model_per_type_by_default_and_types_do_not_disturb_each_other() -> None:
    """`--max-loaded-models N` for every type, default 1."""
    world = World()
    world.bring_up("a")
    world.bring_up("emb")
    assert world.state("a") == "ready"
    world.bring_up("b")
    assert [world.state(name) for name in ("a", "b", "emb")] == ["unloaded", "ready", "ready"]


def test_limits_by_type() -> None:
    """Several numbers set the limits one by one, the rest 1."""
    world = World(config((2, 1)))
    for name in "abc":
        world.bring_up(name)
    assert [world.state(name) for name in "abc"] == ["unloaded", "ready", "ready"]


def test_minus_one_counts_no_models_but_memory_still_counts() -> None:
    """TRAPS 29: `-1` is a count policy, not a safety policy."""
    world = World(config((-1,)), capacity_bytes=10 * GIB)
    for name in ("a", "b", "c", "emb"):
        world.bring_up(name)
    world.bring_up("big")
    assert [world.state(name) for name in ("a", "b", "c")] == ["unloaded"] * 3
    assert world.state("emb") == "ready"


def test_a_model_larger_than_the_device_is_refused_with_the_numbers_and_evicts_nothing() -> None:
    """Refused before starting only if the need exceeds the device's total minus reserve."""
    world = World(capacity_bytes=10 * GIB)
    world.bring_up("a")
    reply = refused(world.reply(world.load("huge")))
    assert reply.code == "model_too_large"
    assert "94.5 GB" in reply.detail
    assert "10.7 GB" in reply.detail
    assert world.state("a") == "ready"
    assert world.state("huge") == "failed"
    assert refused(world.reply(world.acquire("huge"))).code == "model_too_large"


def test_what_does_not_fit_beside_others_evicts_the_least_recently_used_first() -> None:
    """If it exceeds what is free, LRU first."""
    world = World(config((3,)), capacity_bytes=int(10.5 * GIB))
    world.bring_up("a")
    world.advance(1)
    world.bring_up("b")
    world.advance(1)
    world.acquire("a")
    world.give_back(world.running_id("a"))
    world.bring_up("big")
    assert world.state("b") == "unloaded"
    assert world.state("a") == "ready"


def test_the_builtin_model_needs_no_place_and_gives_none() -> None:
    """Models flagged builtin take no slot of their type's limit and evict nobody."""
    world = World()
    world.bring_up("a")
    world.bring_up("guide")
    assert world.state("a") == "ready"
    world.bring_up("b")
    assert world.state("guide") == "ready"
    assert world.state("a") == "unloaded"


# -- eviction ------------------------------------------------------------------------------------------------


def test_last_use_moves_with_loads_and_requests() -> None:
    """Last use moves at load start and completion, request start and completion; LRU per type."""
    world = World(config((2,)))
    world.bring_up("a")
    world.advance(5)
    world.bring_up("b")
    world.advance(5)
    assert world.granted(world.acquire("a"))
    world.report(a=(2, 1, 1))
    world.advance(4)
    world.report(a=(2, 0, 1))
    world.give_back(world.running_id("a"))
    world.bring_up("c")
    assert [world.state(name) for name in "abc"] == ["ready", "unloaded", "ready"]


def test_an_idle_model_goes_before_a_busy_one() -> None:
    """A model in use counts as used now, however long ago its request began."""
    world = World(config((2,)))
    world.bring_up("a")
    world.acquire("a")
    world.live_for(30)
    world.bring_up("b")
    world.load("c")
    assert world.state("b") == "stopping"
    assert world.state("a") == "ready"


def test_a_victim_that_becomes_idle_first_is_taken_instead() -> None:
    """The load waits for whichever model is free first."""
    world = World(config((2,)))
    world.bring_up("a")
    world.bring_up("b")
    world.acquire("a", "h1")
    world.acquire("b", "h2")
    world.load("c")
    assert world.state("a") == "draining"
    world.give_back(world.running_id("b"), "h2")
    assert world.state("a") == "ready"
    assert world.state("b") == "stopping"


def test_the_victim_is_chosen_when_the_load_leaves_the_queue() -> None:
    """Loads are serialized; the victim is chosen when a load leaves the queue."""
    world = World(config((2,)))
    world.bring_up("a")
    world.advance(1)
    world.load("b")
    world.load("c")
    assert world.state("a") == "ready"
    world.advance(1)
    world.ready("b")
    assert world.state("a") == "stopping"


def test_a_busy_model_finishes_first_and_everything_else_goes_on() -> None:
    """TRAPS 19: never wait or stop under a lock; the queue waits as long as it takes."""
    world = World()
    a = world.bring_up("a")
    emb = world.bring_up("emb")
    world.acquire("a")
    world.load("b")
    world.live_for(600)
    world.alive()
    world.advance(0.3)
    assert world.state("a") == "draining"
    assert world.slot("b").reason == "waits for a to finish 2 requests"
    lease = world.acquire("emb")
    assert world.granted(lease)
    world.give_back(emb)
    world.give_back(a)
    assert world.state("a") == "stopping"


def test_a_draining_model_serves_what_came_before_and_nothing_later() -> None:
    """Requests that came before the load which displaces the model are served by it, later ones wait for a new load."""
    world = World(config(parallel=1))
    a = world.bring_up("a")
    running = world.acquire("a", "h1")
    before = world.acquire("a", "h2")
    world.load("b")
    after = world.acquire("a", "h1")
    assert world.granted(running)
    world.give_back(a, "h1")
    assert world.granted(before)
    assert not world.granted(after)
    world.give_back(a, "h2")
    world.stopped("a")
    world.ready("b")
    world.stopped("b")
    world.ready("a")
    assert world.granted(after)


def test_two_requests_on_one_model_both_finish_before_it_goes() -> None:
    """TRAPS 20: busy is a count, not a boolean."""
    world = World()
    a = world.bring_up("a")
    world.acquire("a", "h1")
    world.give_back(a, "h1", count=1)
    world.acquire("a", "h2")
    world.load("b")
    world.give_back(a, "h1")
    assert not world.stopping
    world.give_back(a, "h2")
    assert world.stopping


def test_nothing_is_stopped_while_credits_are_out_even_if_unused() -> None:
    """No byte reaches an engine without a lease, so a credit that is out keeps the engine up."""
    world = World()
    a = world.bring_up("a")
    world.acquire("a")
    world.report(a=(2, 0, 1))
    world.load("b")
    assert ("proxy", "draining", True) in world.recalls()
    assert not world.stopping
    world.give_back(a)
    assert world.stopping


# -- unloading -----------------------------------------------------------------------------------------------


def test_a_new_client_drops_everything_and_may_get_it_back() -> None:
    """Running requests finish; what electiond assigns when it is no client any more is loaded."""
    world = World()
    world.assign(("a", "flag"))
    a = world.ready("a")
    world.acquire("a")
    world.assign()
    world.become_client()
    assert world.state("a") == "draining"
    world.give_back(a)
    world.stopped("a")
    assert (world.slot("a").reason, world.slot("a").ended_by) == ("this node only consumes now", "dropped")
    world.assign(("a", "flag"))
    assert world.state("a") == "loading"


def test_unload_waits_for_running_requests() -> None:
    """UnloadModel: busy ones finish first."""
    world = World()
    a = world.bring_up("a")
    world.acquire("a")
    token = world.unload("a")
    assert world.state("a") == "draining"
    assert world.reply(token) is None
    world.give_back(a)
    world.stopped("a")
    assert isinstance(world.reply(token), Done)
    assert world.slot("a").reason == "unloaded by request"


def test_unload_all() -> None:
    """UnloadModel: all of them when `model` is empty."""
    world = World()
    world.bring_up("a")
    world.bring_up("emb")
    world.load("b")
    token = world.unload(None)
    world.stopped("a")
    world.stopped("emb")
    assert isinstance(world.reply(token), Done)
    assert [world.state(name) for name in ("a", "b", "emb")] == ["unloaded"] * 3
    assert not world.loading


def test_unload_during_the_load_stops_it_and_refuses_who_waits() -> None:
    """TRAPS 31: stopping is safe at any time, and twice."""
    world = World()
    load, lease = world.load("a"), world.acquire("a")
    first, second = world.unload("a"), world.unload("a")
    assert refused(world.reply(lease)).code == "unloaded"
    world.stopped("a")
    assert refused(world.reply(load)).code == "unloaded"
    assert isinstance(world.reply(first), Done)
    assert isinstance(world.reply(second), Done)


def test_unload_of_what_is_not_loaded_is_done() -> None:
    """Requests are declarative."""
    world = World()
    assert isinstance(world.reply(world.unload("a")), Done)
    assert refused(world.reply(world.unload("nope"))).code == "model_not_found"


def test_idle_models_are_unloaded_if_configured() -> None:
    """`idle_unload_minutes`: unload a model unused for so long; 0: never."""
    world = World(config((2,), idle_minutes=1))
    world.bring_up("a")
    world.bring_up("b")
    world.acquire("b")
    world.live_for(61)
    assert [world.state(name) for name in "ab"] == ["stopping", "ready"]
    assert world.slot("a").reason == "unused for 1 min"
    never = World()
    never.bring_up("a")
    never.advance(100_000)
    assert never.state("a") == "ready"


# -- configuration -------------------------------------------------------------------------------------------


def test_a_lower_limit_takes_effect_with_the_next_load() -> None:
    """ReloadConfig keeps untouched models loaded."""
    world = World(config((3,)))
    for name in "ab":
        world.bring_up(name)
        world.advance(1)
    world.reconfigure(config((1,)))
    assert [world.state(name) for name in "ab"] == ["ready", "ready"]
    world.bring_up("c")
    assert [world.state(name) for name in "abc"] == ["unloaded", "unloaded", "ready"]


def test_engine_options_take_effect_for_later_loads_and_show_in_the_inventory() -> None:
    """ReloadConfig: limits, folders and engine options take effect for later loads."""
    world = World()
    slot_id = world.bring_up("a")
    world.reconfigure(config(parallel=3))
    assert world.slot("a").slot_id == slot_id
    assert world.slot("a").parallel == 2
    inventory = [message for message in world.published if isinstance(message, InventoryChanged)][-1]
    assert {item.parallel for item in inventory.models} == {3}
    world.bring_up("b")
    assert world.slot("b").parallel == 3


def test_every_state_has_a_reason_in_words() -> None:
    """Every waiting state carries a reason in words (the table's invariants check it after each step)."""
    world = World()
    world.load("a")
    world.load("b")
    assert all(slot.reason for slot in world.slots.values())


def test_a_file_that_changed_forgets_earlier_failures() -> None:
    """What was learned about an old file says nothing about the new one."""
    world = World()
    world.load("a")
    world.fail()
    world.fail()
    assert refused(world.reply(world.acquire("a"))).code == "load_failed"
    from services.launcherd.slot_events import InventoryScanned

    world.do(InventoryScanned(models=(model("a", size_bytes=2 * GIB),)))
    world.acquire("a")
    world.ready("a")
