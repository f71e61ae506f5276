"""Pins and the NPU where rules meet: docs/spec/slots.md says them one by one."""

from __future__ import annotations

from dataclasses import replace

from shared.recipes import BUILTIN_RECIPES
from tests.launcherd.table import NPU_MODELS, World, config, model, refused, running


def test_a_recipe_of_the_owner_may_use_the_npu() -> None:
    mine = replace(BUILTIN_RECIPES["oga-cpu"], name="mine", processors=frozenset({"npu"}))
    node = replace(config((-1,)), recipes={**BUILTIN_RECIPES, "mine": mine})
    world = World(node, models=(*NPU_MODELS, model("own", recipe="mine")))
    world.bring_up("npu-llm")
    world.bring_up("own")
    assert running(world) == {"own"}


def test_the_npu_is_left_when_its_requests_are_done() -> None:
    world = World(config((-1,)), models=NPU_MODELS)
    slot_id = world.bring_up("npu-llm")
    assert world.granted(world.acquire("npu-llm"))
    world.load("npu-emb")
    assert not world.stopping
    world.give_back(slot_id)
    world.stopped("npu-llm")
    world.ready("npu-emb")


def test_a_pinned_model_keeps_the_npu() -> None:
    world = World(config((-1,)), models=NPU_MODELS)
    world.bring_up("npu-llm")
    world.pin("npu-llm")
    answer = refused(world.reply(world.load("npu-emb")))
    assert answer.code == "all_pinned"
    assert "one model at a time may use the NPU, and npu-llm is pinned" in answer.detail
    assert running(world) == {"npu-llm"}


def test_unpinning_a_draining_model_lets_it_go_and_pinning_keeps_it() -> None:
    world = World()
    slot_id = world.bring_up("a")
    assert world.granted(world.acquire("a"))
    token = world.load("b")
    assert world.state("a") == "draining"
    world.pin("a")
    assert world.state("a") == "ready"
    assert refused(world.reply(token)).code == "all_pinned"
    world.give_back(slot_id)
    assert running(world) == {"a"}
