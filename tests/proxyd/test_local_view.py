"""What launcherd says of this node, mirrored."""

from __future__ import annotations

from services.proxyd.local_view import DOWNLOADS_KEPT, LocalView, is_ended
from shared.ids import ModelName, SlotId
from shared.messages.downloads import DownloadChanged, DownloadState, RegisteredModel, RegistryChanged
from shared.messages.models import InventoryChanged, LimitsChanged, SlotChanged, SlotState
from tests.proxyd.plane import local_model


def slot(model: str, state: SlotState = "ready", **fields: float) -> SlotChanged:
    return SlotChanged(
        slot_id=SlotId(f"s-{model}"), model=ModelName(model), type="llm", state=state, reason="", origin="request",
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def download(model: str, state: DownloadState, checkpoint: str = "org/repo:Q4") -> DownloadChanged:
    return DownloadChanged(model=ModelName(model), checkpoint=checkpoint, state=state, reason="")


def test_ages_become_times_when_they_arrive() -> None:
    """docs/spec/lemonade.md 9: an answer given later is still right."""
    view = LocalView()
    view.apply(slot("m", state_age_seconds=5, last_use_age_seconds=2), now=1000)
    seen = view.loaded()[0]
    assert (seen.since, seen.last_use) == (995, 998)


def test_the_newest_load_comes_first_and_only_what_answers_counts() -> None:
    view = LocalView()
    view.apply(slot("old", state_age_seconds=50), now=1000)
    view.apply(slot("new", state_age_seconds=5), now=1000)
    view.apply(slot("waits", "queued"), now=1000)
    view.apply(slot("failed", "failed"), now=1000)
    view.apply(slot("ends", "draining", state_age_seconds=60), now=1000)
    assert [seen.slot.model for seen in view.loaded()] == ["new", "old", "ends"]
    assert [seen.slot.model for seen in view.starting()] == ["waits"]
    view.apply(slot("new", "unloaded"), now=1001)
    assert [seen.slot.model for seen in view.loaded()] == ["old", "ends"]


def test_a_snapshot_replaces_all_but_the_last_words_on_downloads() -> None:
    view = LocalView()
    view.apply(InventoryChanged(models=(local_model("a"),)), now=0)
    view.apply(slot("m"), now=0)
    view.apply(download("done", "done"), now=0)
    view.apply(download("running", "downloading"), now=0)
    assert view.settled
    view.replace([InventoryChanged(models=(local_model("b"),), scanning=True)], now=1)
    assert (set(view.inventory), view.slots, view.settled) == ({"b"}, {}, False)
    assert set(view.downloads) == {"done"}


def test_limits_by_type() -> None:
    view = LocalView()
    assert view.limits == {}
    view.apply(LimitsChanged(max_loaded_models=(2, 1, 1, -1, 1)), now=0)
    assert view.limits == {"llm": 2, "embedding": 1, "reranking": 1, "audio": -1, "image": 1}


def test_names_also_of_files_and_the_nearest_ones() -> None:
    view = LocalView()
    view.apply(InventoryChanged(models=(local_model("qwen-0.6b"),)), now=0)
    view.apply(RegistryChanged(models=(RegisteredModel(name=ModelName("qwen-4b"), checkpoint="o/r:Q4"),)), now=0)
    found = view.on_disk("qwen-0.6b.gguf")
    assert found is not None
    assert found.name == "qwen-0.6b"
    assert view.on_disk("qwen-4b") is None
    assert set(view.nearest("qwen")) == {"qwen-0.6b", "qwen-4b"}


def test_a_download_goes_by_its_name_or_its_source() -> None:
    view = LocalView()
    view.apply(download("m", "downloading"), now=0)
    view.apply(download("other", "downloading", "else/where"), now=0)
    for names in (("m",), ("org/repo:Q4",), ("user.x", "org/repo:Q4"), ("", "org/repo"), ("m", "else/where")):
        found = view.download_of(*names)
        assert found is not None
        assert found.model == "m"
    assert view.download_of("unknown", "") is None
    assert not is_ended(view.downloads[ModelName("m")])


def test_finished_downloads_are_forgotten_and_running_ones_are_not() -> None:
    view = LocalView()
    view.apply(download("running", "downloading"), now=0)
    for number in range(3 * DOWNLOADS_KEPT):
        view.apply(download(f"m{number}", "failed"), now=0)
    assert len(view.downloads) == DOWNLOADS_KEPT
    assert "running" in view.downloads
    assert f"m{3 * DOWNLOADS_KEPT - 1}" in view.downloads
