"""Options: request over configuration over recipe over defaults, and what they cost. docs/spec/options.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.launcherd.options import (
    engine_missing,
    engine_options,
    listed_options,
    local_model,
    options_need_bytes,
)
from services.launcherd.slot_events import DeviceMeasured, KnownModel
from shared.config import EngineSection, NodeConfig
from shared.errors import BackendUnknown, OptionRefused, RecipeUnknown
from shared.ids import ModelName
from shared.messages.models import LoadModel, ModelType
from shared.recipes import BUILTIN_RECIPES
from tests.launcherd.table import model

M = ModelName("m")


def config(section: EngineSection | None = None) -> NodeConfig:
    return NodeConfig(engine=section or EngineSection())


def of_recipe(recipe: str, type: ModelType) -> KnownModel:
    known = model("m")
    return replace(known, recipe=recipe, file=replace(known.file, type=type, trained_context_tokens=0))


def test_a_request_wins_over_configuration_over_recipe_over_defaults() -> None:
    """1. An option is taken from the first that names it: request, command line, environment, mesh.toml, recipe."""
    known = model("m", trained=4096)
    configured = config(EngineSection(parallel=3, context_tokens=900))
    assert engine_options(known, config(EngineSection(parallel=2)), 8).context_tokens == 8192
    assert engine_options(known, configured, 8).context_tokens == 900
    options = engine_options(known, configured, 8, LoadModel(model=M, context_tokens=512, parallel=1))
    assert (options.context_tokens, options.parallel) == (512, 1)
    recipes = {**BUILTIN_RECIPES, "flm": replace(BUILTIN_RECIPES["flm"], context_tokens=2048)}
    flm = of_recipe("flm", "llm")
    assert engine_options(flm, replace(config(), recipes=recipes), 8).context_tokens == 2048
    assert engine_options(flm, replace(configured, recipes=recipes), 8).context_tokens == 900
    assert engine_options(flm, config(), 8).context_tokens == 4096


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 3), (16, 15)])
def test_threads_leave_a_core_to_the_daemons(cores: int, threads: int) -> None:
    """0: the number of physical cores, less one if there are more than two."""
    assert engine_options(model("m"), config(), cores).threads == threads
    assert engine_options(model("m"), config(EngineSection(threads=5)), cores).threads == 5


def test_arguments_of_a_request_replace_the_configured_ones() -> None:
    """2. `llamacpp_args` of a request replace the configured ones; an empty text means none, leaving it out means as
    configured."""
    known, configured = model("m"), config(EngineSection(extra_args=("--no-mmap",)))
    assert engine_options(known, configured, 2).extra_args == ("--no-mmap",)
    assert engine_options(known, configured, 2, LoadModel(model=M)).extra_args == ("--no-mmap",)
    assert engine_options(known, configured, 2, LoadModel(model=M, extra_args=("--mlock",))).extra_args == ("--mlock",)
    assert engine_options(known, configured, 2, LoadModel(model=M, extra_args=())).extra_args == ()
    with pytest.raises(OptionRefused, match="--host: meshd chooses where the engine listens"):
        engine_options(known, configured, 2, LoadModel(model=M, extra_args=("--host", "0.0.0.0")))


def test_the_build_of_llama_cpp() -> None:
    """5. Where nobody names a build it is the one that was found; an unknown name is refused with those there are."""
    known, named = model("m"), config(EngineSection(backends={"cpu": "/opt/cpu", "vulkan": "/opt/v"}))
    assert engine_options(known, named, 2, backend="path").backend == "path"
    assert engine_options(known, config(EngineSection(backend="embedded")), 2, backend="path").backend == "embedded"
    assert engine_options(known, named, 2, LoadModel(model=M, backend="cpu"), backend="path").backend == "cpu"
    with pytest.raises(BackendUnknown, match="no llamacpp_backend 'rocm' here; known: embedded, path, cpu, vulkan"):
        engine_options(known, named, 2, LoadModel(model=M, backend="rocm"))


def test_options_of_llama_cpp_are_not_for_other_recipes() -> None:
    """10. `llamacpp_args` and `llamacpp_backend` of a request are refused for a model of another recipe; configured
    ones mean llama.cpp only."""
    whisper = of_recipe("whispercpp", "audio")
    configured = config(EngineSection(extra_args=("--mlock",), backend="embedded"))
    options = engine_options(whisper, configured, 2, backend="path")
    assert (options.extra_args, options.backend, options.recipe) == ((), "", "whispercpp")
    for asked in (LoadModel(model=M, extra_args=("--x",)), LoadModel(model=M, backend="embedded")):
        with pytest.raises(OptionRefused, match=r"run by the recipe whispercpp.*\[recipes.whispercpp\]"):
            engine_options(whisper, configured, 2, asked)


def test_a_recipe_limits_what_its_engine_works_on_at_once() -> None:
    """docs/spec/recipes.md 15: a recipe's `parallel` is the most that its engine works on at once."""
    assert engine_options(of_recipe("whispercpp", "audio"), config(EngineSection(parallel=8)), 2).parallel == 1
    assert engine_options(model("m"), config(EngineSection(parallel=8)), 2).parallel == 8


def test_a_type_or_recipe_that_cannot_be_is_refused_and_still_listed() -> None:
    """docs/spec/recipes.md 13: a model whose type its recipe does not serve is refused."""
    wrong, unknown = of_recipe("whispercpp", "llm"), of_recipe("whisper", "audio")
    with pytest.raises(OptionRefused, match="m is of type llm, its recipe whispercpp serves audio"):
        engine_options(wrong, config(), 2)
    with pytest.raises(RecipeUnknown):
        engine_options(unknown, config(), 2)
    for known in (wrong, unknown):
        assert local_model(known, listed_options(known, config(), 2)).recipe == known.recipe


def test_what_is_missing_is_that_of_the_recipe_or_build() -> None:
    """docs/spec/recipes.md 9: while a program is missing, only models of its recipe are refused."""
    device = DeviceMeasured(
        device="cpu",
        total_bytes=1,
        reserve_bytes=0,
        engine="",
        engine_reason="install one",
        missing_backends={"vulkan": "no vulkan"},
        missing_recipes={"flm": "no flm"},
    )
    assert engine_missing(engine_options(of_recipe("flm", "llm"), config(), 2), device) == "no flm"
    assert engine_missing(engine_options(of_recipe("whispercpp", "audio"), config(), 2), device) == ""
    llamacpp = engine_options(model("m"), config(), 2)
    assert engine_missing(llamacpp, device) == "install one"
    assert engine_missing(llamacpp, replace(device, engine="llama-server 1")) == ""
    assert engine_missing(replace(llamacpp, backend="vulkan"), replace(device, engine="x")) == "no vulkan"
    assert engine_missing(replace(llamacpp, backend="embedded"), device) == ""


def test_the_need_is_that_of_the_options() -> None:
    known = model("m", size_bytes=1000)
    options = engine_options(known, config(), 2)
    assert options_need_bytes(known, options) == 1100
    seeing = replace(known, projector="/m/mmproj-a.gguf", projector_bytes=500)
    assert options_need_bytes(seeing, options) == 1650
    assert local_model(seeing, options).file_size_bytes == 1500
    labelled = replace(known, labels=("vision",), checkpoint="org/repo:Q4_0")
    local = local_model(labelled, options)
    assert (local.name, local.need_bytes, local.parallel) == ("m", 1100, 4)
    assert (local.recipe, local.labels, local.checkpoint) == ("llamacpp", ("vision",), "org/repo:Q4_0")
