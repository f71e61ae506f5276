"""``state/elections.json`` belongs to one run of the node and costs only a placement when it is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.electiond.io.memory_file import MemoryFile, this_run
from services.electiond.stimuli import NO_MEMORY, Memory
from shared.paths import REPOSITORY
from tests.electiond.nodes import name

MEMORY = Memory(declined=((name("qwen"), "unloaded by its owner"),), held_by_owner=True, named=(name("qwen"),))


def test_a_restart_within_one_run_remembers(tmp_path: Path) -> None:
    path = tmp_path / "elections.json"
    assert MemoryFile(path, "7-100").load() == NO_MEMORY
    MemoryFile(path, "7-100").save(MEMORY)
    assert MemoryFile(path, "7-100").load() == MEMORY
    assert [item.name for item in tmp_path.iterdir()] == ["elections.json"]


def test_another_run_of_the_node_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "elections.json"
    MemoryFile(path, "7-100").save(MEMORY)
    assert MemoryFile(path, "7-200").load() == NO_MEMORY


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"run": "r"}',
        '{"run": "r", "declined": 5, "held_by_owner": true, "named": []}',
        '{"run": "r", "declined": [["a"]], "held_by_owner": true, "named": []}',
        "[" * 100_000,
        "\x00",
    ],
)
def test_a_damaged_file_is_logged_and_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "elections.json"
    path.write_text(text)
    assert MemoryFile(path, "r").load() == NO_MEMORY
    path.write_bytes(b"\xff\xfe")
    assert MemoryFile(path, "r").load() == NO_MEMORY


def test_a_file_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    MemoryFile(blocked / "elections.json", "r").save(MEMORY)
    folder = tmp_path / "elections.json"
    folder.mkdir()
    MemoryFile(folder, "r").save(MEMORY)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["elections.json", "file"], "no leftovers"


def test_a_run_is_its_supervisord_not_only_its_number() -> None:
    """In a container supervisord has the same pid every time."""
    assert this_run().startswith(f"{os.getppid()}-" if Path("/proc/self/stat").exists() else str(os.getppid()))
    script = "from services.electiond.io.memory_file import this_run; print(this_run())"
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1], "the same parent is the same run"
    assert runs[0].startswith(f"{os.getpid()}")


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    MemoryFile(tmp_path / "m.json", "r").save(MEMORY)
    assert json.loads((tmp_path / "m.json").read_text()) == {
        "run": "r",
        "declined": [["qwen", "unloaded by its owner"]],
        "held_by_owner": True,
        "named": ["qwen"],
    }
