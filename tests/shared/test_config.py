"""``mesh.toml`` and ``MESH_*``: every rule, and what a person is told when one is broken."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shared.config import (
    ENVIRONMENT,
    SECTIONS,
    NodeConfig,
    advertised,
    build_config,
    changed_keys,
    is_loopback,
    load_config,
    parse_limits,
)
from shared.errors import ConfigError


def built(document: dict[str, Any] | None = None, **environ: str) -> NodeConfig:
    return build_config(document or {}, environ, source="mesh.toml", configured=True)


def refusal(document: dict[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        built(document, **environ)
    return caught.value.detail


def test_without_a_file_the_node_is_idle(tmp_path: Path) -> None:
    config = load_config(tmp_path / "mesh.toml", {})
    assert config == NodeConfig()
    assert not config.configured


def test_an_empty_file_configures_the_node(tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text("")
    assert load_config(tmp_path / "mesh.toml", {}) == NodeConfig(configured=True)


def test_every_section_and_key_of_the_dataclasses_can_be_set() -> None:
    """Whatever is declared is reachable from the file, with its own default as value."""
    document = {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(cls()).items()}
        for name, cls in SECTIONS.items()
    }
    assert built(document) == NodeConfig(configured=True)


def test_values_arrive_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text(
        '[node]\nname = "desk"\n[models]\nserve = ["qwen"]\nmax_loaded_models = [5, 2, 4]\n'
        "[api]\nport = 8000\nallow_public_without_keys = true\n"
    )
    config = load_config(tmp_path / "mesh.toml", {})
    assert config.node.name == "desk"
    assert config.models.serve == ("qwen",)
    assert config.models.max_loaded_models == (5, 2, 4)
    assert config.api.port == 8000
    assert config.api.allow_public_without_keys is True


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    assert refusal({"api": {"prot": 1}}) == "mesh.toml: unknown key api.prot; did you mean port?"
    assert "known: host, port" in refusal({"mesh": {"zzzzzz": 1}})


def test_an_unknown_section_names_the_nearest_known_one() -> None:
    assert refusal({"modles": {}}) == "mesh.toml: unknown section [modles]; did you mean models?"


@pytest.mark.parametrize("value", [5, "x", [{"port": 1}]], ids=repr)
def test_a_section_must_be_a_table(value: Any) -> None:
    assert "[api] must be a section" in refusal({"api": value})


@pytest.mark.parametrize("name", ["api", "console", "mesh"])
def test_ports_are_0_to_65535(name: str) -> None:
    assert getattr(built({name: {"port": 0}}), name).port == 0
    assert getattr(built({name: {"port": 65535}}), name).port == 65535
    for port in (-1, 65536):
        assert refusal({name: {"port": port}}).startswith(f"mesh.toml: {name}.port = {port}: ")


@pytest.mark.parametrize(("one", "other"), [("api", "console"), ("api", "mesh"), ("console", "mesh")])
def test_no_two_services_share_a_port(one: str, other: str) -> None:
    """The mesh port is TCP as well."""
    assert "must differ" in refusal({one: {"port": 4000}, other: {"port": 4000}})
    built({one: {"port": 0}, other: {"port": 0}})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "localhost"])
def test_hosts_are_addresses_or_localhost(host: str) -> None:
    for name in ("api", "console", "mesh"):
        assert getattr(built({name: {"host": host}}), name).host == host


@pytest.mark.parametrize("host", ["", "example.com", "300.1.1.1", "*"])
def test_other_hosts_are_refused(host: str) -> None:
    assert "give an IP address" in refusal({"api": {"host": host}})


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (1, (1,)),
        (-1, (-1,)),
        ("5", (5,)),
        ("5 2 4", (5, 2, 4)),
        ("5,2,4", (5, 2, 4)),
        ("5, 2,  4", (5, 2, 4)),
        ([5, 2, 4, -1, 1], (5, 2, 4, -1, 1)),
    ],
    ids=repr,
)
def test_limits_are_one_number_or_a_list(value: Any, limits: tuple[int, ...]) -> None:
    assert parse_limits(value, source="test") == limits
    assert built({"models": {"max_loaded_models": value}}).models.max_loaded_models == limits


@pytest.mark.parametrize(
    "value", [0, -2, "", "5 0", "5 -2", "five", "1 2 3 4 5 6", [], [1] * 6, True, 1.5, [True]], ids=repr
)
def test_wrong_limits_are_refused_with_the_rule(value: Any) -> None:
    said = refusal({"models": {"max_loaded_models": value}})
    assert "llm embedding reranking audio image" in said
    assert "-1 (no limit) or at least 1" in said


def test_one_limit_holds_for_every_type_and_a_list_falls_back_to_1() -> None:
    assert built({"models": {"max_loaded_models": 3}}).slot_limit("image") == 3
    several = built({"models": {"max_loaded_models": "5 2 -1"}})
    assert [several.slot_limit(type) for type in ("llm", "embedding", "reranking", "audio", "image")] == [
        5,
        2,
        -1,
        1,
        1,
    ]  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", sorted(ENVIRONMENT))
def test_a_variable_overrides_the_file(variable: str) -> None:
    section, key = ENVIRONMENT[variable]
    in_file, in_variable, expected = {
        "port": (4001, "4002", 4002),
        "host": ("0.0.0.0", "127.0.0.2", "127.0.0.2"),
        "max_loaded_models": (1, "5,2", (5, 2)),
        "path": ("/a", "/b", "/b"),
        "context_tokens": (1, "2", 2),
        "extra_args": (["--a"], "--b 'c d'", ("--b", "c d")),
        "backend": ("path", "embedded", "embedded"),
        "download_stall_seconds": (1, "2", 2.0),
    }[key]
    config = built({section: {key: in_file}}, **{variable: in_variable})
    assert getattr(getattr(config, section), key) == expected
    assert getattr(getattr(built({section: {key: in_file}}, **{variable: ""}), section), key) != expected


def test_a_wrong_variable_is_blamed_by_its_name() -> None:
    assert refusal(MESH_API_PORT="http").startswith("MESH_API_PORT (for api.port) = 'http': ")
    assert refusal(MESH_PORT="99999").startswith("MESH_PORT (for mesh.port) = 99999: ")
    assert refusal(MESH_HOST="nowhere").startswith("MESH_HOST (for mesh.host) = 'nowhere': ")
    assert refusal(MESH_MAX_LOADED_MODELS="0").startswith("MESH_MAX_LOADED_MODELS: ")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("api", "port", True),
        ("api", "allow_public_without_keys", 1),
        ("api", "allow_public_without_keys", "true"),
        ("node", "cpu_share", False),
        ("engine", "extra_args", True),
        ("api", "port", "web"),
        ("api", "port", 1.5),
        ("node", "name", 5),
        ("models", "serve", "qwen"),
        ("models", "folders", [1]),
        ("models", "serve", [True]),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(section: str, key: str, value: Any) -> None:
    said = refusal({section: {key: value}})
    assert said.startswith(f"mesh.toml: {section}.{key} = {value!r}: ")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("node", "max_vram_bytes", -1),
        ("node", "reserve_bytes", -5),
        ("engine", "threads", -1),
        ("engine", "context_tokens", -1),
        ("engine", "gpu_layers", -2),
        ("engine", "parallel", 0),
        ("engine", "queue_limit", 0),
        ("engine", "hang_seconds", -0.1),
        ("engine", "readiness_seconds", float("nan")),
        ("api", "request_wait_seconds", float("inf")),
        ("api", "max_body_bytes", 0),
        ("node", "cpu_share", 0.01),
        ("node", "cpu_share", 1.01),
        ("node", "cpu_share", float("nan")),
    ],
)
def test_numbers_out_of_range_are_refused_with_their_place(section: str, key: str, value: float) -> None:
    assert f"mesh.toml: {section}.{key} = {value}: " in refusal({section: {key: value}})


def test_bad_toml_names_the_file_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    for text in ("[api\nport = 1", "port = = 1", "x = " + "[" * 5000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"mesh\.toml is not valid TOML"):
            load_config(path, {})
    path.write_text("[api]\nport = ?")
    with pytest.raises(ConfigError, match="line 2"):
        load_config(path, {})


def test_an_unreadable_file_is_not_an_idle_node(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(path, {})
    path.rmdir()
    path.write_bytes(b'[node]\nname = "\xff"\n')
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(path, {})


def test_changed_keys_are_dotted_and_complete() -> None:
    old = built()
    new = built({"api": {"port": 1}, "models": {"serve": ["x"], "folders": ["~/.models"]}})
    assert changed_keys(old, new) == ("models.serve", "api.port")
    assert changed_keys(new, new) == ()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_model_folders_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert built().model_folders() == (Path("/somewhere/.models"),)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("name.example", ("name.example", None)),
        ("name.example:9340", ("name.example", 9340)),
        ("203.0.113.7", ("203.0.113.7", None)),
        ("[2001:db8::1]:9340", ("2001:db8::1", 9340)),
        ("[2001:db8::1]", ("2001:db8::1", None)),
        ("2001:db8::1", None),
        ("name:0", None),
        ("name:70000", None),
        ("http://name", None),
        ("[name]:1", None),
        ("", None),
    ],
)
def test_an_advertised_place(place: str, expected: tuple[str, int | None] | None) -> None:
    assert advertised(place) == expected


def test_a_place_nobody_could_dial_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.advertise: 'http://x' is no place .* write HOST or HOST:PORT"):
        built({"mesh": {"advertise": ["http://x"]}})
    with pytest.raises(ConfigError, match=r"mesh\.transport = 'udp'"):
        built({"mesh": {"transport": "udp"}})


def test_recipes_are_added_and_changed_by_sections() -> None:
    """docs/spec/recipes.md 5: `[recipes.NAME]` adds a recipe, or changes the keys it names of one that is built in."""
    own = {
        "program": "/opt/x",
        "arguments": ["--port", "{port}"],
        "endpoints": ["/v1/embeddings"],
        "processors": ["npu"],
    }
    config = built({"recipes": {"mine": own, "flm": {"program": "/opt/flm"}}})
    assert config.recipes["mine"].types == ("embedding",)
    assert config.recipes["mine"].processors == {"npu"}
    assert config.recipes["flm"].program == "/opt/flm"
    assert config.recipes["llamacpp"] == built().recipes["llamacpp"]
    assert changed_keys(built(), config) == ("recipes.flm", "recipes.mine")


def test_a_recipe_that_cannot_work_is_refused_with_its_place() -> None:
    """docs/spec/recipes.md 6: a recipe that could not start, listen or be asked is refused when it is read."""
    assert refusal({"recipes": {"mine": {"programm": "x"}}}) == (
        "mesh.toml: unknown key recipes.mine.programm; did you mean program?"
    )
    assert refusal({"recipes": {"flm": {"processors": ["tpu"]}}}).startswith(
        "mesh.toml: recipes.flm.processors = ['tpu']"
    )
    assert "do not say which port" in refusal({"recipes": {"flm": {"arguments": ["serve"], "type_arguments": {}}}})
    assert "write [recipes.NAME]" in refusal({"recipes": {"mine": 1}})
    assert "did you mean recipes?" in refusal({"recipe": {}})


def test_named_builds_of_llama_cpp() -> None:
    """docs/spec/options.md: a build is `embedded`, `path` or a name of `engine.backends`."""
    engine = built({"engine": {"backends": {"vulkan": "/opt/v/llama-server"}, "backend": "vulkan"}}).engine
    assert engine.backend_names == ("embedded", "path", "vulkan")
    assert refusal({"engine": {"backend": "vulkan"}}).endswith("'vulkan': known are embedded, path")
    assert refusal(MESH_LLAMACPP_BACKEND="rocm").startswith("MESH_LLAMACPP_BACKEND (for engine.backend) = 'rocm'")
    assert "which mean something already" in refusal({"engine": {"backends": {"path": "/x"}}})
    assert "engine.backends.a is empty" in refusal({"engine": {"backends": {"a": ""}}})


def test_options_of_the_environment_win_over_the_file() -> None:
    """docs/spec/options.md 1: command line, then environment, then mesh.toml."""
    engine = built(
        {"engine": {"context_tokens": 1, "extra_args": ["--x"]}},
        MESH_CTX_SIZE="8192",
        MESH_LLAMACPP_ARGS="--chat-template 'a b' --mlock",
    ).engine
    assert engine.context_tokens == 8192
    assert engine.extra_args == ("--chat-template", "a b", "--mlock")
    assert refusal(MESH_CTX_SIZE="many").startswith("MESH_CTX_SIZE (for engine.context_tokens) = 'many'")
    assert refusal(MESH_LLAMACPP_ARGS="--x 'a") == 'MESH_LLAMACPP_ARGS = "--x \'a": a quotation mark is not closed'
    assert refusal(MESH_LLAMACPP_ARGS="--port 1").startswith(
        "MESH_LLAMACPP_ARGS (for engine.extra_args): not to be given"
    )
    assert "mesh.toml: engine.extra_args: not to be given" in refusal({"engine": {"extra_args": ["-m", "x"]}})
