"""Issue "Bad input": whatever is wrong, meshctl says what, why and what to do next, and nothing is lost or started."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.io.daemon_process import DaemonLock
from shared.paths import NodePaths
from tests.meshctl.conftest import Meshctl, Ran
from tests.waiting import wait_until


def refused(ran: Ran, *words: str) -> None:
    assert ran.status == 1, ran
    for word in words:
        assert word in ran.err, ran.err
    assert "Traceback" not in ran.err
    assert ran.err.count("meshctl:") == 1, "one message"


def nothing_started(home: Path) -> None:
    assert not (home / "run" / "supervisor.sock").exists()


@pytest.mark.parametrize(
    ("variable", "key", "kind"),
    [
        ("MESH_API_PORT", "api.port", socket.SOCK_STREAM),
        ("MESH_CONSOLE_PORT", "console.port", socket.SOCK_STREAM),
        ("MESH_PORT", "mesh.port", socket.SOCK_DGRAM),
        ("MESH_PORT", "mesh.port", socket.SOCK_STREAM),
    ],
)
def test_a_taken_port_is_named_with_its_owner_and_the_ways_out(
    meshctl: Meshctl,
    mesh_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    key: str,
    kind: socket.SocketKind,
) -> None:
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        port = taken.getsockname()[1]
        for name in ("MESH_API_PORT", "MESH_CONSOLE_PORT", "MESH_PORT"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setenv("MESH_HOST", "127.0.0.1")
        monkeypatch.setenv(variable, str(port))
        ran = meshctl("up")
    refused(ran, f"port {port}", key, f"pid {os.getpid()}", f"{variable}={port + 100} meshctl up", "meshctl config set")
    nothing_started(mesh_home)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[api\nport = 1\n", ["mesh.toml is not valid TOML", "line 1"]),
        ("[api]\nprot = 9437\n", ["unknown key api.prot", "did you mean port?"]),
        ("[modles]\n", ["unknown section [modles]", "did you mean models?"]),
        ('[api]\nport = "many"\n', ["api.port"]),
    ],
    ids=["not-toml", "unknown-key", "unknown-section", "wrong-type"],
)
@pytest.mark.parametrize(
    "verb", [["up"], ["up", "--model", "m"], ["config", "check"], ["config", "set", "node.name", "desk"]]
)
def test_an_unusable_config_is_explained_and_left_as_it_is(
    meshctl: Meshctl, mesh_home: Path, text: str, words: list[str], verb: list[str]
) -> None:
    (mesh_home / "mesh.toml").write_text(text)
    refused(meshctl(*verb), *words)
    assert (mesh_home / "mesh.toml").read_text() == text
    nothing_started(mesh_home)


def test_a_config_that_is_no_text_is_explained(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").write_bytes(b"\xff\xfe[api]")
    refused(meshctl("up"), "cannot read", "mesh.toml")


def test_a_config_that_is_a_folder_is_explained(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").mkdir()
    refused(meshctl("up"), "cannot read", "mesh.toml")


def test_errors_are_objects_with_json(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").write_text("[api]\nprot = 1\n")
    ran = meshctl("up", "--json")
    assert (ran.status, ran.err) == (1, "")
    error = ran.json()["error"]
    assert error["code"] == "config"
    assert "did you mean port?" in error["detail"]


def test_a_home_too_long_for_sockets_is_refused(
    meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, mesh_home: Path
) -> None:
    monkeypatch.setenv("MESH_HOME", str(mesh_home / ("x" * 90)))
    refused(meshctl("up"), "bytes long", "set MESH_HOME to a shorter path")


def test_a_relative_home_is_refused(meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_HOME", "mesh")
    refused(meshctl("status"), "MESH_HOME=mesh is not an absolute path")


def test_a_home_supervisord_cannot_write_down_is_refused(
    meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, mesh_home: Path
) -> None:
    monkeypatch.setenv("MESH_HOME", str(mesh_home / "50%"))
    for name in ("MESH_API_PORT", "MESH_CONSOLE_PORT", "MESH_PORT"):
        monkeypatch.setenv(name, "0")
    refused(meshctl("up"), "cannot hold")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_home_without_permission_is_refused(
    meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, mesh_home: Path
) -> None:
    mesh_home.chmod(0o500)
    refused(meshctl("up"), "fix its permissions")


def test_a_home_that_is_a_file_is_refused(meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, mesh_home: Path) -> None:
    (mesh_home / "file").write_text("")
    monkeypatch.setenv("MESH_HOME", str(mesh_home / "file"))
    refused(meshctl("up"), "cannot use", "MESH_HOME")


@pytest.fixture
def full_disk(mesh_home: Path) -> Iterator[Path]:
    """A file system of 64 KiB with nothing left."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    folder = mesh_home / "disk"
    folder.mkdir()
    if sys.platform != "linux" or mount is None or umount is None:
        pytest.skip("needs Linux's tmpfs")
    command = [mount, "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a tmpfs here")
    try:
        yield folder
    finally:
        wait_until(
            lambda: subprocess.run([umount, str(folder)], capture_output=True, check=False).returncode == 0,
            5.0,
            "the tmpfs is unmounted",
        )


