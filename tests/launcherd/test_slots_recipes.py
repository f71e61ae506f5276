"""The slot table and what is installed: builds of llama.cpp, programs of recipes. docs/spec/options.md, recipes.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.launcherd.slot_events import DeviceMeasured, LoadAsked
from shared.config import EngineSection
from shared.ids import ModelName
from shared.messages.daemon import Refused
from shared.messages.models import LoadModel, ModelLoaded
from tests.launcherd.table import GIB, World, config, model

MODELS = (model("a"), model("b"), model("npu", recipe="flm"), model("odd", recipe="of-nobody"))
DEVICE = DeviceMeasured(
    device="cpu",
    total_bytes=11 * GIB,
    reserve_bytes=GIB,
    engine="llama-server 1",
    backend="path",
    missing_backends={"vulkan": "the build vulkan of llama.cpp /opt/v does not exist"},
    missing_recipes={"flm": "the program of the recipe flm, flm, is not on the PATH; install it: FastFlowLM"},
)
BUILDS = replace(config(), engine=EngineSection(parallel=2, backends={"vulkan": "/opt/v", "cpu": "/opt/c"}))


def world(device: DeviceMeasured = DEVICE) -> World:
    made = World(BUILDS, models=MODELS)
    made.do(device)
    return made


def load(in_world: World, name: str, **options: Any) -> object:
    """The reply so far."""
    token = in_world._token()
    in_world.do(LoadAsked(token=token, request=LoadModel(model=ModelName(name), **options)))
    return in_world.replies.get(token)


def test_a_missing_program_refuses_only_its_own_models_and_unloads_nothing() -> None:
    """recipes.md 9. While it is missing, models of its recipe are refused with code `engine_missing` and the words how
    to get it, before anything is unloaded for them; models of other recipes load."""
    it = world()
    a = it.bring_up("a")
    refused = load(it, "npu")
    assert isinstance(refused, Refused)
    assert (refused.code, "install it: FastFlowLM" in refused.detail) == ("engine_missing", True)
    assert a in it.running
    assert not it.stop_order
    it.bring_up("b")


def test_the_other_way_round_llama_cpp_may_be_missing() -> None:
    """recipes.md 9: models of other recipes load."""
    it = world(replace(DEVICE, engine="", engine_reason="install llama.cpp", backend="", missing_recipes={}))
    refused = load(it, "a")
    assert isinstance(refused, Refused)
    assert (refused.code, refused.detail.endswith("install llama.cpp")) == ("engine_missing", True)
    it.bring_up("npu")


def test_a_program_that_was_installed_since_is_used_at_once() -> None:
    """recipes.md 9: a program is looked for when a model needs it; there is no cool-down after it came."""
    it = world()
    assert isinstance(load(it, "npu"), Refused)
    it.do(replace(DEVICE, missing_recipes={}))
    it.bring_up("npu")


def test_a_missing_build_is_refused_before_anything_is_unloaded() -> None:
    """options.md 5: …one whose program is missing with `engine_missing`, before anything is unloaded."""
    it = world()
    a = it.bring_up("a")
    refused = load(it, "b", backend="vulkan")
    assert isinstance(refused, Refused)
    assert (refused.code, "/opt/v does not exist" in refused.detail) == ("engine_missing", True)
    unknown = load(it, "a", backend="rocm")
    assert isinstance(unknown, Refused)
    assert (unknown.code, "known: embedded, path, vulkan, cpu" in unknown.detail) == ("backend_unknown", True)
    assert a in it.running
    assert not it.stop_order


def test_an_unknown_recipe_is_refused_to_whoever_asks() -> None:
    it = world()
    refused = load(it, "odd")
    assert isinstance(refused, Refused)
    assert (refused.code, "no recipe 'of-nobody' here" in refused.detail) == ("recipe_unknown", True)
    waiting = it.replies[it.acquire("odd")]
    assert isinstance(waiting, Refused)
    assert waiting.code == "recipe_unknown"
    assert not it.loading


def test_a_load_with_the_same_build_keeps_the_engine_and_with_another_does_not() -> None:
    """options.md 4. A load is declarative: with equal resolved options, the build among them, the engine keeps running
    and nothing happens; with others the model is loaded again."""
    it = world()
    slot_id = it.bring_up("a")
    assert it.slots[slot_id].backend == "path"
    for same in ({}, {"backend": "path"}, {"extra_args": ()}):
        reply = load(it, "a", **same)
        assert isinstance(reply, ModelLoaded), same
        assert (reply.slot_id, reply.already) == (slot_id, True)
    assert load(it, "a", backend="cpu") is None
    it.stopped("a")
    started = next(iter(it.loading.values()))
    assert started.options.backend == "cpu"


def test_what_was_asked_before_the_builds_were_known_is_loaded_as_if_after() -> None:
    """options.md 5: where nobody names a build it is the one that was found."""
    it = World(BUILDS, models=MODELS)
    it.table.book.device = None
    load(it, "a")
    it.do(DEVICE)
    started = next(iter(it.loading.values()))
    assert started.options.backend == "path"
