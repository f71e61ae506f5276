"""Failed loads, crashes, hangs: one test per rule, the rule in its docstring."""

from __future__ import annotations

import pytest

from services.launcherd.slot_events import DeviceMeasured, InventoryScanned
from services.launcherd.slot_words import code_of
from services.launcherd.slots import BLAMELESS_CODES
from shared.errors import LoadFailed, MeshError
from shared.messages.daemon import Done, Refused
from shared.messages.models import ModelLoaded, SlotChanged
from tests.launcherd.table import DEFAULT_MODELS, GIB, World, config


def refused(reply: object) -> Refused:
    assert isinstance(reply, Refused), reply
    return reply


@pytest.mark.parametrize("code", ["engine_exited", "load_timed_out", "engine_port_taken", "load_failed", "new_kind"])
def test_a_failed_load_evicts_everything_and_tries_once_more(code: str) -> None:
    """A load that fails, except for a missing file, evicts every model of every type and is tried once more."""
    world = World(config((2,)))
    for name in ("a", "emb", "guide"):
        world.bring_up(name)
    token = world.load("b")
    world.fail(code)
    assert sorted(world.stopping.values()) == ["a", "emb", "guide"]
    for _ in range(3):
        assert not world.loading
        world.stopped()
    assert world.slot("b").reason == "second try, with nothing else loaded"
    world.ready("b")
    assert isinstance(world.reply(token), ModelLoaded)


def test_evict_all_waits_for_leases() -> None:
    """Evicts every model of every type (pinned too, after their leases)."""
    world = World(config((2,)))
    emb = world.bring_up("emb")
    world.acquire("emb")
    world.load("b")
    world.fail()
    world.live_for(300)
    assert not world.stopping
    assert not world.loading
    world.give_back(emb)
    world.stopped("emb")
    world.ready("b")


def test_a_second_failure_is_final_and_refuses_who_waits() -> None:
    """It is tried once more, not for ever; the reason says why."""
    world = World()
    load, lease = world.load("a"), world.acquire("a")
    world.fail(detail="the engine ended with exit status 3; its last words: no memory")
    world.fail(detail="the engine ended with exit status 3; its last words: no memory")
    for token in (load, lease):
        reply = refused(world.reply(token))
        assert reply.code == "load_failed"
        assert "no memory" in reply.detail
        assert reply.retry_after_seconds == 5.0
    assert world.state("a") == "failed"
    assert "no memory" in world.slot("a").reason


@pytest.mark.parametrize("code", sorted(BLAMELESS_CODES))
def test_what_no_eviction_can_help_evicts_nothing(code: str) -> None:
    """TRAPS 23: missing file: nothing evicted, clear error; decided by type, not by words in a message."""
    world = World(config((2,)))
    world.bring_up("a")
    token = world.load("b")
    world.fail(code, "out of memory, it says, but the code decides")
    assert refused(world.reply(token)).code == code_of(code)
    assert world.state("a") == "ready"
    assert world.state("b") == "failed"


def codes(kind: type[MeshError] = LoadFailed) -> set[str]:
    return {kind.code}.union(*(codes(sub) for sub in kind.__subclasses__()))


@pytest.mark.parametrize("first", sorted(codes() - BLAMELESS_CODES))
@pytest.mark.parametrize("second", [*sorted(codes()), "unloaded", "gone", "file gone"])
@pytest.mark.parametrize("victim", ["stops", "crashes", "hangs", "is unloaded"])
def test_evict_all_and_retry_with_every_failure_kind(first: str, second: str, victim: str) -> None:
    """TRAPS 22: drive evict-all-and-retry with every failure kind, of the load and of what has to go for it."""
    world = World(config((2,)))
    victim_id = world.bring_up("a")
    world.acquire("a")
    load, lease = world.load("b"), world.acquire("b", "other")
    world.fail(first, "the first failure")
    if victim == "crashes":
        world.crash("a")
    elif victim == "hangs":
        world.hang("a")
        world.running.pop(victim_id, None)
    elif victim == "is unloaded":
        world.unload("a")
    if victim in ("stops", "is unloaded"):
        assert "1 request" in world.slot("b").reason or "last requests of a" in world.slot("b").reason
        world.give_back(victim_id)
    while world.stopping:
        world.stopped()
    world.advance(0.1)
    assert list(world.loading) == [world.slot("b").slot_id]
    assert not world.running
    if second == "unloaded":
        world.unload("b")
        world.stopped("b")
    elif second == "gone":
        world.gone(load)
        world.gone(lease)
        world.ready("b")
    else:
        if second == "file gone":
            world.do(InventoryScanned(models=tuple(model for model in DEFAULT_MODELS if model.name != "b")))
        world.fail("model_file_missing" if second == "file gone" else second, "the second failure")
        assert refused(world.reply(load)).code == refused(world.reply(lease)).code
        assert "the second failure" in world.slot("b").reason
    assert not world.table.book.loading
    assert not world.table.book.queue
    token = world.load("c")
    while world.stopping:
        world.stopped()
    world.ready("c")
    assert isinstance(world.reply(token), ModelLoaded)


