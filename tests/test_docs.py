"""What the documents promise exists: every file, test and command that they name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import SECTIONS, load_config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = [path for top in ("services", "shared", "tests", "bin") for path in (ROOT / top).rglob("*") if path.is_file()]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_files_and_tests_that_a_document_names_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:docs|tests|services|shared|bin)/[\w./-]+)`", text)
    named += re.findall(r"\]\((?!https?:)([\w./-]+?)(?:#[\w-]+)?\)", text)
    for name in named:
        assert (ROOT / name).exists() or (path.parent / name).exists(), f"{relative(path)} names {name}"


def test_documents_that_the_code_names_exist() -> None:
    for path in CODE:
        if path.suffix not in (".py", ".sh", ".toml", ""):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|toml|gguf)\b", text):
            assert (ROOT / name).exists(), f"{relative(path)} names {name}"


def test_every_meshctl_command_in_the_documents_is_one() -> None:
    known = subprocess.run(
        [sys.executable, "-m", "services.meshctl", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    commands = set(re.findall(r"^  ([a-z]+) ", known, re.MULTILINE))
    assert len(commands) > 15
    for path in DOCUMENTS:
        for word in re.findall(r"meshctl ([a-z]+)\b", path.read_text(encoding="utf-8")):
            assert word in commands, f"{relative(path)} shows 'meshctl {word}'"


def test_the_example_configuration_is_valid_and_complete(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    found = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert found
    file = tmp_path / "mesh.toml"
    file.write_text(found[1])
    assert load_config(file, {}).configured
    for section, cls in SECTIONS.items():
        for field in cls.__dataclass_fields__:
            assert re.search(rf"^{field} = ", found[1], re.MULTILINE), f"operating.md does not show {section}.{field}"
