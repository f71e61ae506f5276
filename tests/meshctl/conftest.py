"""meshctl run inside the test process: its exit status and what it printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.meshctl.__main__ import main
from shared.config import ENVIRONMENT


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Meshctl = Callable[..., Ran]


@pytest.fixture
def meshctl(mesh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Meshctl:
    """Runs a command for the node at ``mesh_home``, all ports free ones."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESH_HOME", str(mesh_home))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    return run
