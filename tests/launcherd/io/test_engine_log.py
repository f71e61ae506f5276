"""Engine logs stay small, private and readable."""

from __future__ import annotations

import os
from pathlib import Path

from services.launcherd.io.engine_log import KEPT_BYTES, TAIL_BYTES, log_tail, open_log, trim_log


def test_a_new_log_is_private_and_keeps_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "m.log"
    for text in (b"first", b"second"):
        descriptor = open_log(path)
        os.write(descriptor, text)
        os.close(descriptor)
    assert path.read_bytes() == b"second"
    assert path.with_name("m.log.1").read_bytes() == b"first"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_grew_too_long_goes_on_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    descriptor = open_log(path)
    os.write(descriptor, b"old line\n" * (2 * KEPT_BYTES // 9))
    assert not trim_log(path, limit_bytes=4 * KEPT_BYTES)
    assert trim_log(path, limit_bytes=KEPT_BYTES)
    os.write(descriptor, b"new line\n")
    os.close(descriptor)
    assert path.read_bytes() == b"new line\n", "the engine's descriptor appends: no hole"
    kept = path.with_name("m.log.1").read_bytes()
    assert KEPT_BYTES - 20 < len(kept) <= KEPT_BYTES
    assert kept.startswith(b"old line\n")
    assert path.with_name("m.log.1").stat().st_mode & 0o777 == 0o600


def test_trimming_a_log_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert not trim_log(tmp_path / "none.log")


def test_the_tail_is_the_last_lines_that_say_something(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(b"one\n\ntwo\r\n\xff\x1b[31mthree\n\n")
    assert log_tail(path, 2) == ("two", "\ufffd\ufffd[31mthree")
    assert log_tail(path, 10) == ("one", "two", "\ufffd\ufffd[31mthree")
    assert log_tail(path, 0) == ()
    assert log_tail(tmp_path / "none.log", 5) == ()


def test_the_tail_of_a_huge_log_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "m.log"
    path.write_bytes(b"x" * 10 * TAIL_BYTES + b"\n" + b"y" * 100 + b"\nend")
    assert log_tail(path, 5) == ("y" * 100, "end")
