"""Leases and credits through the slot table: one test per rule of shared/messages/leases.py and DESIGN §7."""

from __future__ import annotations

from services.launcherd.slot_events import CreditsReturned, EngineAdopted, Memory, SlotMemory
from services.launcherd.slots import SlotTable
from shared.config import NodeConfig
from shared.ids import HolderId, ModelName, RequestId
from shared.messages.daemon import Refused
from shared.messages.leases import CreditsConfirmed, LeaseGranted, ReturnCredits
from tests.launcherd.table import World, config


def refused(reply: object) -> Refused:
    assert isinstance(reply, Refused), reply
    return reply


def lease(reply: object) -> LeaseGranted:
    assert isinstance(reply, LeaseGranted), reply
    return reply


def test_a_lease_says_where_the_engine_is() -> None:
    """`LeaseGranted`: credits (at least one, for the request that asked) on slot_id, usable at base_url."""
    world = World()
    slot_id = world.bring_up("a")
    granted = lease(world.reply(world.acquire("a")))
    assert granted.slot_id == slot_id
    assert granted.base_url == f"http://127.0.0.1:{world.slot('a').port}"
    assert granted.api_key == "key"


def test_a_model_loaded_for_a_request_is_not_evicted_before_the_request_runs() -> None:
    """TRAPS 18: a model loaded for a request is evicted before the request runs. Never: the load returns a lease."""
    world = World()
    first = world.acquire("a")
    second = world.load("b")
    slot_id = world.ready("a")
    assert lease(world.reply(first)).slot_id == slot_id
    world.live_for(60)
    assert not world.stopping
    world.give_back(slot_id)
    assert slot_id in world.stopping
    world.stopped("a")
    world.ready("b")
    assert second in world.replies


def test_a_sole_holder_gets_all_credits() -> None:
    """A holder gets a renewable credit of parallel requests per engine: all free ones if nobody else has any."""
    world = World(config(parallel=4))
    world.bring_up("a")
    granted = lease(world.reply(world.acquire("a")))
    assert (granted.credits, granted.parallel) == (4, 4)


def test_credits_are_shared_when_several_hold() -> None:
    """Credits sum to at most `parallel`; with two holders a spare one is shared."""
    world = World(config(parallel=8))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    world.give_back(a, "h1", 6)
    assert lease(world.reply(world.acquire("a", "h2"))).credits == 4  # One, and half of the five that are left.


def test_another_holder_that_waits_gets_a_credit_back_from_the_first() -> None:
    """Unused credits are recalled when another holder waits."""
    world = World(config(parallel=2))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    waiting = world.acquire("a", "h2")
    assert world.recalls() == [("h1", "waiting", True)]
    world.give_back(a, "h1", 1)
    assert world.granted(waiting)
    assert world.recalls()[-1] == ("h1", "waiting", False)


def test_a_holder_that_waits_for_itself_is_not_recalled() -> None:
    """A free-running holder keeps its credits and serves its own requests with them."""
    world = World(config(parallel=2))
    world.bring_up("a")
    world.acquire("a", "h1")
    world.acquire("a", "h1")
    assert world.recalls() == []


def test_requests_of_all_holders_are_served_in_the_order_of_arrival() -> None:
    """launcherd alone orders the queue."""
    world = World(config(parallel=1))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    tokens = [(world.acquire("a", holder), holder) for holder in ("h2", "h1", "h2", "h1")]
    holder = "h1"
    for token, next_holder in tokens:
        assert not world.granted(token)
        world.give_back(a, holder)
        assert world.granted(token)
        holder = next_holder


def test_requests_beyond_the_bound_are_refused_with_retry_after() -> None:
    """TRAPS 35: requests beyond `parallel` queue in order, bounded, then 429 with Retry-After."""
    world = World(config(parallel=2, queue_limit=3))
    world.bring_up("a")
    world.acquire("a")
    waiting = [world.acquire("a") for _ in range(3)]
    reply = refused(world.reply(world.acquire("a")))
    assert reply.code == "overloaded"
    assert reply.retry_after_seconds is not None
    assert reply.retry_after_seconds >= 1
    world.withdraw(waiting[0])
    assert world.reply(world.acquire("a")) is None


def test_not_loaded_is_refused_when_the_holder_wants_no_load() -> None:
    """`load`: load the model if it is not; otherwise refuse with `not_loaded`."""
    world = World()
    assert refused(world.reply(world.acquire("a", load=False))).code == "not_loaded"
    world.bring_up("a")
    assert world.granted(world.acquire("a", load=False))


def test_an_idle_node_refuses_requests_but_loads_by_hand() -> None:
    """No mesh.toml: AcquireLease is refused with code `idle`, LoadModel works."""
    world = World(NodeConfig())
    assert refused(world.reply(world.acquire("a"))).code == "idle"
    world.bring_up("a")
    assert world.state("a") == "ready"


