"""A hub with models in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import tiny_models
from tests.hub.fake_hub import FakeHub, fake_hub

REPO = "tiny/Tiny-GGUF"
BIG_BYTES = 400_000


def bytes_of(seed: str, size: int = BIG_BYTES) -> bytes:
    """Something that begins like a GGUF file and can't be compressed."""
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """`tiny/Tiny-GGUF`: a Q4_0, a Q8_0 in three parts, a projector, a readme. No real model."""
    with fake_hub() as running:
        running.in_git.add("README.md")
        running.repos[REPO] = {
            "README.md": b"# Tiny\n",
            "Tiny-Q4_0.gguf": bytes_of("q4"),
            "mmproj-Tiny-f16.gguf": bytes_of("mmproj", 5_000),
            **{f"Tiny-Q8_0-0000{at}-of-00003.gguf": bytes_of(f"part{at}", 100_000 + at) for at in (1, 2, 3)},
        }
        yield running


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A real tiny model, whole and in three parts, as a repository holds it."""
    folder: Path = tmp_path_factory.mktemp("hub")
    tiny_models.write_llm(folder / "Real-Q8_0.gguf")
    tiny_models.write_parts(folder, "Real-F16", folder / "Real-Q8_0.gguf")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