def test_a_failed_model_whose_file_is_gone_is_forgotten() -> None:
    """What was learned about a file says nothing about the next one of that name."""
    world = World()
    world.load("b")
    world.fail()
    world.fail()
    assert world.state("b") == "failed"
    world.do(InventoryScanned(models=tuple(model for model in DEFAULT_MODELS if model.name != "b")))
    assert (world.state("b"), world.slot("b").ended_by) == ("unloaded", "dropped")
    world.do(InventoryScanned(models=DEFAULT_MODELS))
    world.load("b")
    world.ready("b")


def test_a_missing_file_may_be_asked_for_again_at_once() -> None:
    """There is nothing to cool down: the file is there again or it is not."""
    world = World()
    world.load("a")
    world.fail("model_file_missing")
    world.acquire("a")
    world.ready("a")


def test_a_failed_model_cools_down_and_the_cool_down_doubles() -> None:
    """Failed until a new request or load asks again after the cool-down (doubling)."""
    world = World()
    waits = []
    for _ in range(4):
        world.load("a")
        world.fail()
        world.fail()
        reply = refused(world.reply(world.acquire("a")))
        assert reply.retry_after_seconds is not None
        waits.append(reply.retry_after_seconds)
        assert refused(world.reply(world.load("a"))).code == "load_failed"
        world.advance(reply.retry_after_seconds)
    assert waits == [5.0, 10.0, 20.0, 40.0]
    assert isinstance(world.reply(world.load("a")), type(None))
    world.ready("a")


def test_other_options_may_be_tried_at_once() -> None:
    """The cool-down is for what failed, not for a smaller context."""
    world = World()
    world.load("a")
    world.fail()
    world.fail()
    token = world.load("a", context_tokens=256)
    world.ready("a")
    assert isinstance(world.reply(token), ModelLoaded)


def test_a_crash_is_published_at_once_and_the_engine_is_started_again() -> None:
    """An engine that exits is withdrawn at once and restarted with back-off."""
    world = World()
    old = world.bring_up("a")
    world.acquire("a")
    world.crash("a")
    assert world.slots[old].state == "unloaded"
    assert "was ended by SIGKILL" in world.slots[old].reason
    heir = world.slot("a")
    assert heir.state == "restarting"
    assert heir.restarts == 1
    assert "out of luck" in heir.reason
    waiting = world.acquire("a")
    world.advance(0.99)
    assert not world.loading
    world.advance(0.02)
    assert world.state("a") == "loading"
    world.ready("a")
    assert world.granted(waiting)


def test_the_heir_is_published_before_the_slot_it_replaces_is_gone() -> None:
    """The model never seems abandoned in between."""
    world = World()
    old = world.bring_up("a")
    mark = len(world.published)
    world.crash("a")
    news = [item for item in world.published[mark:] if isinstance(item, SlotChanged)]
    assert [(item.slot_id == old, item.state) for item in news] == [(False, "restarting"), (True, "unloaded")]


def test_the_restarted_engine_counts_its_requests_from_zero() -> None:
    """Demand is counted per slot id from 0: what the old slot counted is not counted again."""
    world = World()
    old = world.bring_up("a")
    world.acquire("a")
    world.report(a=(2, 1, 5))
    world.advance(1)
    world.crash("a")
    assert world.slots[old].requests_total == 5
    assert world.slot("a").requests_total == 0
    world.advance(1.01)
    world.ready("a")
    world.acquire("a")
    world.report(a=(2, 1, 3))
    world.advance(1)
    assert world.slot("a").requests_total == 3


