"""bin/quickstart: to a chat answer, again in seconds, and clear words where it can't."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from shared.paths import REPOSITORY
from tests.processes.node import Node, private_home

QUESTION = "How do I add my own model?"


def test_it_ends_in_the_guides_answer_and_what_next_and_does_so_again_on_the_same_node() -> None:
    entries = tomllib.loads((REPOSITORY / "docs/guide/questions.toml").read_text())["question"]
    answer = next(entry["answer"] for entry in entries if QUESTION in entry["ask"])
    assert next(entry for entry in entries if entry["answer"] == answer)["canonical"]
    with private_home() as home:
        node = Node(home, environment={"HOME": str(home), "PIP_INDEX_URL": "http://127.0.0.1:9/"})
        try:
            pids = set()
            for _ in range(2):
                ran = subprocess.run(
                    [str(REPOSITORY / "bin" / "quickstart")],
                    env=node.env(), capture_output=True, text=True, timeout=120, check=False,
                )  # fmt: skip
                assert ran.returncode == 0, ran.stdout + ran.stderr
                assert f"-- asking it: {QUESTION}\n{answer}\n" in ran.stdout
                after = ran.stdout.partition("What next:\n")[2].splitlines()
                assert len(after) == 5
                assert f"{node.api}/v1" in after[2]
                pids.add(node.pid("proxyd"))
            assert len(pids) == 1
        finally:
            node.down()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A fresh machine: a clone without ``.venv``, and a PATH of its own in ``path/``."""
    (tmp_path / "clone" / "bin").mkdir(parents=True)
    for name in ("bin/quickstart", "bin/setup.sh", "bin/meshctl", "bin/shim.sh", "pyproject.toml"):
        shutil.copy2(REPOSITORY / name, tmp_path / "clone" / name)
    (tmp_path / "path").mkdir()
    for tool in ("sh", "sed", "dirname", "cksum", "cat", "rm", "cp", "chmod", "mkdir", "readlink"):
        found = shutil.which(tool)
        assert found
        (tmp_path / "path" / tool).symlink_to(found)
    return tmp_path


def python(machine: Path, script: str) -> None:
    for name in ("python3", "python3.11"):
        path = machine / "path" / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)


def quickstart(machine: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(machine / "clone" / "bin" / "quickstart"), *words],
        env={"PATH": str(machine / "path"), "HOME": str(machine)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_a_python_that_is_too_old(machine: Path) -> None:
    python(machine, 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac\n')
    ran = quickstart(machine)
    assert ran.returncode == 1
    assert "needs Python 3.11 or newer; found: Python 3.9.2" in ran.stderr
    assert "apt install python3" in ran.stderr


def test_no_python_at_all(machine: Path) -> None:
    ran = quickstart(machine)
    assert ran.returncode == 1
    assert "needs Python 3.11 or newer" in ran.stderr


def test_no_venv_module(machine: Path) -> None:
    python(machine, 'case "$1" in --version) echo Python 3.12.1;; -c) exit 0;; *) exit 1;; esac\n')
    ran = quickstart(machine)
    assert ran.returncode == 1
    assert "apt install python3-venv" in ran.stderr


def test_no_package_index(machine: Path) -> None:
    """The environment is made, pip fails in it."""
    made = machine / "clone" / ".venv" / "bin"
    inside = 'case "$*" in *"pip install"*) echo no index >&2; exit 1;; "- "*) exit 1;; *) exit 0;; esac'
    python(
        machine,
        'case "$*" in --version) echo Python 3.12.1;; -c*) exit 0;;\n'
        f"'-m venv'*) mkdir -p {made}; printf '#!/bin/sh\\n%s\\n' '{inside}' >{made}/python; "
        f"chmod +x {made}/python;; *) exit 1;; esac\n",
    )
    ran = quickstart(machine)
    assert ran.returncode == 1
    assert "could not be installed. Is the package index reachable?" in ran.stderr
    assert not (machine / "clone" / ".venv" / ".meshd-run").exists()


def test_arguments_are_refused(machine: Path) -> None:
    assert quickstart(machine, "--fast").returncode == 2
    assert "chat answer" in quickstart(machine, "--help").stdout
