"""What survives launcherd."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.launcherd.command_line import EngineOptions
from services.launcherd.io.memory_file import LOGS_LIMIT, MemoryFile
from services.launcherd.slot_events import Memory, SlotMemory
from shared.ids import HolderId, ModelName, SlotId

MEMORY = Memory(
    slots={SlotId("s-1"): SlotMemory(model=ModelName("m"), options=EngineOptions(extra_args=("--x",)), origin="flag")},
    credits={SlotId("s-1"): {HolderId("h"): 3}},
    declined={ModelName("d"): "unloaded by request"},
    pinned=frozenset({ModelName("p")}),
    limits_set=(2, 1),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    MemoryFile(tmp_path / "m.json").write(MEMORY)
    assert MemoryFile(tmp_path / "m.json").read() == MEMORY
    assert (tmp_path / "m.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["m.json"]


def test_no_file_is_an_empty_memory(tmp_path: Path) -> None:
    assert MemoryFile(tmp_path / "m.json").read() == Memory()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"memory": 3}', b"\xff\xfe", b'{"memory":{"slots":{"a":1}}}'])
def test_a_broken_file_is_an_incomplete_memory(tmp_path: Path, data: bytes) -> None:
    """Then nothing is stopped until every holder could have announced itself."""
    (tmp_path / "m.json").write_bytes(data)
    assert MemoryFile(tmp_path / "m.json").read() == Memory(complete=False)


def test_declined_models_are_forgotten_with_the_next_start_of_the_node(tmp_path: Path) -> None:
    """Unloaded by hand means until the node is started again; a restart of launcherd alone changes nothing."""
    MemoryFile(tmp_path / "m.json", run="1").write(MEMORY)
    assert MemoryFile(tmp_path / "m.json", run="1").read().declined == MEMORY.declined
    other = MemoryFile(tmp_path / "m.json", run="2").read()
    assert (other.declined, other.credits) == ({}, MEMORY.credits)


def test_pins_outlive_the_node_and_limits_that_were_set_do_not(tmp_path: Path) -> None:
    MemoryFile(tmp_path / "m.json", run="1").write(MEMORY)
    assert MemoryFile(tmp_path / "m.json", run="1").read().limits_set == (2, 1)
    other = MemoryFile(tmp_path / "m.json", run="2").read()
    assert (other.pinned, other.limits_set) == (MEMORY.pinned, ())


def test_the_newest_log_of_each_model_is_known_and_older_ones_are_handed_back(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "m.json")
    model = ModelName("m")
    assert file.new_log(model, "/logs/1.log") == []
    assert file.new_log(model, "/logs/1.log") == []
    assert file.new_log(model, "/logs/2.log") == ["/logs/1.log"]
    again = MemoryFile(tmp_path / "m.json")
    again.read()
    assert again.log_of(model) == "/logs/2.log"
    assert again.log_of(ModelName("other")) == ""
    dropped = [path for number in range(LOGS_LIMIT) for path in again.new_log(ModelName(f"m{number}"), f"/{number}")]
    assert dropped == ["/logs/2.log"]