def test_a_crash_loop_ends_as_failed_with_the_last_words() -> None:
    """Restart after 1 and 2 s; the third crash in 60 s makes it failed, with the engine's last words as the reason."""
    world = World()
    world.bring_up("a")
    for delay in (1.0, 2.0):
        world.crash("a")
        world.advance(delay - 0.01)
        assert not world.loading
        world.advance(0.02)
        world.ready("a")
    world.crash("a")
    assert world.state("a") == "failed"
    assert "crashed 3 times within 60 s" in world.slot("a").reason
    assert "out of luck" in world.slot("a").reason
    assert refused(world.reply(world.acquire("a"))).code == "load_failed"
    world.advance(5.0)
    token = world.acquire("a")
    world.ready("a")
    assert world.granted(token)


def test_rare_crashes_are_restarted_for_ever() -> None:
    """Only crashes within 60 s of each other make a loop."""
    world = World()
    world.bring_up("a")
    for _ in range(10):
        world.advance(61)
        world.crash("a")
        world.advance(1.01)
        world.ready("a")


def test_a_restart_that_fails_counts_as_a_crash_and_evicts_nothing() -> None:
    """Later crashes are not load failures."""
    world = World(config((2,)))
    world.bring_up("b")
    world.bring_up("a")
    world.crash("a")
    world.advance(1.01)
    world.fail()
    assert world.state("b") == "ready"
    assert world.state("a") == "restarting"
    world.advance(2.01)
    world.fail()
    assert world.state("a") == "failed"


def test_a_crashed_engine_keeps_its_place_unless_another_model_needs_it() -> None:
    """A restart evicts nobody; a load that needs the place may take it."""
    world = World()
    world.bring_up("a")
    world.crash("a")
    world.load("b")
    assert world.state("b") == "loading"
    assert world.state("a") == "unloaded"
    world.ready("b")
    world.advance(10)
    assert world.state("b") == "ready"


def test_a_crashed_engine_comes_back_for_those_who_asked_before() -> None:
    """Requests that came before the load which displaces the model are served by it."""
    world = World(config(parallel=1))
    world.bring_up("a")
    world.crash("a")
    before, other, after = world.acquire("a"), world.acquire("b"), world.acquire("a")
    world.advance(0.3)
    assert world.slot("b").reason == "waits for a to come back and serve the requests that came before"
    world.advance(1)
    world.ready("a")
    assert world.granted(before)
    world.give_back(world.running_id("a"))
    world.stopped("a")
    world.ready("b")
    assert world.granted(other)
    world.give_back(world.running_id("b"))
    world.stopped("b")
    world.ready("a")
    assert world.granted(after)


def test_a_displaced_restart_is_queued_again_for_those_who_ask_later() -> None:
    """Nobody who waits is left without a load."""
    world = World()
    world.bring_up("a")
    world.crash("a")
    other = world.load("b", wait=False)
    after = world.acquire("a")
    assert world.state("b") == "loading"
    assert isinstance(world.reply(other), Done)
    world.ready("b")
    world.stopped("b")
    world.ready("a")
    assert world.granted(after)


def test_a_crash_while_draining_counts_as_the_eviction_it_was() -> None:
    """An evicted model is declined, also if its engine ended before it was stopped."""
    world = World()
    world.assign(("a", "flag"))
    world.ready("a")
    world.acquire("a")
    world.load("b")
    world.crash("a")
    world.ready("b")
    world.advance(100)
    assert world.state("a") == "unloaded"
    assert world.memory.declined == {"a": "makes room for b"}


def test_a_hung_engine_is_killed_and_restarted() -> None:
    """Hung engines: killed and restarted."""
    world = World()
    old = world.bring_up("a")
    world.acquire("a")
    world.hang("a")
    assert world.slots[old].state == "stopping"
    assert old in world.stopping
    world.stopped("a")
    assert world.state("a") == "restarting"
    assert "no answer for 15 s" in world.slot("a").reason


def test_a_hung_engine_that_is_unloaded_meanwhile_stays_away() -> None:
    """An unload is not undone by a restart."""
    world = World()
    world.bring_up("a")
    world.hang("a")
    world.unload("a")
    world.stopped("a")
    world.advance(10)
    assert world.state("a") == "unloaded"
    assert not world.loading


