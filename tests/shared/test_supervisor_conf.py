"""shared.supervisor_conf: the repository's file is what the code renders, and supervisord reads it as meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from supervisor.options import ServerOptions

from shared.errors import StateError
from shared.paths import REPOSITORY, NodePaths
from shared.supervisor_conf import DEFAULT, STOP_ORDER, layout_of, render


def parsed(conf: Path, monkeypatch: pytest.MonkeyPatch) -> ServerOptions:
    monkeypatch.setattr(sys, "argv", ["supervisord"])
    options = ServerOptions()
    options.realize(args=["-c", str(conf)])
    options.process_config()
    return options


def test_the_repositorys_file_is_the_default_rendered() -> None:
    """A change of either must change both: python -c 'from shared.supervisor_conf import *; print(render(DEFAULT))'."""
    assert (REPOSITORY / "supervisord.conf").read_text() == render(DEFAULT)


def test_the_folder_supervisord_needs_is_committed() -> None:
    """supervisord refuses to start when a log directory does not exist, and a fresh machine has no ~/.mesh."""
    assert (REPOSITORY / ".run" / ".gitignore").is_file()


def test_every_command_of_the_default_is_an_executable_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(REPOSITORY / "supervisord.conf", monkeypatch)
    commands = {p.name: p.command for group in options.process_group_configs for p in group.process_configs}
    assert set(commands) == {*STOP_ORDER, "keeper"}
    for name, command in commands.items():
        assert command == f'"{REPOSITORY}/bin/{name}"'
        assert os.access(REPOSITORY / "bin" / name, os.X_OK)


def test_proxyd_stops_first_tunneld_after_the_daemons_and_the_keeper_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """supervisord stops groups in descending order of priority, one after another."""
    options = parsed(REPOSITORY / "supervisord.conf", monkeypatch)
    order = sorted(options.process_group_configs, key=lambda group: -int(group.priority))
    assert [group.name for group in order] == ["proxyd", "launcherd", "electiond", "gossipd", "tunneld", "keeper"]


def test_a_rendered_file_keeps_home_and_ports_and_survives_awkward_paths(
    mesh_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = mesh_home / "a b,c"
    (home / "logs").mkdir(parents=True)
    (home / "run").mkdir()
    paths = NodePaths(home)
    layout = layout_of(paths, {"MESH_API_PORT": "0", "MESH_ENGINE": "/opt/a, b=c/llama-server", "HOME": "/root"})
    paths.supervisor_conf.write_text(render(layout))
    options = parsed(paths.supervisor_conf, monkeypatch)
    environment = options.configroot.supervisord.environment
    assert environment == {
        "MESH_HOME": str(home),
        "MESH_API_PORT": "0",
        "MESH_ENGINE": "/opt/a, b=c/llama-server",
        "MESH_SUPERVISOR_CONF": str(paths.supervisor_conf),
        "MESH_LOG_DIR": str(paths.logs),
    }
    assert options.logfile == str(paths.logs / "supervisord.log")


@pytest.mark.parametrize("name", ['qu"ote', "semi;colon", "ha#sh", "per%cent", "new\nline"])
def test_a_path_supervisord_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(StateError, match="cannot hold"):
        layout_of(NodePaths(Path("/tmp") / name), {})


def test_a_home_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(StateError, match="MESH_HOME"):
        layout_of(NodePaths(Path("/tmp") / ("x" * 90)), {})


def test_a_shim_runs_its_module_from_anywhere(tmp_path: Path) -> None:
    """Through a symlink, from a folder with misleading modules, with nothing in the environment."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('wrong services')")
    link = tmp_path / "my-meshctl"
    link.symlink_to(REPOSITORY / "bin" / "meshctl")
    ran = subprocess.run(
        [str(link), "--help"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert ran.returncode == 0, ran.stderr
    assert "status" in ran.stdout
