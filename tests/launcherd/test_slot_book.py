"""Steps of the shared state that no rule of the table names."""

from __future__ import annotations

from services.launcherd.slot_events import DeviceMeasured, Remember
from shared.ids import ModelName
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
    world.give_back(a)
    assert world.stopping