def test_a_suspected_engine_is_probed_and_gets_no_new_requests_meanwhile() -> None:
    """TRAPS 21: liveness before serving. After silence it is probed and new requests go elsewhere."""
    world = World()
    slot_id = world.bring_up("a")
    world.suspect("a")
    assert world.probes == [slot_id]
    waiting = world.acquire("a")
    assert not world.granted(waiting)
    world.healthy("a")
    assert world.granted(waiting)


def test_ready_engines_are_asked_regularly_whether_they_live() -> None:
    """TRAPS 21: liveness before reporting."""
    world = World()
    slot_id = world.bring_up("a")
    world.advance(9)
    assert not world.probes
    world.advance(2)
    assert world.probes == [slot_id]
    world.healthy("a")
    world.advance(10.1)
    assert world.probes == [slot_id] * 2


def test_a_crash_while_draining_lets_the_next_model_in() -> None:
    """TRAPS 22: the paths that combine failures are driven, too."""
    world = World()
    world.bring_up("a")
    world.acquire("a")
    world.load("b")
    world.crash("a")
    world.ready("b")
    world.advance(10)
    assert world.state("a") == "unloaded"


def test_victims_that_crash_during_evict_all() -> None:
    """TRAPS 22: drive evict-all-and-retry with every failure kind."""
    world = World(config((2,)))
    world.bring_up("a")
    world.acquire("a")
    world.bring_up("emb")
    token = world.load("b")
    world.fail("load_timed_out")
    world.crash("a")
    world.stopped("emb")
    world.ready("b")
    assert isinstance(world.reply(token), ModelLoaded)


def test_a_retry_that_is_unloaded_keeps_the_others() -> None:
    """Victims that turn out not to be needed are kept."""
    world = World(config((2,)))
    world.bring_up("a")
    world.acquire("a")
    world.load("b")
    world.fail()
    assert world.state("a") == "draining"
    world.unload("b")
    assert world.state("a") == "ready"


def test_without_an_engine_every_load_says_how_to_get_one() -> None:
    """No engine: a clear message; and it works as soon as one is installed."""
    world = World()
    world.bring_up("a")
    words = "no inference engine is installed: install one"
    world.do(DeviceMeasured(device="cpu", total_bytes=9 * GIB, reserve_bytes=0, engine="", engine_reason=words))
    reply = refused(world.reply(world.load("b")))
    assert (reply.code, reply.detail) == ("engine_missing", words)
    assert world.state("a") == "ready"
    world.do(DeviceMeasured(device="cpu", total_bytes=9 * GIB, reserve_bytes=0, engine="embedded"))
    world.load("b")
    world.stopped("a")
    world.ready("b")


def test_memory_that_a_gpu_frees_late_is_waited_for() -> None:
    """TRAPS 28: GPU memory freed late: retry, not a fixed sleep; nothing else is evicted for it."""
    world = World(config((1, 1)))
    world.do(DeviceMeasured(device="RTX", total_bytes=9 * GIB, reserve_bytes=0, engine="cuda build"))
    world.bring_up("emb")
    world.bring_up("a")
    token = world.load("b")
    world.stopped("a")
    for delay in (1.0, 2.0):
        world.fail(detail="out of memory")
        assert not world.loading
        assert "may not have freed all memory" in world.slot("b").reason
        world.advance(delay - 0.01)
        assert not world.loading
        world.advance(0.02)
    assert world.state("emb") == "ready"
    world.ready("b")
    assert isinstance(world.reply(token), ModelLoaded)


def test_a_gpu_load_that_keeps_failing_evicts_everything_in_the_end() -> None:
    """Then the usual rule: evict all, once more."""
    world = World(config((1, 1)))
    world.do(DeviceMeasured(device="RTX", total_bytes=9 * GIB, reserve_bytes=0, engine="cuda build"))
    world.bring_up("emb")
    world.bring_up("a")
    token = world.load("b")
    world.stopped("a")
    for _ in range(2):
        world.fail()
        world.advance(3)
    world.fail()
    world.stopped("emb")
    world.fail()
    assert refused(world.reply(token)).code == "load_failed"
