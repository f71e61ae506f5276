"""``MESH_HOME``: refused with a way out when it cannot hold a node."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import StateError
from shared.ids import DAEMONS
from shared.paths import IPC_PATH_LIMIT_BYTES, LONGEST_SOCKET, REPOSITORY, NodePaths, checked_socket_path


def test_home_is_mesh_home_or_dot_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert NodePaths.from_environment({}).home == Path("/home/ann/.mesh")
    assert NodePaths.from_environment({"MESH_HOME": ""}).home == Path("/home/ann/.mesh")
    assert NodePaths.from_environment({"MESH_HOME": "~/two"}).home == Path("/home/ann/two")
    assert NodePaths.from_environment({"MESH_HOME": "/srv/mesh"}).config_file == Path("/srv/mesh/mesh.toml")


@pytest.mark.parametrize("home", ["mesh", "./mesh", "../x", "~nobody-of-this-name/mesh"])
def test_a_relative_home_is_refused(home: str) -> None:
    """It would mean another folder for each daemon."""
    with pytest.raises(StateError, match="is not an absolute path") as caught:
        NodePaths.from_environment({"MESH_HOME": home})
    assert home in caught.value.detail


def test_folders_are_private_even_if_they_were_not(mesh_home: Path) -> None:
    paths = NodePaths(mesh_home / "node")
    paths.prepare()
    for folder in (paths.home, paths.bus, paths.state, paths.engines):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    paths.bus.chmod(0o755)
    paths.prepare()
    assert stat.S_IMODE(paths.bus.stat().st_mode) == 0o700
    assert list(paths.state.iterdir()) == []


def test_a_home_too_long_for_sockets_is_refused(mesh_home: Path) -> None:
    longest = IPC_PATH_LIMIT_BYTES - len(f"/run/{LONGEST_SOCKET}")
    fits = mesh_home / ("x" * (longest - len(os.fsencode(mesh_home)) - 1))
    NodePaths(fits).prepare()
    with pytest.raises(StateError, match=r"bytes long, the limit is 100; set MESH_HOME to a shorter path"):
        NodePaths(fits.with_name(fits.name + "x")).prepare()


def test_what_the_limit_lets_through_can_be_bound(mesh_home: Path) -> None:
    path = mesh_home / ("s" * (IPC_PATH_LIMIT_BYTES - len(os.fsencode(mesh_home)) - 1))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(checked_socket_path(path)))
    with pytest.raises(StateError):
        checked_socket_path(path.with_name(path.name + "s"))


def test_the_limit_counts_bytes_not_characters() -> None:
    with pytest.raises(StateError, match="is 121 bytes long"):
        checked_socket_path(Path("/" + "é" * 60))


def test_no_socket_name_is_longer_than_what_prepare_checks(mesh_home: Path) -> None:
    paths = NodePaths(mesh_home)
    names = [paths.publisher(daemon) for daemon in DAEMONS] + [paths.requests(daemon) for daemon in DAEMONS]
    assert all(len(Path(name).name) <= len(LONGEST_SOCKET) for name in [*names, paths.keeper_socket])
    assert names[0] == f"ipc://{mesh_home}/run/gossipd.pub"


def test_a_home_that_is_a_file_is_refused_with_a_way_out(mesh_home: Path) -> None:
    blocked = mesh_home / "file"
    blocked.write_text("")
    with pytest.raises(StateError, match=r"cannot use .* or set MESH_HOME to another folder"):
        NodePaths(blocked / "node").prepare()


def test_an_unwritable_home_is_refused_with_a_way_out(mesh_home: Path) -> None:
    """Root passes every permission check, so root tries it as nobody."""
    home = mesh_home / "sealed"
    home.mkdir(mode=0o500)
    mesh_home.chmod(0o755)
    home.chmod(0o555)
    script = (
        "import os, sys, pathlib, shared.paths\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: shared.paths.NodePaths(pathlib.Path(sys.argv[1])).prepare()\n"
        "except shared.paths.StateError as error: print(error.detail)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(home)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert "Permission denied" in done.stdout
    assert "fix its permissions, or set MESH_HOME to another folder" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
def test_a_full_disk_is_noticed_before_anything_is_lost(mesh_home: Path) -> None:
    """The probe is what fails, and it says so; /dev/full stands for the disk."""
    paths = NodePaths(mesh_home)
    paths.prepare()
    (paths.state / f".probe-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(StateError, match=r"No space left on device. Free some space"):
        paths.prepare()
