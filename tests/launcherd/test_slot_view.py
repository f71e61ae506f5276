"""`why MODEL` answers in words: why it waits, why it is here, why it was evicted, why it failed."""

from __future__ import annotations

from services.launcherd.slot_events import DeviceMeasured, InventoryScanned
from services.launcherd.slot_view import explain, snapshot, state_line
from shared.messages.leases import CreditsRecalled
from shared.messages.models import DeviceChanged, InventoryChanged, LimitsChanged, SkippedFile, SlotChanged
from tests.launcherd.table import World, config, model


def why(world: World, subject: str) -> str:
    return "\n".join(explain(world.table.book, subject, world.now))


def test_why_it_waits() -> None:
    world = World()
    world.bring_up("a")
    world.acquire("a")
    world.acquire("b")
    assert "It is queued" in why(world, "b")
    assert "waits for a to finish 1 request" in why(world, "b")
    assert "1 request waits for it." in why(world, "b")
    assert "makes room for b" in why(world, "a")


def test_why_it_was_evicted() -> None:
    world = World()
    world.bring_up("a")
    world.advance(30)
    world.bring_up("b")
    assert "It is not loaded." in why(world, "a")
    assert "makes room for b; last used 30 s ago" in why(world, "a")


def test_why_it_failed_and_when_it_is_tried_again() -> None:
    world = World()
    world.load("a")
    world.fail(detail="no memory")
    world.fail(detail="no memory")
    assert "no memory" in why(world, "a")
    assert "may be tried again in 5 s" in why(world, "a")


def test_why_an_assigned_model_is_not_loaded() -> None:
    world = World()
    world.assign(("a", "flag"))
    world.ready("a")
    world.unload("a")
    world.stopped("a")
    assert "It belongs on this node" in why(world, "a")
    assert "not loaded again until it is asked for: unloaded by request" in why(world, "a")


def test_why_a_file_is_no_model() -> None:
    world = World()
    skipped = SkippedFile(path="/m/broken.gguf", reason="no GGUF header")
    world.do(InventoryScanned(models=(model("a"),), skipped=(skipped,)))
    for subject in ("/m/broken.gguf", "broken.gguf", "broken"):
        assert why(world, subject) == "/m/broken.gguf was skipped: no GGUF header."


def test_slots_can_be_asked_about_and_nonsense_gives_nothing() -> None:
    world = World()
    slot_id = world.bring_up("a")
    assert "It is ready" in why(world, slot_id)
    assert "0 requests of 2 in use" in why(world, "a.gguf")
    assert why(world, "zzz") == ""
    assert why(world, "") == ""


def test_why_a_pinned_model_stays() -> None:
    world = World()
    world.bring_up("a")
    assert "pinned" not in why(world, "a")
    world.pin("a")
    assert "It is pinned" in why(world, "a")


def test_the_history_is_bounded() -> None:
    world = World(config((2,)))
    for _ in range(300):
        world.bring_up("a")
        world.unload("a")
        world.stopped("a")
    assert len(why(world, "a").splitlines()) <= 20


def test_one_line_of_state() -> None:
    world = World()
    assert state_line(world.table.book) == "0 models loaded, 7 on disk"
    world.bring_up("a")
    world.acquire("a")
    world.acquire("b")
    assert state_line(world.table.book) == "1 model loaded, 1 waiting, 7 on disk"
    world.do(DeviceMeasured(device="cpu", total_bytes=1, reserve_bytes=0, engine="", engine_reason="install one"))
    assert state_line(world.table.book) == "no inference engine: install one"


def test_the_snapshot_is_everything_that_is_published() -> None:
    world = World(config(parallel=1))
    world.bring_up("a")
    world.acquire("a", "h1")
    world.acquire("a", "h2")
    kinds = [type(item) for item in snapshot(world.table.book)]
    assert kinds == [InventoryChanged, DeviceChanged, LimitsChanged, SlotChanged, CreditsRecalled]