def test_a_dead_holder_lapses_after_five_seconds() -> None:
    """A holder that has not reported for 5 s is dead and its credits lapse."""
    world = World(config(parallel=2))
    world.bring_up("a")
    world.acquire("a", "h1")
    waiting = world.acquire("a", "h2")
    for _ in range(4):
        world.live_for(1.2, "h2")
        assert not world.granted(waiting)
    world.credits[world.running_id("a")].pop("h1")
    world.live_for(1.2, "h2")
    assert world.granted(waiting)


def test_reporting_keeps_credits() -> None:
    """ReportCredits once a second."""
    world = World(config(parallel=2))
    world.bring_up("a")
    world.acquire("a", "h1")
    waiting = world.acquire("a", "h2")
    world.live_for(60, "h1", "h2")
    assert not world.granted(waiting)


def test_a_repeated_return_counts_once() -> None:
    """Repeating `request_id` is harmless."""
    world = World(config(parallel=2))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    waiting = [world.acquire("a", "h2") for _ in range(2)]
    world.credits[a]["h1"] -= 1
    request = ReturnCredits(holder=HolderId("h1"), request_id=RequestId("same"), slot_id=a, count=1)
    for _ in range(2):
        world.do(CreditsReturned(token=world._token(), request=request))
    assert [world.granted(token) for token in waiting] == [True, False]


def test_a_repeated_request_keeps_its_place() -> None:
    """Requests carry an id, repeating one is harmless: the later reply channel takes the earlier one's place."""
    world = World(config(parallel=1))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    first = world.acquire("a", "h1")
    second = world.acquire("a", "h1")
    holder, request_id, _ = world.acquired[first]
    world._requests -= 2
    again = world.acquire("a", "h1")
    assert world.acquired[again] == (holder, request_id, "a")
    assert refused(world.reply(first)).code == "repeated"
    world.give_back(a, "h1")
    assert world.granted(again)
    assert not world.granted(second)


def test_a_report_counts_requests_and_use() -> None:
    """Each use is reported: it counts requests and marks the model busy."""
    world = World(config(parallel=4))
    world.bring_up("a")
    world.acquire("a")
    assert world.report(a=(4, 3, 7)) == CreditsConfirmed()
    world.advance(0.3)
    assert (world.slot("a").in_use, world.slot("a").requests_total) == (3, 7)
    world.report(a=(4, 1, 9))
    world.advance(0.3)
    assert (world.slot("a").in_use, world.slot("a").requests_total) == (1, 9)


def test_counters_are_published_at_most_four_times_a_second() -> None:
    """SlotChanged for counters at most every 0.25 s per slot, state changes at once."""
    world = World(config(parallel=4))
    world.bring_up("a")
    world.acquire("a")
    mark = len(world.published)
    for started in range(1, 101):
        world.report(a=(4, started % 3, started))
        world.advance(0.01)
    assert len(world.published) - mark <= 5
    world.advance(0.3)
    assert world.slot("a").requests_total == 100


def test_slots_that_are_gone_are_revoked() -> None:
    """`revoked`: slots that are gone; the holder forgets its credits there."""
    world = World(config(parallel=2))
    world.bring_up("a")
    world.acquire("a")
    old = world.slot("a")
    world.crash("a")
    world.slots = {old.slot_id: old}
    assert world.report(a=(2, 1, 1)) == CreditsConfirmed(revoked=(old.slot_id,))


def test_a_report_repeats_recalls_that_may_have_been_lost() -> None:
    """PUB/SUB loses messages: the confirmation names what is recalled."""
    world = World(config(parallel=2))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    world.acquire("a", "h2")
    assert world.report("h1", a=(2, 2, 2)) == CreditsConfirmed(recalled=(a,))


def test_a_lost_grant_comes_back() -> None:
    """A grant that its holder never learned of is reconciled by its reports."""
    world = World(config(parallel=2))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    for _ in range(4):
        world.report("h1")
        world.advance(1)
    world.credits[a].clear()
    assert lease(world.reply(world.acquire("a", "h2"))).credits == 2


def test_a_holder_back_from_the_dead_is_adopted_or_revoked() -> None:
    """Credits never exceed `parallel`, even if a holder that lapsed announces its own again."""
    world = World(config(parallel=2))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    world.advance(6)
    world.credits[a].clear()
    assert world.report("h1", a=(2, 2, 2)) == CreditsConfirmed()
    world.advance(6)
    world.acquire("a", "h2")
    assert world.report("h1", a=(2, 2, 2)) == CreditsConfirmed(revoked=(a,))


