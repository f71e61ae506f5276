"""One structured line whatever the value; a log that fails takes nothing down with it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.io import log


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    made = io.StringIO()
    monkeypatch.setattr(log, "_stream", made)
    return made


def test_a_line_has_time_level_event_and_fields(stream: io.StringIO) -> None:
    log.info("model_ready", model="qwen", seconds=2.1, slot=None)
    log.warning("odd")
    log.error("bad", reason="no space left")
    lines = stream.getvalue().splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{stamp} info event=model_ready model=qwen seconds=2\.100 slot=None", lines[0])
    assert re.fullmatch(rf"{stamp} warning event=odd", lines[1])
    assert re.fullmatch(rf'{stamp} error event=bad reason="no space left"', lines[2])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain-1.5/x", "plain-1.5/x"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "hi"', "\"say 'hi'\""),
        ("it's", '"it\'s"'),
        ("line\nbreak\r\t", r'"line\nbreak\r\t"'),
        ("\x1b[31mred", r'"\x1b[31mred"'),
        ("next\u2028line", r'"next\u2028line"'),
        ("stray \udcff", r'"stray \udcff"'),
        ("größe", "größe"),
        (True, "True"),
        (0.12345, "0.123"),
    ],
)
def test_values_are_quoted_when_they_must_be(value: object, shown: str) -> None:
    assert log.format_fields({"k": value}) == f"k={shown}"


@given(st.dictionaries(st.sampled_from("abc"), st.text() | st.floats() | st.binary() | st.none()))
def test_any_value_stays_on_one_printable_line(fields: dict[str, object]) -> None:
    text = log.format_fields(fields)
    assert text.isprintable() or not text
    assert len(text.splitlines()) <= 1


def test_ready_is_a_bare_line_and_a_log_line(stream: io.StringIO) -> None:
    log.ready("gossipd", incarnation=3)
    bare, line = stream.getvalue().splitlines()
    assert bare == "gossipd ready"
    assert line.endswith("info event=ready daemon=gossipd incarnation=3")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a Linux device")
def test_a_full_disk_takes_nothing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 (closing it fails, too)
    monkeypatch.setattr(log, "_stream", full)
    log.info("lost", text="x" * 10_000)
    log.ready("gossipd")
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_a_closed_stdout_takes_nothing_down(stream: io.StringIO) -> None:
    stream.close()
    log.error("lost")
    log.ready("gossipd")


def test_a_stdout_without_unicode_still_shows_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(log, "_stream", io.TextIOWrapper(raw, encoding="latin-1"))
    log.info("model", name="语言-größe")
    assert b"event=model name=\\u8bed\\u8a00-gr\\xf6\\xdfe\n" in raw.getvalue()


def test_a_flood_is_logged_at_each_doubling(stream: io.StringIO) -> None:
    once = log.LogOnce()
    for _ in range(100):
        once("key", "refused", reason="same")
    once("other", "refused", reason="other")
    counts = [int(text) for text in re.findall(r"count=(\d+)", stream.getvalue())]
    assert counts == [1, 2, 4, 8, 16, 32, 64, 1]


def test_a_flood_of_different_keys_is_bounded_in_memory() -> None:
    once = log.LogOnce(lambda event, **fields: None)
    for number in range(5000):
        once(str(number), "refused")
    assert len(once._counts) <= 1001