def fill(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            return


def test_a_full_disk_is_said_before_anything_starts(
    meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, full_disk: Path
) -> None:
    monkeypatch.setenv("MESH_HOME", str(full_disk))
    fill(full_disk)
    refused(meshctl("up"), "No space left", "Free some space")


def test_a_disk_too_full_to_run_on_starts_nothing(
    meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, full_disk: Path
) -> None:
    """Room for mesh.toml, none for keys, locks and logs: daemons would end without a word."""
    monkeypatch.setenv("MESH_HOME", str(full_disk))
    for name in ("MESH_API_PORT", "MESH_CONSOLE_PORT", "MESH_PORT"):
        monkeypatch.setenv(name, "0")
    refused(meshctl("up"), "are free for", "MESH_HOME to another disk")
    assert not (full_disk / "run" / "supervisord.pid").exists()


def test_a_full_disk_keeps_the_settings(meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, full_disk: Path) -> None:
    monkeypatch.setenv("MESH_HOME", str(full_disk))
    config = full_disk / "mesh.toml"
    config.write_text("[api]\nport = 9438\n")
    assert meshctl("config", "set", "api.port", "9439").status == 0
    before = config.read_text()
    fill(full_disk)
    refused(meshctl("config", "set", "node.name", "x" * 8000), "No space left", "Nothing was changed")
    assert config.read_text() == before


def test_two_nodes_with_one_home(meshctl: Meshctl, mesh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemons belong to nobody we can ask: they are named, and nothing is started over them."""
    monkeypatch.setattr("services.meshctl.up.ORPHAN_SECONDS", 0.1)
    for name in ("MESH_API_PORT", "MESH_CONSOLE_PORT", "MESH_PORT"):
        monkeypatch.setenv(name, "0")
    paths = NodePaths(mesh_home)
    paths.prepare()
    code = (
        "import signal, sys; from pathlib import Path; from shared.io.daemon_process import DaemonLock\n"
        "lock = DaemonLock(Path(sys.argv[1]), 'gossipd'); print('held', flush=True); signal.pause()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.lock_file("gossipd"))], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        refused(meshctl("up"), f"gossipd (pid {other.pid})", "meshctl down", "set MESH_HOME to another folder")
        nothing_started(mesh_home)
    finally:
        other.kill()
        other.wait()
        assert other.stdout is not None
        other.stdout.close()
    DaemonLock(paths.lock_file("gossipd"), "gossipd")


@pytest.mark.parametrize(
    "words",
    [
        ["ps"],
        ["peers"],
        ["restart"],
        ["load", "m"],
        ["unload"],
        ["models"],
        ["models", "show", "m"],
        ["models", "rm", "m"],
        ["chat", "m", "-m", "hi"],
        ["why", "m"],
        ["story", "gossipd"],
        ["config", "reload"],
        ["status"],
    ],
    ids=" ".join,
)
def test_a_node_that_is_down_is_said_with_the_next_step(meshctl: Meshctl, words: list[str]) -> None:
    refused(meshctl(*words), "this node is not running", "meshctl up")


def test_a_node_that_is_down_in_json(meshctl: Meshctl) -> None:
    ran = meshctl("status", "--json")
    assert ran.status == 1
    assert ran.json()["error"]["code"] == "node_down"
    assert ran.json()["overall"] == "down"


def test_stopping_a_node_that_is_down_is_no_failure(meshctl: Meshctl) -> None:
    ran = meshctl("down")
    assert (ran.status, ran.out) == (0, "This node was not running.\n")


def test_a_model_file_that_is_not_there(meshctl: Meshctl) -> None:
    refused(meshctl("up", "--model", "/nonexistent/m.gguf"), "there is no file /nonexistent/m.gguf")


@pytest.mark.parametrize("limits", ["0", "-2", "1 2 3 4 5 6", "many"])
def test_limits_that_cannot_be(meshctl: Meshctl, limits: str) -> None:
    ran = meshctl("up", f"--max-loaded-models={limits}")
    assert (ran.status, "-1 (no limit) or at least 1" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    ("text", "words"), [("--host 0.0.0.0", "meshd chooses where the engine listens"), ("'", "is not closed")]
)
def test_arguments_for_the_engine_that_cannot_be(meshctl: Meshctl, mesh_home: Path, text: str, words: str) -> None:
    ran = meshctl("up", "--llamacpp-args", text)
    assert (ran.status, words in ran.err, "mesh.toml" in ran.err) == (2, True, False), ran.err
    nothing_started(mesh_home)


def test_a_value_that_looks_like_an_option_is_a_value(meshctl: Meshctl, mesh_home: Path) -> None:
    """docs/operating.md: -1 is no limit."""
    assert meshctl("config", "set", "models.max_loaded_models", "-1").status == 0
    assert "max_loaded_models = -1" in (mesh_home / "mesh.toml").read_text()
    refused(meshctl("config", "set", "models.max_loaded_models", "-2"), "-1 (no limit) or at least 1")
