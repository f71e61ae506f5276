"""One inference port and one bare engine per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxyd.plane import Plane, running_plane
from tests.proxyd.raw_upstream import RawUpstream, raw_upstream
from tests.proxyd.scripted_launcherd import Scripted, scripted_launcherd


@pytest.fixture
def plane(mesh_home: Path) -> Iterator[Plane]:
    with running_plane(mesh_home) as running:
        yield running


@pytest.fixture
def upstream() -> Iterator[RawUpstream]:
    with raw_upstream() as running:
        yield running


@pytest.fixture
def launcherd(plane: Plane) -> Scripted:
    return scripted_launcherd(plane)
