"""services.meshctl.doctor: each thing that can be missing is named, with the line that mends it."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from services.meshctl.doctor import _engine, _ports
from services.meshctl.node import Node
from shared.node_status import Ports
from shared.status_view import build_status
from tests.meshctl.conftest import Meshctl


@pytest.fixture(autouse=True)
def free_ports(meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``meshctl``, which forgets these variables: whoever runs the tests may run a node on the usual ports."""
    del meshctl
    for name in ("MESH_API_PORT", "MESH_CONSOLE_PORT", "MESH_PORT"):
        monkeypatch.setenv(name, "0")


def checks(meshctl: Meshctl) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for check in meshctl("doctor", "--json").json()["checks"]:
        found.setdefault(check["name"], []).append(check)
    return found


def test_it_changes_nothing(meshctl: Meshctl, mesh_home: Path) -> None:
    assert meshctl("doctor").status == 0
    assert os.listdir(mesh_home) == []


def test_a_healthy_machine_with_the_node_down(meshctl: Meshctl) -> None:
    ran = meshctl("doctor")
    assert ran.status == 0
    assert "0 missing" in ran.out
    assert "-> meshctl up" in ran.out


def test_a_missing_engine(meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_ENGINE", "/nonexistent/llama-server")
    ran = meshctl("doctor")
    assert ran.status == 1
    engine = checks(meshctl)["engine"][0]
    assert (engine["level"], engine["detail"]) == (
        "fail",
        "the configured engine /nonexistent/llama-server does not exist",
    )
    assert "pip install xllamacpp" in engine["fix"]


def test_an_engine_that_is_not_executable(meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llama-server").write_text("")
    monkeypatch.setenv("MESH_ENGINE", str(tmp_path / "llama-server"))
    assert "not executable" in checks(meshctl)["engine"][0]["detail"]


def test_a_taken_port_and_who_has_it(meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MESH_API_PORT", str(port))
        check = checks(meshctl)[f"port {port}"][0]
    assert check["level"] == "fail"
    assert f"pid {os.getpid()}" in check["detail"]
    assert "meshctl config set api.port" in check["fix"]


def test_ports_of_a_running_node_are_those_it_has(monkeypatch: pytest.MonkeyPatch, mesh_home: Path) -> None:
    """The shell that asks need not have the port variables the node was started with."""
    running = dataclasses.replace(build_status({}, {}, ()), ports=Ports(api=41, console=42, mesh=43))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        node = Node({"MESH_HOME": str(mesh_home), "MESH_API_PORT": str(taken.getsockname()[1])})
        monkeypatch.setattr(Node, "supervised", object())
        monkeypatch.setattr(Node, "status", lambda _self: running)
        found = list(_ports(node))
    assert [check.level for check in found] == ["ok"] * 4
    assert "runs with port 41 instead" in found[0].detail


def test_the_engine_of_a_running_node_is_the_one_it_uses(monkeypatch: pytest.MonkeyPatch, mesh_home: Path) -> None:
    """A llama-server on the PATH of the shell that started the node need not be on this one's."""
    view = build_status({}, {}, ())
    running = dataclasses.replace(view, node=dataclasses.replace(view.node, engine="llama-server 9"))
    monkeypatch.setattr(Node, "supervised", object())
    monkeypatch.setattr(Node, "status", lambda _self: running)
    node = Node({"MESH_HOME": str(mesh_home), "MESH_ENGINE": "/nonexistent/llama-server"})
    assert [check.detail for check in _engine(node)] == ["llama-server 9, in use"]


def test_a_broken_config_spoils_only_the_checks_that_need_it(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").write_text("[api]\nprot = 1\n")
    found = checks(meshctl)
    assert "did you mean port?" in found["config"][0]["detail"]
    assert found["home"][0]["level"] == found["disk"][0]["level"] == "ok"


def test_a_home_too_long(meshctl: Meshctl, mesh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_HOME", str(mesh_home / ("x" * 80)))
    check = checks(meshctl)["home"][0]
    assert (check["level"], check["fix"]) == ("fail", "set MESH_HOME to a shorter path")


def test_a_state_folder_others_can_read(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "run").mkdir()
    (mesh_home / "run").chmod(0o755)
    check = checks(meshctl)["home"][0]
    assert (check["level"], check["fix"].split(" (")[0]) == ("warn", f"chmod 700 {mesh_home}/run")


def test_a_models_folder_that_is_not_there(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").write_text('[models]\nfolders = ["/nonexistent/models"]\n')
    check = checks(meshctl)["models"][0]
    assert (check["level"], check["detail"]) == ("warn", "/nonexistent/models does not exist")
    assert "mkdir -p /nonexistent/models" in check["fix"]


def test_recipes_that_can_run_here_and_those_the_owner_named_in_vain(
    meshctl: Meshctl, mesh_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody asked for is no lack; what mesh.toml names is."""
    found = checks(meshctl)["recipes"]
    assert [(check["level"], check["detail"]) for check in found] == [
        ("ok", "llamacpp only; other recipes need their programs")
    ]
    for name in ("whisper-server", "my-build"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (mesh_home / "mesh.toml").write_text(
        f'[engine]\nbackends = {{ cpu = "{tmp_path}/my-build", vulkan = "/no/such" }}\n'
        '[recipes.flm]\nprogram = "/no/flm"\n'
    )
    found = checks(meshctl)["recipes"]
    assert [check["level"] for check in found] == ["warn", "warn", "ok"]
    assert "the recipe flm, /no/flm, is not there" in found[0]["detail"]
    assert "FastFlowLM" in found[0]["fix"]
    assert "the build vulkan of llama.cpp, /no/such, is not there" in found[1]["detail"]
    assert found[2]["detail"] == "can run too: whispercpp, llamacpp cpu"


def test_the_build_that_mesh_toml_chooses(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").write_text('[engine]\nbackend = "cpu"\nbackends = { cpu = "/no/such" }\n')
    assert checks(meshctl)["engine"][0]["detail"] == "the configured engine /no/such does not exist"
