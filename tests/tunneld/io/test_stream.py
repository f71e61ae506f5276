"""Reasons that travel between nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.tunneld.io.stream import REASON_LIMIT_BYTES, bounded_reason


@given(st.text(max_size=2000))
def test_a_reason_is_one_short_printable_line(text: str) -> None:
    reason = bounded_reason(text)
    assert len(reason.encode()) <= REASON_LIMIT_BYTES
    assert reason.isprintable()
    assert bounded_reason(reason) == reason


def test_ordinary_words_stay_as_they_are() -> None:
    assert bounded_reason("banned from this mesh") == "banned from this mesh"
    assert bounded_reason("two\nlines\x1b[31m") == "two lines [31m"
