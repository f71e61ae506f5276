"""meshctl run inside the test process: its exit status and what it printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.meshctl.__main__ import main
from shared.config import ENVIRONMENT
from tests.processes.node import processes_of


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Meshctl = Callable[..., Ran]


@pytest.fixture
def meshctl(mesh_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Meshctl]:
    """Runs a command for the node at ``mesh_home``. Nothing should start; what does is ended with the test."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESH_HOME", str(mesh_home))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    yield run
    if (mesh_home / "run" / "supervisord.pid").exists():
        for process in processes_of(mesh_home):
            process.kill()
