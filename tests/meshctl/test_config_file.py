"""services.meshctl.config_file: settings change, everything else the owner wrote stays."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from services.meshctl.config_file import edited, override_variables, parse_setting, sources, update_config
from shared.config import OVERRIDDEN_NAME, NodeConfig, heeded, load_config
from shared.errors import ConfigError
from tests.meshctl.conftest import Meshctl

OWNERS = """\
# my node

[api]   # the port is taken on this machine
port = 9438 # not 9337

[models]
folders = [
  "~/.models",   # mine
  "/srv/models", # ours
]
"""


def test_comments_order_and_spacing_survive() -> None:
    text, changed = edited(OWNERS, {("models", "serve"): ["qwen"], ("api", "port"): 9439}, source="f")
    assert text == OWNERS.replace("port = 9438", "port = 9439") + 'serve = ["qwen"]\n'
    assert changed == ("models.serve", "api.port")


def test_the_same_value_changes_nothing() -> None:
    assert edited(OWNERS, {("api", "port"): 9438}, source="f") == (OWNERS, ())


def test_a_new_file_is_valid_private_and_configures_the_node(tmp_path: Path) -> None:
    path = tmp_path / "home" / "mesh.toml"
    assert update_config(path, {}, {("models", "serve"): ["a"]}) == ("models.serve",)
    config = load_config(path, {})
    assert (config.configured, config.models.serve, config.models.folders) == (True, ("a",), ("~/.models",))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("[api\nport = 1", {}, "not valid TOML"),
        ("[apii]\nport = 1", {}, "did you mean api"),
        ("[api]\nprot = 1", {}, "did you mean port"),
        ("", {("api", "port"): 70_000}, "0 \\(any free one\\) to 65535"),
        ("api = 3\n", {("api", "port"): 1}, "must be a section"),
    ],
)
def test_what_the_daemons_would_refuse_is_not_written(
    tmp_path: Path, text: str, changes: dict[tuple[str, str], Any], words: str
) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        update_config(path, {}, changes)
    assert path.read_text() == text
    assert [item for item in os.listdir(tmp_path) if item.endswith(str(os.getpid()))] == []


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.toml"
    real.write_text(OWNERS)
    path = tmp_path / "mesh.toml"
    path.symlink_to(real)
    update_config(path, {}, {("api", "port"): 1})
    assert path.is_symlink()
    assert "port = 1 #" in real.read_text()


def test_two_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    keys = ["port", "request_wait_seconds", "silent_wait_seconds", "max_body_bytes"]
    threads = [threading.Thread(target=update_config, args=(path, {}, {("api", key): 77})) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    api = load_config(path, {}).api
    assert [getattr(api, key) for key in keys] == [77, 77, 77, 77]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("api.port", "9437", 9437),
        ("node.cpu_share", "0.5", 0.5),
        ("node.name", "desk", "desk"),
        ("api.allow_public_without_keys", "true", True),
        ("models.folders", "~/.models,/srv", ["~/.models", "/srv"]),
        ("engine.extra_args", '["--flash-attn", "a,b"]', ["--flash-attn", "a,b"]),
        ("engine.extra_args", "--x on --template 'a b'", ["--x", "on", "--template", "a b"]),
        ("engine.backends", '{ cpu = "/opt/llama-server" }', {"cpu": "/opt/llama-server"}),
        ("models.serve", "", []),
        ("models.max_loaded_models", "5 2 4", [5, 2, 4]),
        ("models.max_loaded_models", "-1", -1),
    ],
)
def test_settings_are_parsed_by_their_type(key: str, text: str, value: object) -> None:
    section, _, name = key.partition(".")
    assert parse_setting(key, text) == ((section, name), value)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("api.port", "many", "api.port is a whole number, not 'many'"),
        ("api.allow_public_without_keys", "1", "true or false"),
        ("api.prot", "1", "did you mean api.port"),
        ("folders", "x", "did you mean models.folders"),
        ("models.serve", "[unclosed", "a list like"),
        ("engine.extra_args", "--x 'a", "config set = .* a quotation mark is not closed"),
        ("models.max_loaded_models", "0", "config set: models.max_loaded_models = '0': .* at least 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(key: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", "\\[")):
        parse_setting(key, text)


def test_every_setting_knows_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(OWNERS)
    config, origins = sources(path, {"MESH_CONSOLE_PORT": "0"})
    assert config.console.port == 0
    assert (origins["api.port"], origins["console.port"], origins["mesh.port"]) == (
        "mesh.toml",
        "MESH_CONSOLE_PORT",
        "default",
    )


def test_the_command_line_overrides_variables_for_this_start(tmp_path: Path) -> None:
    """docs/spec/options.md 3: what the command line says counts more than the variable for the same option as long as
    this start of the node lasts, also when it is given to a running node. The next start heeds the variable again."""
    path, environ = tmp_path / "mesh.toml", {"MESH_CTX_SIZE": "111", "MESH_LLAMACPP_BACKEND": "embedded", "X": "1"}
    path.write_text("[engine]\ncontext_tokens = 222\n")
    assert override_variables(path, {("models", "serve"): ["a"]}, starts=True) == ()
    assert load_config(path, environ).engine.context_tokens == 111
    assert override_variables(path, {("engine", "context_tokens"): 222}, starts=False) == ("MESH_CTX_SIZE",)
    assert load_config(path, environ).engine.context_tokens == 222
    assert load_config(path, environ).engine.backend == "embedded"
    assert sources(path, environ)[1]["engine.context_tokens"] == "mesh.toml"
    override_variables(path, {("engine", "backend"): ""}, starts=False)
    assert heeded(path, environ) == {"X": "1"}
    assert override_variables(path, {("engine", "backend"): ""}, starts=True) == ("MESH_LLAMACPP_BACKEND",)
    assert load_config(path, environ).engine.context_tokens == 111
    override_variables(path, {}, starts=True)
    assert heeded(path, environ) == environ


@pytest.mark.parametrize("text", ["", "{", "1", "[[]]"])
def test_a_broken_record_of_the_command_line_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / OVERRIDDEN_NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"command_line.json: .* with 'meshctl up'"):
        load_config(tmp_path / "mesh.toml", {})
    override_variables(tmp_path / "mesh.toml", {}, starts=True)
    assert load_config(tmp_path / "mesh.toml", {}) == NodeConfig()


def test_show_has_builds_and_the_recipes_that_mesh_toml_adds(meshctl: Meshctl, mesh_home: Path) -> None:
    (mesh_home / "mesh.toml").write_text(
        '[engine]\nbackends = { cpu = "/opt/cpu" }\n[recipes.mine]\nprogram = "x"\nprocessors = ["npu", "gpu"]\n'
        'arguments = ["--port", "{port}"]\nendpoints = ["/v1/chat/completions"]\n[recipes.flm]\nprogram = "/opt/flm"\n'
    )
    shown = meshctl("config", "show").out
    assert 'backends = {cpu = "/opt/cpu"}' in shown
    assert '[recipes.flm]\nprogram = "/opt/flm"\n[recipes.mine]\nprogram = "x"\n' in shown
    assert 'processors = ["gpu", "npu"]' in shown
    rows = meshctl("config", "show", "--json").json()
    assert rows["recipes.mine.arguments"] == {"value": ["--port", "{port}"], "source": "mesh.toml"}
    assert meshctl("config", "show", "engine.backends").out == '{cpu = "/opt/cpu"}\n'
    assert [key for key in rows if key.startswith("recipes.flm")] == ["recipes.flm.program"]
