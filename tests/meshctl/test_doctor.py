"""services.meshctl.doctor: each thing that can be missing is named, with the line that mends it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.meshctl.conftest import Meshctl


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
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
