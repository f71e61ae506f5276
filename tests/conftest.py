"""Fixtures that every test may use; no policy of any module."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.paths import NodePaths

HOME_LIMIT_BYTES = 60
"""Leaves room for socket names below the limit of unix sockets."""


@pytest.fixture
def mesh_home() -> Iterator[Path]:
    """A private ``MESH_HOME`` with a short path, removed afterwards."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > HOME_LIMIT_BYTES - 20:
        folder = "/tmp"
    home = Path(tempfile.mkdtemp(prefix="mesh-", dir=folder))
    assert len(os.fsencode(home)) < HOME_LIMIT_BYTES
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def node_paths(mesh_home: Path) -> NodePaths:
    """The prepared paths of a node in :func:`mesh_home`."""
    paths = NodePaths(mesh_home)
    paths.prepare()
    return paths
