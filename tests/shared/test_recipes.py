"""The eight recipes, and those that a node's owner adds. Rules quoted from docs/spec/recipes.md."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.inference_paths import INFERENCE_PATHS
from shared.messages.models import MODEL_TYPES
from shared.recipes import (
    BUILTIN_RECIPES,
    PLACEHOLDERS,
    RECIPE_KEYS,
    Recipe,
    changed_recipe,
    filled,
    processors_of,
)

OWN: dict[str, Any] = {
    "program": "my-server",
    "arguments": ("--file", "{model}", "--listen", "{host}:{port}"),
    "endpoints": ("/v1/chat/completions",),
}


def test_the_eight_recipes_and_their_processors() -> None:
    """1. The recipes are llamacpp, oga-hybrid, oga-npu, oga-cpu, ryzenai-llm, flm, whispercpp and sd-cpp.

    2. They compute on: llamacpp GPU; oga-hybrid GPU and NPU; oga-npu, ryzenai-llm, flm NPU; oga-cpu CPU; whispercpp
    and sd-cpp GPU.
    """
    assert {name: set(recipe.processors) for name, recipe in BUILTIN_RECIPES.items()} == {
        "llamacpp": {"gpu"},
        "oga-hybrid": {"gpu", "npu"},
        "oga-npu": {"npu"},
        "oga-cpu": {"cpu"},
        "ryzenai-llm": {"npu"},
        "flm": {"npu"},
        "whispercpp": {"gpu"},
        "sd-cpp": {"gpu"},
    }
    assert all(name == recipe.name for name, recipe in BUILTIN_RECIPES.items())


def test_gpu_alone_is_the_cpu_on_a_machine_without_one() -> None:
    """3. A recipe of the GPU alone computes on the CPU where launcherd finds no GPU; the NPU stays what it is."""
    assert processors_of(BUILTIN_RECIPES["whispercpp"], "cpu") == ("cpu",)
    assert processors_of(BUILTIN_RECIPES["whispercpp"], "Radeon 8060S") == ("gpu",)
    assert processors_of(BUILTIN_RECIPES["flm"], "cpu") == ("npu",)
    assert processors_of(BUILTIN_RECIPES["oga-cpu"], "Radeon 8060S") == ("cpu",)
    assert processors_of(BUILTIN_RECIPES["oga-hybrid"], "cpu") == ("gpu", "npu")


def test_endpoints_say_the_types() -> None:
    """4. The types that a recipe serves are those of the inference paths it answers."""
    assert BUILTIN_RECIPES["llamacpp"].types == ("llm", "embedding", "reranking")
    assert BUILTIN_RECIPES["whispercpp"].types == ("audio",)
    assert BUILTIN_RECIPES["sd-cpp"].types == ("image",)
    assert BUILTIN_RECIPES["flm"].types == ("llm", "embedding", "audio")
    served = {type for recipe in BUILTIN_RECIPES.values() for type in recipe.types}
    assert served == set(MODEL_TYPES)


@pytest.mark.parametrize("name", [name for name in BUILTIN_RECIPES if name != "llamacpp"])
def test_every_built_in_recipe_would_pass_as_a_users(name: str) -> None:
    recipe = BUILTIN_RECIPES[name]
    values = {key: getattr(recipe, key) for key in RECIPE_KEYS}
    assert changed_recipe(f"my-{name}", values, source="mesh.toml").types == recipe.types
    assert set(recipe.endpoints) <= set(INFERENCE_PATHS)
    assert "{host}" in " ".join(recipe.arguments), "an engine listens on loopback only"
    assert recipe.how_to_get


def test_a_recipe_is_added_or_changed_in_mesh_toml() -> None:
    """5. `[recipes.NAME]` adds a recipe, or changes the keys it names of one that is built in."""
    own = changed_recipe("mine", OWN, source="mesh.toml")
    assert own == Recipe(name="mine", **OWN)
    assert own.types == ("llm",)
    assert not own.has_key
    changed = changed_recipe("whispercpp", {"program": "/opt/whisper"}, source="mesh.toml")
    assert changed.program == "/opt/whisper"
    assert changed.arguments == BUILTIN_RECIPES["whispercpp"].arguments
    assert changed_recipe("llamacpp", {"processors": frozenset({"cpu"})}, source="x").processors == {"cpu"}


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("Mine", OWN, "recipes.Mine: a recipe's name has lower-case letters"),
        ("mine", {**OWN, "program": ""}, "recipes.mine has no program"),
        ("mine", {**OWN, "endpoints": ()}, "recipes.mine has no endpoints"),
        ("mine", {**OWN, "processors": frozenset()}, "processors is empty"),
        ("mine", {**OWN, "endpoints": ("/v1/chat/completion",)}, "did you mean /v1/chat/completions?"),
        ("mine", {**OWN, "arguments": ("--model", "{modell}", "{port}")}, "{modell}; did you mean model?"),
        ("mine", {**OWN, "arguments": ("--model", "{model}")}, "do not say which port"),
        ("mine", {**OWN, "arguments": ("{port}", "x{type_arguments}")}, "an argument of its own"),
        ("mine", {**OWN, "type_arguments": {"llm": ("--x",)}}, 'put "{type_arguments}" into arguments'),
        ("mine", {**OWN, "type_arguments": {"audio": ("--x",)}}, "none of its endpoints is for models of type audio"),
        ("mine", {**OWN, "arguments": ("{port}", "a\0b")}, "NUL"),
        ("mine", {**OWN, "health_path": "health"}, "a path begins with /"),
        ("mine", {**OWN, "health_path": ""}, "needs a health_path"),
        ("mine", {**OWN, "ready_statuses": ()}, "needs a health_path and ready_statuses"),
        ("mine", {**OWN, "key_variable": "A B"}, "no name of an environment variable"),
        ("llamacpp", {"arguments": ("x",)}, "made by meshd; name the program with engine.path"),
    ],
)
def test_what_could_never_work_is_refused_with_the_place_and_the_way_out(
    name: str, values: dict[str, Any], words: str
) -> None:
    """6. A recipe that could not start, listen or be asked is refused when the configuration is read."""
    with pytest.raises(ConfigError) as refused:
        changed_recipe(name, values, source="mesh.toml")
    assert words in refused.value.detail
    assert refused.value.detail.startswith(f"mesh.toml: recipes.{name}")


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    """7. Braces around the name of a placeholder are replaced, once; everything else of an argument stays."""
    values = {"model": "/m/{port}", "port": "80"}
    assert filled(('{"a": 1}', "{model}", "x{port}y{port}", "{UNKNOWN}"), values) == (
        '{"a": 1}', "/m/{port}", "x80y80", "{UNKNOWN}",
    )  # fmt: skip


def test_every_key_and_placeholder_is_named_in_the_spec() -> None:
    from pathlib import Path

    text = (Path(__file__).resolve().parents[2] / "docs" / "spec" / "recipes.md").read_text(encoding="utf-8")
    for word in (*RECIPE_KEYS, *PLACEHOLDERS, *BUILTIN_RECIPES):
        assert f"`{word}`" in text or f"`{{{word}}}`" in text, word
    assert len(RECIPE_KEYS) == len(fields(Recipe)) - 1
