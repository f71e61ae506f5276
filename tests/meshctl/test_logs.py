"""services.meshctl.logs: readable with the node down, merged by time, followed through rotation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.meshctl.logs import _Tail
from shared.paths import REPOSITORY
from tests.meshctl.conftest import Meshctl


@pytest.fixture
def logs(mesh_home: Path) -> Path:
    folder = mesh_home / "logs"
    folder.mkdir()
    for name, seconds in (("gossipd", (1, 4)), ("proxyd", (2, 3))):
        lines = [f"2026-01-01T00:00:0{at}.000Z info event=e{at}" for at in seconds]
        (folder / f"{name}.log").write_text("\n".join(lines) + "\n")
    return folder


def test_all_daemons_are_merged_by_time(meshctl: Meshctl, logs: Path) -> None:
    lines = meshctl("logs").out.splitlines()
    assert [line.split()[0] for line in lines] == ["gossipd", "proxyd", "proxyd", "gossipd"]
    assert [line[-2:] for line in lines] == ["e1", "e2", "e3", "e4"]


def test_lines_without_a_time_stay_where_they_belong(meshctl: Meshctl, logs: Path) -> None:
    with (logs / "gossipd.log").open("a") as file:
        file.write("gossipd ready\n2026-01-01T00:00:06.000Z info event=e6\n  a traceback\n")
    with (logs / "proxyd.log").open("a") as file:
        file.write("2026-01-01T00:00:05.000Z info event=e5\n2026-01-01T00:00:07.000Z info event=e7\n")
    assert [line.split()[-1] for line in meshctl("logs", "-n", "5").out.splitlines()] == [
        "event=e5",
        "ready",
        "event=e6",
        "traceback",
        "event=e7",
    ]


def test_one_daemon_is_printed_as_it_is(meshctl: Meshctl, logs: Path) -> None:
    assert meshctl("logs", "proxyd", "-n", "1").out == "2026-01-01T00:00:03.000Z info event=e3\n"


def test_control_characters_do_not_reach_the_terminal(meshctl: Meshctl, logs: Path) -> None:
    (logs / "proxyd.log").write_text("a model called \x1b[31mred\x1b[0m\n")
    assert "\x1b" not in meshctl("logs", "proxyd").out


def test_without_any_log_it_says_what_to_do(meshctl: Meshctl) -> None:
    ran = meshctl("logs")
    assert (ran.status, "meshctl up" in ran.err) == (1, True)


def test_last_lines_of_a_file_larger_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "big.log"
    path.write_text("".join(f"line {at} {'x' * 100}\n" for at in range(5000)))
    assert [line.split()[1] for line in _Tail("big", path).last(3)] == ["4997", "4998", "4999"]
    assert len(_Tail("big", path).last(4000)) == 4000


def test_following_gives_whole_lines_and_survives_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    tail = _Tail("a", path)
    assert tail.last(10) == ["one"]
    with path.open("a") as file:
        file.write("tw")
        file.flush()
        assert list(tail.new()) == []
        file.write("o\nthree\n")
    assert list(tail.new()) == ["two", "three"]
    path.rename(tmp_path / "a.log.1")
    assert list(tail.new()) == []
    path.write_text("four, in a new file that is already longer than the old one\n")
    assert list(tail.new()) == ["four, in a new file that is already longer than the old one"]


def test_follow_prints_what_is_added_and_ends_quietly_with_its_reader(logs: Path, mesh_home: Path) -> None:
    command = [sys.executable, "-m", "services.meshctl", "logs", "-f", "proxyd", "-n", "1"]
    environment = {**os.environ, "MESH_HOME": str(mesh_home)}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        assert ran.stdout is not None
        assert ran.stderr is not None
        assert ran.stdout.readline().endswith("event=e3\n")
        with (logs / "proxyd.log").open("a") as file:
            file.write("2026-01-01T00:00:05.000Z info event=e5\n")
        assert ran.stdout.readline().endswith("event=e5\n")
        ran.stdout.close()
        with (logs / "proxyd.log").open("a") as file:
            file.write("2026-01-01T00:00:06.000Z info event=e6\n")
        ran.wait(10)
        assert ran.stderr.read() == ""
