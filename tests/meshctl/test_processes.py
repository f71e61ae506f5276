"""services.meshctl.processes without a node: what is refused before anything is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.meshctl.node import Node
from tests.meshctl.conftest import Meshctl


def test_restart_refuses_what_would_not_come_back(
    meshctl: Meshctl, monkeypatch: pytest.MonkeyPatch, mesh_home: Path
) -> None:
    (mesh_home / "mesh.toml").write_text("[api\n")
    monkeypatch.setattr(Node, "running", lambda _self: None)  # Any use of it would be a traceback.
    ran = meshctl("restart", "launcherd")
    assert ran.status == 1
    assert "not valid TOML" in ran.err
