"""Steps of the shared state that no rule of the table names."""

from __future__ import annotations

from collections.abc import Sized

import pytest

from services.launcherd.leases import RETURN_MEMORY
from services.launcherd.slot import COUNTER_SECONDS
from services.launcherd.slot_book import HISTORY_LIMIT
from services.launcherd.slot_events import DeviceMeasured, Remember
from shared.ids import ModelName
from shared.io.drive import Tick
from shared.messages.models import DeviceChanged, InventoryChanged
from tests.launcherd.table import GIB, World, config


def test_memory_for_llms_is_what_other_types_leave() -> None:
    """`vram_bytes` = min(max_vram, device total − reserve) − need of loaded models of other types."""
    world = World(capacity_bytes=10 * GIB)
    device = [item for item in world.published if isinstance(item, DeviceChanged)]
    assert device[-1].vram_bytes == 10 * GIB
    world.bring_up("a")
    world.bring_up("emb")
    device = [item for item in world.published if isinstance(item, DeviceChanged)]
    assert device[-1].vram_bytes == 10 * GIB - world.slot("emb").need_bytes


def test_the_inventory_is_published_once() -> None:
    world = World()
    world.bring_up("a")
    world.report("h1")
    assert sum(isinstance(item, InventoryChanged) for item in world.published) == 1


def test_the_memory_is_written_only_when_it_changed() -> None:
    world = World(config(parallel=4))
    world.bring_up("a")
    world.acquire("a")
    mark = len(world.effects)
    for started in range(50):
        world.report(a=(4, 1, started))
        world.advance(0.1)
    assert not [effect for effect in world.effects[mark:] if isinstance(effect, Remember)]


@pytest.mark.parametrize("published_at", [1023.93, 1000.0, 1e6 + 0.1])
def test_the_timer_moves_on_after_it_fired_whatever_the_clock_rounds(published_at: float) -> None:
    """1023.93 + 0.25 - 1023.93 is less than 0.25: the deadline is compared as it was told, not as a difference."""
    world = World()
    world.now = published_at
    world.bring_up("a")
    world.acquire("a")
    deadline = world.table.next_deadline()
    assert deadline == published_at + COUNTER_SECONDS
    world.now = deadline
    world.do(Tick())
    later = world.table.next_deadline()
    assert later is not None
    assert later > deadline


def test_loads_wait_until_the_device_is_known() -> None:
    world = World()
    world.table.book.device = None
    world.load("a")
    assert not world.loading
    assert world.table.book.of(ModelName("a"))[0].reason == "waits until this node's device is known"
    world.do(DeviceMeasured(device="cpu", total_bytes=9 * GIB, reserve_bytes=0, engine="embedded"))
    assert world.loading


def test_a_suspected_victim_still_serves_what_came_before_it() -> None:
    """Its requests wait for the probe, and are not left behind."""
    world = World()
    a = world.bring_up("a")
    world.suspect("a")
    waiting = world.acquire("a")
    world.load("b")
    assert not world.stopping
    world.healthy("a")
    assert world.granted(waiting)
    world.suspect("a")
    assert world.slot("a").reason == "makes room for b", "still said while it is asked whether it lives"
    world.give_back(a)
    assert world.stopping


def test_thousands_of_loads_leave_nothing_behind() -> None:
    """Every collection is bounded, whatever comes and goes."""
    world = World(config(parallel=1))
    book = world.table.book
    for number in range(3000):
        name, other = ("a", "b") if number % 2 else ("b", "a")
        token = world.acquire(name, f"holder-{number}")
        late = world.acquire(other, f"holder-{number}")
        while world.stopping:
            world.stopped()
        match number % 5:
            case 0:
                world.fail("engine_exited")
                world.fail("engine_exited")
            case 1:
                world.ready(name)
                world.crash(name)
            case 2:
                world.unload(name)
            case 3:
                world.hang(name) if world.ready(name) else None
            case _:
                slot_id = world.ready(name)
                world.give_back(slot_id, f"holder-{number}")
        world.gone(token)
        world.gone(late)
        world.unload(None)
        world.advance(400)
        while world.loading or world.stopping:
            world.stopped() if world.stopping else world.ready()
            world.unload(None)
            world.advance(400)
        world.running.clear()
        world.published.clear()
        world.effects.clear()
        world.replies.clear()
        world.slots.clear()
        world.credits.clear()
    limits = {"history": HISTORY_LIMIT, "_returned": RETURN_MEMORY}
    for part in (book, book.leases, book.placement, world.table.queue):
        for name, value in vars(part).items():
            if isinstance(value, Sized) and not isinstance(value, str):
                assert len(value) <= limits.get(name, 10), (name, len(value))
