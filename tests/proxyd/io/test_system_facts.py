"""What the operating system says of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.proxyd.io import system_facts


def test_this_machine() -> None:
    facts = system_facts.read_system_facts()
    assert facts.threads >= facts.cores >= 0
    assert facts.threads == os.cpu_count()
    assert facts.memory_bytes > 2**28
    assert facts.os_version
    assert facts.architecture


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD Ryzen AI 9 HX 375\nflags\t: a\n", "AMD Ryzen AI 9 HX 375"),
        ("processor\t: 0\nHardware\t: BCM2835\n", "BCM2835"),
    ],
)
def test_the_processors_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(text)
    monkeypatch.setattr(system_facts, "CPU_FILE", str(file))
    assert system_facts.read_system_facts().processor == name


def test_without_that_file_the_rest_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_facts, "CPU_FILE", str(tmp_path / "none"))
    assert system_facts.read_system_facts().threads
