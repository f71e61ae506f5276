"""services.meshctl.up: the first line must work when it is pasted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from services.meshctl.node import Node
from services.meshctl.up import changes_of, engine_changes, first_lines, up
from shared.errors import ConfigError
from shared.io.keys_file import create_key, revoke_key
from shared.node_status import Addresses
from shared.status_view import build_status


def test_the_curl_has_a_key_only_while_one_is_asked_for(mesh_home: Path) -> None:
    node = Node({"MESH_HOME": str(mesh_home)})
    view = dataclasses.replace(build_status({}, {}, ()), addresses=Addresses(api="http://127.0.0.1:9"))
    assert "Authorization" not in first_lines(node, view)[0]
    key, _secret = create_key(node.paths.keys_file, "laptop")
    assert "Authorization" in first_lines(node, view)[0]
    revoke_key(node.paths.keys_file, key.id)
    assert "Authorization" not in first_lines(node, view)[0], "the file stays, without a key in it"


def test_a_client_is_told_what_it_is(mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").write_text("[node]\nclient = true\n")
    node = Node({"MESH_HOME": str(mesh_home)})
    view = dataclasses.replace(build_status({}, {}, ()), addresses=Addresses(api="http://127.0.0.1:9"))
    lines = first_lines(node, view)
    assert "/v1/models" in lines[0]
    assert lines[1] == "This node is a client, it serves nothing itself; no other node serves a model yet"


def test_client_is_written_only_when_it_is_said(mesh_home: Path) -> None:
    node = Node({"MESH_HOME": str(mesh_home)})
    assert changes_of(node, (), ()) == {}
    assert changes_of(node, (), (), client=True) == {("node", "client"): True}
    assert changes_of(node, (), (), client=False) == {("node", "client"): False}


def test_a_client_serves_no_model(mesh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_HOME", str(mesh_home))
    with pytest.raises(click.UsageError, match="serves nothing"):
        CliRunner().invoke(up, ["--client", "--model", "m"], standalone_mode=False, catch_exceptions=False)
    assert not (mesh_home / "mesh.toml").exists()


def test_options_for_llama_cpp_are_written_where_they_belong() -> None:
    """docs/spec/options.md 1: the command line's `--ctx-size`, `--llamacpp-args`, `--llamacpp-backend`."""
    assert engine_changes(None, None, None) == {}
    assert engine_changes(0, "", "") == {
        ("engine", "context_tokens"): 0,
        ("engine", "extra_args"): [],
        ("engine", "backend"): "",
    }
    assert engine_changes(8192, "--mlock --chat-template 'a b'", "vulkan") == {
        ("engine", "context_tokens"): 8192,
        ("engine", "extra_args"): ["--mlock", "--chat-template", "a b"],
        ("engine", "backend"): "vulkan",
    }
    with pytest.raises(ConfigError, match=r"--llamacpp-args = .* a quotation mark is not closed"):
        engine_changes(None, "--x 'a", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--llamacpp-args", "--port 1"], "--port: meshd chooses where the engine listens"),
        (["--llamacpp-backend", "vulkn"], "known are embedded, path"),
    ],
)
def test_what_the_daemons_would_refuse_is_refused_before_anything_is_written(
    mesh_home: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    """docs/spec/options.md 7: options that meshd owns are refused."""
    monkeypatch.setenv("MESH_HOME", str(mesh_home))
    with pytest.raises((ConfigError, click.BadParameter)) as refused:
        CliRunner().invoke(up, words, standalone_mode=False, catch_exceptions=False)
    assert said in str(refused.value)
    assert not (mesh_home / "mesh.toml").exists()
