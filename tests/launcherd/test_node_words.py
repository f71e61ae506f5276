"""What is told of the node: which builds and recipes can be used, NPUs, memory left for llms, limits."""

from __future__ import annotations

from services.launcherd.node_words import device_message, inventory_message, limits_message
from services.launcherd.slot_events import DeviceMeasured
from shared.config import EngineSection, NodeConfig
from shared.messages.models import SkippedFile
from tests.launcherd.table import config, model

DEVICE = DeviceMeasured(
    device="RTX",
    total_bytes=10,
    reserve_bytes=2,
    engine="llama-server",
    missing_backends={"path": "no llama-server on the PATH"},
    missing_recipes={"flm": "no flm on the PATH"},
    npus=("Intel NPU",),
)


def test_what_can_be_used_and_what_not_with_the_reason() -> None:
    node = NodeConfig(engine=EngineSection(backends={"cuda": "/opt/cuda/llama-server"}))
    said = device_message(DEVICE, node, 3)
    assert said.backends == {"embedded": "", "path": "no llama-server on the PATH", "cuda": ""}
    assert said.recipes["flm"] == "no flm on the PATH"
    assert said.recipes["whispercpp"] == ""
    assert "llamacpp" not in said.recipes
    assert (said.npus, said.vram_bytes) == (("Intel NPU",), 5)
    assert device_message(DEVICE, node, 99).vram_bytes == 0


def test_limits_say_who_set_them() -> None:
    assert limits_message(config((2, 1)), ()).max_loaded_models == (2, 1, 1, 1, 1)
    assert limits_message(config((2, 1)), ()).reason == "as configured"
    said = limits_message(config((2, 1)), (-1,))
    assert (said.max_loaded_models, "while the node runs" in said.reason) == ((-1,) * 5, True)


def test_the_inventory_says_what_each_model_would_be_loaded_with() -> None:
    skipped = (SkippedFile(path="/m/x.gguf", reason="broken"),)
    said = inventory_message([model("a")], skipped, config(), 4)
    assert said.skipped == skipped
    assert [(item.name, item.recipe, item.parallel) for item in said.models] == [("a", "llamacpp", 2)]
