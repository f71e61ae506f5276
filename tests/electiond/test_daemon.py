"""electiond's shell: how many models of a type this node holds is launcherd's word, once it has spoken."""

from __future__ import annotations

from services.electiond.daemon import config_stimulus
from shared.config import ModelsSection, NodeConfig
from shared.messages.models import LimitsChanged

CONFIG = NodeConfig(models=ModelsSection(max_loaded_models=(2, 1)), configured=True)


def test_limits_are_the_configured_ones_until_launcherd_speaks() -> None:
    assert config_stimulus(CONFIG).slot_limits == {"llm": 2, "embedding": 1, "reranking": 1, "audio": 1, "image": 1}


def test_limits_that_were_set_while_the_node_runs_count() -> None:
    said = config_stimulus(CONFIG, LimitsChanged(max_loaded_models=(-1, 3, 1, 1, 1)))
    assert said.slot_limits == {"llm": -1, "embedding": 3, "reranking": 1, "audio": 1, "image": 1}
