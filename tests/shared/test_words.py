"""Sizes as model files are advertised."""

from __future__ import annotations

import pytest

from shared.words import size_words


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (581_400_000, "581 MB"),
        (99_940_000, "99.9 MB"),
        (16_000_000_000, "16.0 GB"),
        (2_500_000_000_000, "2.5 TB"),
    ],
)
def test_decimal_units(size: int, words: str) -> None:
    assert size_words(size) == words
