"""gossipd's files: identity is precious, demand is statistics."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.gossipd.io.state_files import StateFiles
from services.gossipd.mesh_identity import MeshIdentity
from shared.errors import StateError
from shared.ids import MeshId, ModelName, PeerId, SlotId

IDENTITY = MeshIdentity(mesh_id=MeshId("m"), incarnation=3, peer_id=PeerId("p"))
TOTALS, SLOTS = {ModelName("qwen"): 7}, {SlotId("s1"): 5}

full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")


def fill_disk(folder: Path, stem: str) -> None:
    """The next write beside ``stem`` finds the disk full."""
    (folder / f"{stem}.{os.getpid()}.tmp").symlink_to("/dev/full")


def test_both_files_come_back_as_written(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    assert files.load_identity() == MeshIdentity()
    assert files.load_demand() == ({}, {})
    files.save_identity(IDENTITY)
    files.save_demand(TOTALS, SLOTS)
    assert StateFiles(tmp_path).load_identity() == IDENTITY
    assert StateFiles(tmp_path).load_demand() == (TOTALS, SLOTS)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["demand.json", "mesh.json"]


def test_a_damaged_identity_stops_the_daemon_and_stays_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "mesh.json"
    for content in (b"", b"{", b"\xff\xfe", b"[]"):
        path.write_bytes(content)
        with pytest.raises(StateError, match=r"mesh\.json"):
            StateFiles(tmp_path).load_identity()
        assert path.read_bytes() == content


def test_an_identity_that_cannot_be_read_is_not_a_first_start(tmp_path: Path) -> None:
    (tmp_path / "mesh.json").mkdir()
    with pytest.raises(StateError, match="cannot read"):
        StateFiles(tmp_path).load_identity()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"totals": {}}',
        b'{"totals": [], "slots": {}}',
        b'{"totals": {"a": "x"}, "slots": {}}',
        b'{"totals": {"a": Infinity}, "slots": {}}',
        b"[" * 100000,
    ],
)
def test_damaged_demand_costs_only_statistics(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "demand.json").write_bytes(content)
    assert StateFiles(tmp_path).load_demand() == ({}, {})


@full_disk
def test_a_full_disk_keeps_the_old_identity_and_says_so(tmp_path: Path) -> None:
    """A node that can't remember its incarnation must not announce itself."""
    files = StateFiles(tmp_path)
    files.save_identity(IDENTITY)
    fill_disk(tmp_path, "mesh")
    with pytest.raises(StateError, match=r"cannot write .*mesh\.json: No space left on device; free some space"):
        files.save_identity(MeshIdentity(incarnation=4))
    assert files.load_identity() == IDENTITY
    assert [item.name for item in tmp_path.iterdir()] == ["mesh.json"], "no leftovers that fill the disk further"


@full_disk
def test_a_full_disk_costs_only_statistics(tmp_path: Path) -> None:
    files = StateFiles(tmp_path)
    files.save_demand(TOTALS, SLOTS)
    fill_disk(tmp_path, "demand")
    files.save_demand({}, {})
    assert files.load_demand() == (TOTALS, SLOTS)


def test_a_folder_that_is_gone_is_a_state_error(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "gone")
    with pytest.raises(StateError):
        files.save_identity(IDENTITY)
    files.save_demand(TOTALS, SLOTS)
