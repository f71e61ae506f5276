"""The shape of the code, held by machine: who may import whom, which modules touch the world, how large they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("gossipd", "electiond", "tunneld", "launcherd", "proxyd", "meshctl")
CODE = sorted(path for top in ("services", "shared") for path in (ROOT / top).rglob("*.py"))
ALL_PYTHON = sorted(
    path for top in ("services", "shared", "tests", "docs") for path in (ROOT / top).rglob("*.py")
)
TOP_LEVEL = {"pyproject.toml", "services", "shared", "supervisord.conf", "bin", "tests", "docs"}
TOP_LEVEL_TEXTS = {"README.md", "LICENSE", "CHANGELOG.md"}

SHELL_NAMES = {"daemon.py", "__main__.py"}
SHELLS = {
    "services/meshctl": "a client: every command talks to sockets, files and the terminal",
    "services/launcherd/engine_server": "a process of its own: the embedded engine",
    "services/proxyd/keeper.py": "a process of its own: holds the listening sockets",
    "services/proxyd/worker.py": "a process of its own: proxyd's serving half",
    "shared/config.py": "reads mesh.toml; build_config beside it is pure",
    "shared/paths.py": "creates the state directories",
}
WORLD_MODULES = {
    "asyncio", "ctypes", "fcntl", "http", "httpx", "multiprocessing", "os", "psutil", "random", "secrets",
    "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time",
    "urllib.request", "uvicorn", "uvloop", "xmlrpc", "zmq",
}  # fmt: skip
GRAB_BAGS = {"util.py", "utils.py", "helpers.py", "helper.py", "common.py", "misc.py", "manager.py"}
MAX_LINES = 500


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_shell(path: Path) -> bool:
    name = relative(path)
    return (
        "/io/" in name
        or path.name in SHELL_NAMES
        or any(name == shell or name.startswith(shell + "/") for shell in SHELLS)
    )


def decides_nothing(path: Path) -> bool:
    """Declarations only: ids, errors, messages, protocols."""
    logic = ast.If | ast.IfExp | ast.For | ast.While | ast.Match | ast.Return | ast.Try
    return not any(isinstance(node, logic) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


CORES = [path for path in CODE if not is_shell(path) and path.name != "__init__.py"]


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything the module imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively; name the whole path"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_top_level_is_what_was_agreed() -> None:
    entries = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    generated = {name for name in entries if name.endswith(".egg-info")} | {"build", "dist"}
    assert entries - generated == TOP_LEVEL | TOP_LEVEL_TEXTS


@pytest.mark.parametrize("path", CODE, ids=relative)
def test_services_import_only_themselves_and_shared(path: Path) -> None:
    parts = relative(path).split("/")
    for name in imports_of(path):
        if name.split(".")[0] != "services":
            continue
        assert parts[0] == "services", f"{relative(path)} imports {name}: shared knows no service"
        assert name.split(".")[1] == parts[1], f"{relative(path)} imports {name}: services talk over the bus only"


CLOCKS = ("now", "today", "utcnow")
"""What asks ``datetime`` for the time; its types alone are arithmetic."""


@pytest.mark.parametrize("path", CORES, ids=relative)
def test_cores_ask_no_calendar(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS:
            assert ast.unparse(node.value).split(".")[-1] not in ("datetime", "date"), (
                f"{relative(path)}:{node.lineno} asks for the time: time is an argument of a core"
            )


@pytest.mark.parametrize("path", CORES, ids=relative)
def test_cores_touch_no_clock_socket_file_or_randomness(path: Path) -> None:
    names = imports_of(path)
    used = ({name.split(".")[0] for name in names} | {name.rpartition(".")[0] for name in names}) & WORLD_MODULES
    assert not used, f"{relative(path)} is a core and imports {sorted(used)}: move that into io/ or daemon.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "input", "print", "hash", "exec", "eval"), (
                f"{relative(path)}:{node.lineno} calls {node.func.id}()"
            )
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink"), (
                f"{relative(path)}:{node.lineno} touches a file: .{node.attr}"
            )


@pytest.mark.parametrize("path", ALL_PYTHON, ids=relative)
def test_no_module_is_over_the_limit(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{relative(path)} has {lines} lines; split it along a seam"


@pytest.mark.parametrize(
    "path", [path for path in CORES if not decides_nothing(path) and "/messages/" not in relative(path)], ids=relative
)
def test_every_core_has_a_mirrored_test(path: Path) -> None:
    inside = path.relative_to(ROOT / "services" if path.is_relative_to(ROOT / "services") else ROOT)
    folder = ROOT / "tests" / inside.parent
    found = list(folder.glob(f"test_{inside.stem}*.py"))
    assert found, f"{relative(path)} has no test at tests/{inside.parent}/test_{inside.stem}.py"


def test_no_grab_bag_modules() -> None:
    bags = [relative(path) for path in ALL_PYTHON if path.name in GRAB_BAGS]
    assert not bags


def test_every_message_is_documented() -> None:
    text = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    declared = [
        node.name
        for path in (ROOT / "shared" / "messages").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(mark, ast.Name) and mark.id == "message" for mark in node.decorator_list)
    ]
    missing = [name for name in declared if f"`{name}`" not in text]
    assert len(declared) > 30
    assert not missing, f"docs/messages.md does not mention {missing}"


def test_errors_are_never_swallowed_silently() -> None:
    for path in CODE:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*except\s*:", text, re.MULTILINE), f"{relative(path)} has a bare except"
        assert not re.search(r"except (Base)?Exception\s*:\s*\n\s*pass", text), f"{relative(path)} swallows everything"


def test_nothing_is_left_to_do() -> None:
    for path in (*CODE, *(ROOT / "bin").iterdir()):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        found = re.search(r"TODO|FIXME|XXX|NotImplementedError", text)
        assert not found, f"{relative(path)} says {found.group() if found else ''}"


def test_tests_wait_on_conditions_and_never_sleep_for_long() -> None:
    pattern = re.compile(r"\b(time|asyncio)\.sleep\((0\.[1-9]|[1-9])")
    for path in (ROOT / "tests").rglob("*.py"):
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{relative(path)} sleeps: {found.group() if found else ''}"