# -- across a restart of launcherd ---------------------------------------------------------------------------


def restarted(world: World, memory: Memory | None = None) -> World:
    """A new launcherd that finds the engines of the old one still running."""
    memory = memory or world.memory
    again = World(world.config, memory=memory, prefix="t")
    again.now = world.now
    for slot_id, name in world.running.items():
        again.running[slot_id] = name
        for holder, credits in world.credits[slot_id].items():
            again.credits[slot_id][holder] = credits
        kept = world.memory.slots[slot_id]
        again.do(
            EngineAdopted(
                slot_id=slot_id,
                model=again.table.book.models[kept.model],
                memory=SlotMemory(model=kept.model, options=kept.options, origin=kept.origin),
                endpoint=again.endpoint(),
            )
        )
    return again


def test_adopted_engines_are_ready_at_once_and_new_holders_get_what_is_free() -> None:
    """TRAPS 32: restart converges: no double load."""
    world = World()
    slot_id = world.bring_up("a")
    again = restarted(world)
    assert again.slot("a").slot_id == slot_id
    assert again.state("a") == "ready"
    assert again.granted(again.acquire("a", "h2"))
    assert not again.loading


def test_credits_from_before_count_until_they_are_announced_again() -> None:
    """While launcherd restarts, granted credits stay good for 10 s."""
    world = World(config(parallel=2))
    a = world.bring_up("a")
    world.acquire("a", "h1")
    again = restarted(world)
    waiting = again.acquire("a", "h2")
    assert not again.granted(waiting)
    again.credits[a]["h1"] = 1
    again.report("h1", a=(1, 1, 5))
    again.live_for(1, "h2", "h1")
    assert again.granted(waiting)


def test_nothing_is_evicted_before_holders_could_announce() -> None:
    """A new launcherd evicts nothing until that time has passed, or until the holders are known."""
    world = World()
    world.bring_up("a")
    world.acquire("a", "h1")
    again = restarted(world)
    again.load("b")
    assert again.state("a") == "ready"
    assert "announced again" in again.slot("b").reason
    again.advance(9.9)
    assert again.state("a") == "ready"
    again.credits.clear()
    again.advance(0.2)
    assert again.state("a") == "stopping"


def test_announced_holders_end_the_grace_early() -> None:
    """…or until the re-announced holders are known; then the usual rules hold."""
    world = World()
    a = world.bring_up("a")
    world.acquire("a", "h1")
    again = restarted(world)
    again.load("b")
    again.report("h1", a=(2, 1, 3))
    assert again.state("a") == "draining"
    again.give_back(a, "h1")
    assert again.state("a") == "stopping"


def test_without_a_readable_memory_nothing_is_stopped_for_ten_seconds() -> None:
    """Nothing is evicted until holders could have announced theirs."""
    world = World()
    a = world.bring_up("a")
    world.acquire("a", "h1")
    again = restarted(world, Memory(complete=False))
    again.unload("a")
    again.advance(5)
    assert not again.stopping
    again.report("h1", a=(2, 2, 2))
    again.live_for(60, "h1")
    assert not again.stopping
    again.give_back(a, "h1")
    assert again.stopping


def test_the_memory_is_written_before_the_lease_is_granted() -> None:
    """A reply that grants a credit must not outrun its record."""
    world = World()
    world.bring_up("a")
    mark = len(world.effects)
    world.acquire("a", "h1")
    kinds = [type(effect).__name__ for effect in world.effects[mark:]]
    assert kinds.index("Remember") < kinds.index("Reply")
    assert world.memory.credits[world.running_id("a")] == {HolderId("h1"): 2}


def test_request_totals_survive_without_counting_twice() -> None:
    """Holders report the totals that the earlier launcherd counted once more."""
    world = World(config(parallel=4))
    slot_id = world.bring_up("a")
    world.acquire("a", "h1")
    world.report("h1", a=(4, 1, 100))
    again = World(world.config, memory=world.memory, prefix="t")
    again.running[slot_id] = "a"
    kept = SlotMemory(
        model=again.table.book.models[ModelName("a")].name,
        options=world.memory.slots[slot_id].options,
        origin="request",
        requests_total=90,
    )
    again.do(
        EngineAdopted(
            slot_id=slot_id, model=again.table.book.models[ModelName("a")], memory=kept, endpoint=again.endpoint()
        )
    )
    again.report("h1", a=(4, 1, 104))
    again.advance(0.3)
    assert again.slot("a").requests_total == 104


def test_slot_ids_of_two_boots_never_collide() -> None:
    """One loading of one model; a reload gets a new slot id."""
    ids = {World(prefix=prefix).bring_up("a") for prefix in ("s", "t")}
    assert len(ids) == 2
    assert isinstance(World().table, SlotTable)
