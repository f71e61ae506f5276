"""Names as people and clients write them."""

from __future__ import annotations

import pytest

from services.launcherd.model_names import find_name, not_found_words
from shared.ids import ModelName
from shared.messages.models import SkippedFile

KNOWN = [ModelName(name) for name in ("qwen", "llama-8b", "with.dots.v1", "dir")]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("qwen", "qwen"),
        ("qwen.gguf", "qwen"),
        ("QWEN", None),
        ("/home/me/.models/qwen.gguf", "qwen"),
        ("models/llama-8b", "llama-8b"),
        ("llama-8b-00001-of-00003.gguf", "llama-8b"),
        ("with.dots.v1", "with.dots.v1"),
        ("with.dots.v1.gguf", "with.dots.v1"),
        ("dir/", "dir"),
        ("", None),
        ("/", None),
        (".gguf", None),
        ("../../etc/passwd", None),
        ("qwen\0", None),
    ],
)
def test_find_name(asked: str, name: str | None) -> None:
    """Exact name; also file stem variants given as path basename with or without .gguf."""
    assert find_name(asked, KNOWN) == name


def test_words_help() -> None:
    """Errors say what, why and what to do next."""
    assert "did you mean 'llama-8b'?" in not_found_words("llama8b", KNOWN)
    assert "meshctl models" in not_found_words("zzzzzz", KNOWN)
    assert "~/.models" in not_found_words("qwen", [])
    assert len(not_found_words("x" * 100_000, KNOWN)) < 500


def test_a_file_that_was_skipped_is_not_just_unknown() -> None:
    skipped = (SkippedFile(path="/m/half.gguf", reason="truncated"),)
    for asked in ("half", "half.gguf", "/m/half.gguf"):
        assert not_found_words(asked, KNOWN, skipped) == "/m/half.gguf was skipped: truncated"
    assert "skipped" not in not_found_words("whole", KNOWN, skipped)
