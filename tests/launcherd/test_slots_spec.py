"""docs/spec/slots.md, rule by rule: each test quotes the rule it shows."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.launcherd.slot_events import EngineAdopted, Memory
from shared.config import parse_limits
from shared.errors import ConfigError
from shared.ids import ModelName
from shared.messages.daemon import Done, Refused
from shared.messages.models import LimitsChanged, ModelLoaded
from tests.launcherd.table import GIB, NPU_MODELS, World, config, model, refused, running

SPEC = Path(__file__).parents[2] / "docs" / "spec" / "slots.md"


def test_every_rule_is_quoted_by_a_test() -> None:
    rules = re.findall(r"^\d+\. .*?(?=\n\n|\n\d+\. |\Z)", SPEC.read_text(encoding="utf-8"), re.S | re.M)
    quoted = [
        " ".join((function.__doc__ or "").split())
        for name, function in vars(sys.modules[__name__]).items()
        if name.startswith("test_")
    ]
    missing = [rule for rule in (" ".join(rule.split()) for rule in rules) if rule not in quoted]
    assert not missing
    assert len(rules) >= 20


# -- limits ----------------------------------------------------------------------------------------------------


def test_one_model_of_each_type_by_default() -> None:
    """1. A node holds at most `max_loaded_models` models of each type (llm, embedding, reranking, audio, image), 1
    unless it is told otherwise; the built-in guide does not count."""
    world = World()
    world.bring_up("a")
    world.bring_up("emb")
    world.bring_up("guide")
    world.bring_up("b")
    assert running(world) == {"b", "emb", "guide"}


@pytest.mark.parametrize("wrong", [0, -2, "0", "1 0", "-2", "1 2 3 4 5 6", "x", "", [1, "y"]])
def test_numbers_that_mean_nothing_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="each is -1"):
        parse_limits(wrong, source="test")


def test_one_number_or_several() -> None:
    """2. One number is for every type; several are for llm, embedding, reranking, audio and image in this order, the
    rest 1; -1 is no limit; 0, less than -1 and more than five numbers are refused."""
    world = World()
    for limits, each in (((3,), (3,) * 5), ((5, 2, 4), (5, 2, 4, 1, 1)), ((-1, 2), (-1, 2, 1, 1, 1))):
        assert isinstance(world.set_limits(*limits), Done)
        told = [message for message in world.published if isinstance(message, LimitsChanged)]
        assert told[-1].max_loaded_models == each
    for wrong in ((0,), (-2,), (1, 0), (1,) * 6, ()):
        assert refused(world.set_limits(*wrong)).code == "config"
    assert told[-1].max_loaded_models == (-1, 2, 1, 1, 1)


@pytest.mark.parametrize("live", [True, False])
def test_a_changed_limit_counts_from_the_next_load_on(live: bool) -> None:
    """3. A limit that is changed while the node runs, by `internal/set` or in the configuration, counts from the next
    load on; what is loaded stays."""
    world = World(config((3,)))
    for name in "abc":
        world.bring_up(name)
    if live:
        world.set_limits(1)
    else:
        world.reconfigure(config((1,)))
    assert running(world) == {"a", "b", "c"}
    world.bring_up("big")
    assert running(world) == {"big"}


def test_a_limit_that_was_set_outlives_launcherd() -> None:
    """4. A limit set by `internal/set` holds over restarts of launcherd, until the configured one changes or the node
    starts anew."""
    world = World(config((1,)))
    world.set_limits(2)
    after = World(config((1,)), memory=world.memory)
    after.bring_up("a")
    after.bring_up("b")
    assert running(after) == {"a", "b"}
    after.reconfigure(config((1,), idle_minutes=5))
    assert after.memory.limits_set == (2,)
    after.reconfigure(config((3,)))
    assert after.memory.limits_set == ()
    after.bring_up("c")
    assert running(after) == {"a", "b", "c"}


def test_the_least_recently_used_of_the_type_makes_room() -> None:
    """5. Where a limit is reached, the least recently used model of that type makes room."""
    world = World(config((2, 1)))
    world.bring_up("emb")
    for name in "ab":
        world.advance(1)
        world.bring_up(name)
    world.advance(1)
    world.bring_up("c")
    assert running(world) == {"b", "c", "emb"}


def test_use_is_the_start_and_end_of_loads_and_requests() -> None:
    """6. A model is used when its load starts and completes, and when a request on it starts and completes; one that is
    in use counts as used now."""
    world = World(config((2,)))
    slow = world.load("a")
    world.advance(100)
    world.ready("a")
    assert world.reply(slow)
    assert world.slot("a").last_use_age_seconds == 0
    world.bring_up("b")
    lease = world.acquire("a")
    assert world.granted(lease)
    world.live_for(5)
    world.report(a=(2, 0, 1))  # The request ends now.
    world.give_back(world.running_id("a"))
    world.advance(1)
    world.bring_up("c")
    assert running(world) == {"a", "c"}  # b was loaded after a, but a's request ended later.
    busy = world.acquire("a")
    assert world.granted(busy)
    world.live_for(5)
    world.bring_up("b")
    assert running(world) == {"a", "b"}  # c was used after the request on a began, but a is in use.


# -- memory ----------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_and_nothing_goes() -> None:
    """7. A model that needs more than the device has in all, less the reserve, is refused before it starts, with the
    numbers, and nothing is unloaded for it; no limit (-1) does not change that."""
    world = World(config((-1,)), capacity_bytes=10 * GIB)
    world.bring_up("a")
    answer = refused(world.reply(world.load("huge")))
    assert answer.code == "model_too_large"
    assert "10.7 GB" in answer.detail
    assert "11.8 GB in all" in answer.detail
    assert running(world) == {"a"}
    assert not world.stop_order


def test_memory_takes_its_own_type_first() -> None:
    """8. A model that does not fit beside what is loaded makes the least recently used models go, those of its own type
    first."""
    world = World(config((-1,)), capacity_bytes=12 * GIB)
    for name in ("emb", "a", "b"):
        world.advance(1)
        world.bring_up(name)
    world.advance(1)
    world.load("big")
    assert world.stopping
    while world.stopping:
        world.stopped()
    world.ready("big")
    assert running(world) == {"emb", "b", "big"}


# -- the NPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(-1,), (1,), (5, 5, 5, 5, 5)])
def test_one_model_at_a_time_uses_the_npu(limits: tuple[int, ...]) -> None:
    """9. One model at a time uses the NPU, whatever its type and whatever the limits: loading one unloads the other."""
    world = World(config(limits), models=NPU_MODELS)
    world.bring_up("npu-llm")
    assert world.slot("npu-llm").processors == ("npu",)
    world.bring_up("npu-emb")
    assert running(world) == {"npu-emb"}
    world.bring_up("npu-hybrid")
    assert running(world) == {"npu-hybrid"}
    if limits != (1,):
        world.bring_up("a")
        world.bring_up("cpu-llm")
        assert running(world) == {"npu-hybrid", "a", "cpu-llm"}


# -- loads that fail -------------------------------------------------------------------------------------------


def test_a_failed_load_unloads_everything_and_is_tried_again() -> None:
    """10. After a load that failed, everything of every type is unloaded, pinned models too, each after its requests,
    and the load is tried once more."""
    world = World(config((2,)))
    world.bring_up("emb")
    world.bring_up("a")
    world.pin("a")
    lease = world.acquire("a")
    token = world.load("b")
    world.fail()
    assert world.granted(lease)
    assert set(world.stopping.values()) == {"emb"}  # a runs a request.
    world.stopped("emb")
    assert not world.loading
    world.give_back(world.running_id("a"))
    world.stopped("a")
    world.ready("b")
    assert isinstance(world.reply(token), ModelLoaded)
    assert running(world) == {"b"}


@pytest.mark.parametrize("code", ["model_file_missing", "engine_missing", "option_refused", "state_not_writable"])
def test_failures_that_no_loaded_model_is_to_blame_for(code: str) -> None:
    """11. A missing model file, a missing engine, a refused option and a disk that cannot be written to unload nothing
    and are not tried again."""
    world = World(config((2,)))
    world.bring_up("a")
    # The words speak of memory; what counts is the kind of failure.
    token = world.load("b")
    world.fail(code, "CUDA error: out of memory")
    assert isinstance(world.reply(token), Refused)
    assert running(world) == {"a"}
    assert not world.stopping
    assert not world.loading
    assert world.state("b") == "failed"


@pytest.mark.parametrize("code", ["engine_exited", "load_timed_out", "engine_port_taken", "model_file_broken"])
def test_a_second_failure_is_the_last(code: str) -> None:
    """12. A model that failed twice is failed, with the reason, and not tried again before its cool-down is over."""
    world = World()
    token = world.load("a")
    # The words speak of a missing file; what counts is the kind of failure.
    world.fail(code, "No such file or directory")
    assert world.loading
    world.fail(code, "No such file or directory")
    assert "tried twice" in refused(world.reply(token)).detail
    assert world.state("a") == "failed"
    again = refused(world.reply(world.acquire("a")))
    assert again.retry_after_seconds
    world.advance(again.retry_after_seconds + 1)
    world.acquire("a")
    assert world.loading


def test_a_crash_is_no_failed_load() -> None:
    """13. An engine that ends after it was ready is no failed load: it is restarted, and nothing is unloaded for it."""
    world = World(config((2,)))
    world.bring_up("a")
    world.bring_up("b")
    world.crash("b")
    world.advance(3)
    world.ready("b")
    assert running(world) == {"a", "b"}
    assert not world.stop_order


# -- the queue -------------------------------------------------------------------------------------------------


def test_loads_happen_one_at_a_time_in_order() -> None:
    """14. Loads happen one at a time, in the order in which they were asked for."""
    world = World(config((-1,)))
    for name in ("a", "emb", "b"):
        world.load(name)
    for name in ("a", "emb", "b"):
        assert [start.model.name for start in world.loading.values()] == [name]
        world.ready(name)
    assert not world.loading


def test_the_victim_is_chosen_late() -> None:
    """15. What has to go is chosen when the load leaves the queue, not when it is asked for."""
    world = World(config((2, 1)))
    world.bring_up("a")
    world.advance(1)
    world.bring_up("b")
    world.advance(1)
    world.load("emb")
    world.load("c")  # Behind emb; a would have to go for it now.
    assert world.granted(world.acquire("a"))
    world.give_back(world.running_id("a"))
    world.advance(1)
    world.ready("emb")
    assert set(world.stopping.values()) == {"b"}


def test_requests_finish_first_and_everything_else_serves() -> None:
    """16. A model that is in use finishes its requests before it goes, however long that takes; meanwhile everything
    else that is loaded serves."""
    world = World(config((1, 1)))
    world.bring_up("emb")
    slot_id = world.bring_up("a")
    assert world.granted(world.acquire("a"))
    waiting = world.load("b")
    for _ in range(60):
        world.live_for(60)
        lease = world.acquire("emb")
        assert world.granted(lease)
        world.give_back(world.running_id("emb"))
        assert not world.stopping
    assert "waits for a to finish" in world.slot("b").reason
    world.give_back(slot_id)
    world.stopped("a")
    world.ready("b")
    assert isinstance(world.reply(waiting), ModelLoaded)


def test_a_load_returns_a_lease() -> None:
    """17. A model that was loaded for a request runs that request before it can go."""
    world = World()
    first, second = world.acquire("a"), world.acquire("b")
    slot_id = world.ready("a")
    assert world.granted(first)  # b waits for the place already.
    assert not world.stopping
    world.give_back(slot_id)
    world.stopped("a")
    world.ready("b")
    assert world.granted(second)


def test_a_load_that_nobody_wants_is_dropped() -> None:
    """18. A load that nobody waits for any more is dropped from the queue."""
    world = World(config((2,)))
    world.load("a")
    waiting = world.acquire("b")
    assert world.state("b") == "queued"
    world.gone(waiting)
    assert world.state("b") == "unloaded"
    world.ready("a")
    assert not world.loading


def test_loads_are_declarative() -> None:
    """19. A load of a model that is loaded with equal resolved options changes nothing; with other options it is loaded
    anew."""
    world = World()
    slot_id = world.bring_up("a")
    same = world.load("a", context_tokens=world.slot("a").context_tokens)
    assert world.reply(same) == ModelLoaded(model=ModelName("a"), slot_id=slot_id, load_seconds=1.5, already=True)
    other = world.load("a", context_tokens=512)
    world.stopped("a")
    assert world.ready("a") != slot_id
    loaded = world.reply(other)
    assert isinstance(loaded, ModelLoaded)
    assert not loaded.already


# -- pins and idle models ----------------------------------------------------------------------------------------


def test_pins_resist_other_models_and_idleness() -> None:
    """20. A pinned model is not unloaded to make room for another one, and not when it is idle."""
    world = World(config((2,), idle_minutes=10))
    world.load("a", pinned=True)
    world.ready("a")
    world.advance(1)
    world.bring_up("b")
    world.bring_up("c")  # a was used least recently.
    assert running(world) == {"a", "c"}
    assert world.slot("a").pinned
    assert not world.slot("c").pinned
    world.advance(3600)
    assert set(world.stopping.values()) == {"c"}
    assert running(world) == {"a"}


def test_a_pin_holds_until_it_is_taken_back() -> None:
    """21. A pin holds until it is taken back, over unloads and restarts of launcherd and of the node."""
    world = World()
    assert "not loaded now" in str(world.pin("a"))
    slot_id = world.bring_up("a")
    assert world.slot("a").pinned
    world.unload("a")
    world.stopped("a")
    slot_id = world.bring_up("a")
    assert world.slot("a").pinned
    kept = replace(world.memory, slots={}, credits={})
    after = World(memory=kept)
    after.bring_up("a")
    assert refused(after.reply(after.load("b"))).code == "all_pinned"
    assert isinstance(after.pin("a", False), Done)
    assert not after.slot("a").pinned
    after.bring_up("b")
    assert running(after) == {"b"}
    assert refused(world.pin("nothing-like-it")).code == "model_not_found"
    assert slot_id in world.running


def test_only_pins_in_the_way() -> None:
    """22. A load that only pinned models stand in the way of is refused at once, with what to do; one that only the
    mesh wants waits."""
    world = World()
    world.bring_up("a")
    world.pin("a")
    for token in (world.load("b"), world.acquire("b")):
        answer = refused(world.reply(token))
        assert answer.code == "all_pinned"
        assert "a is pinned" in answer.detail
        assert "meshctl unpin" in answer.detail
        assert world.state("b") == "unloaded"
    assert running(world) == {"a"}
    world.advance(61)
    world.assign(("c", "allocation"))
    assert world.state("c") == "queued"
    assert "a is pinned" in world.slot("c").reason
    world.advance(3600)
    world.pin("a", False)
    world.stopped("a")
    world.ready("c")


def test_idle_models_go_if_that_is_wanted() -> None:
    """23. A model that was not used for `idle_unload_minutes` is unloaded; 0, the default, is never."""
    world = World()
    world.bring_up("a")
    world.advance(30 * 24 * 3600)
    assert running(world) == {"a"}
    world.reconfigure(config(idle_minutes=10))
    world.advance(1)
    assert set(world.stopping.values()) == {"a"}


# -- restarts of launcherd ---------------------------------------------------------------------------------------


def test_nothing_is_unloaded_before_the_holders_have_spoken() -> None:
    """24. Engines outlive launcherd: a new one takes over those that are healthy, and unloads nothing before every
    holder of a lease has spoken, or 10 s."""
    before = World()
    slot_id = before.bring_up("a")
    assert before.granted(before.acquire("a"))
    memory: Memory = before.memory
    after = World(memory=memory, prefix="t")
    after.running[slot_id] = "a"
    known = model("a")
    after.do(EngineAdopted(slot_id=slot_id, model=known, memory=memory.slots[slot_id], endpoint=after.endpoint()))
    assert after.state("a") == "ready"
    after.load("b")
    after.advance(9.9)
    assert not after.stopping
    after.advance(0.2)
    assert set(after.stopping.values()) == {"a"}


# -- what has only begun to go -----------------------------------------------------------------------------------


def test_what_has_only_begun_to_go_is_kept() -> None:
    """25. A model that has only begun to go, for another one or because it was unused, and is wanted again when that
    load's turn comes, is kept as it is; so is one whose place is not needed any more, and one that is pinned
    meanwhile."""
    world = World(config(idle_minutes=10))
    slot_id = world.bring_up("a")
    assert world.granted(world.acquire("a"))
    gone = world.acquire("b")
    assert world.state("a") == "draining"
    world.gone(gone)  # Its place is not needed any more.
    assert world.state("a") == "ready"
    world.load("b")
    world.pin("a")
    assert world.state("a") == "ready"
    world.pin("a", False)
    world.report(a=(2, 0, 1))
    world.advance(4)  # The holder keeps its credit, so that the model, unused, can only begin to go.
    world.live_for(0.5)
    world.reconfigure(config(idle_minutes=0.0001))
    world.report(a=(2, 0, 1))
    world.advance(0.1)
    assert world.state("a") == "draining"
    wanted = world.acquire("a", "another")
    world.give_back(slot_id)
    assert world.granted(wanted)
    assert not world.loading
    assert world.slots[slot_id].state == "ready"
