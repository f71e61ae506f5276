"""shared.status_hints: the next step, most urgent first."""

from __future__ import annotations

from shared.messages.models import CatalogChanged, DeviceChanged
from shared.status_hints import HINT_LIMIT
from shared.status_view import build_status
from tests.shared.test_status_view import build, infos, mesh_model, rows, slot, snapshots


def test_a_dead_daemon_comes_first_with_its_remedy() -> None:
    assert (
        build(launcherd="fatal").hints[0]
        == "launcherd could not be started: meshctl logs launcherd, then meshctl restart launcherd"
    )


def test_a_missing_engine_says_how_to_get_one() -> None:
    said = snapshots()
    assert said["launcherd"] is not None
    said["launcherd"][1] = DeviceChanged(
        device="cpu", vram_bytes=1, total_bytes=1, reserve_bytes=0, engine="", engine_reason="pip install xllamacpp"
    )
    assert build_status(said, infos(), rows()).hints[0] == "no engine: pip install xllamacpp"


def test_a_failed_model_points_to_why() -> None:
    said = snapshots()
    assert said["launcherd"] is not None
    said["launcherd"].append(slot("phi", "failed", "crashed", "s2"))
    assert build_status(said, infos(), rows()).hints[0] == "phi failed: meshctl why phi"


def test_a_requested_model_that_needs_capacity_points_to_why() -> None:
    said = snapshots()
    said["electiond"] = [CatalogChanged(models=(mesh_model("big", "needs_capacity", "8 GB more", requested=True),))]
    assert "meshctl why big" in build_status(said, infos(), rows()).hints[0]


def test_with_only_the_guide_it_says_where_models_go() -> None:
    said = snapshots()
    said["electiond"] = [CatalogChanged(models=(mesh_model("meshd-guide", "unloaded", "", builtin=True),))]
    said["launcherd"] = []
    assert "~/.models" in build_status(said, infos(), rows()).hints[0]


def test_never_more_than_a_handful() -> None:
    said = snapshots()
    assert said["launcherd"] is not None
    said["launcherd"] += [slot(f"m{at}", "failed", "crashed", f"s{at}") for at in range(2, 9)]
    hints = build_status(said, infos(), rows()).hints
    assert len(hints) == HINT_LIMIT
    assert hints[0] == "m2 failed: meshctl why m2"


def test_version_skew_is_hinted() -> None:
    known = infos()
    known["proxyd"] = infos("0.2.0")["proxyd"]
    assert "daemons of versions 0.1.0, 0.2.0" in build_status(snapshots(), known, rows()).hints[0]
