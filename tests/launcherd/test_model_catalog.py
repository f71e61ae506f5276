"""The built-in catalog as data."""

from __future__ import annotations

from services.launcherd.model_catalog import CATALOG


def test_it_has_models_for_small_and_large_machines_and_none_is_the_users() -> None:
    names = {entry.name for entry in CATALOG}
    assert {"gemma-3-270m-it", "Qwen3-8B", "gpt-oss-120b", "nomic-embed-text-v1.5", "bge-reranker-v2-m3"} <= names
    assert not any(entry.user for entry in CATALOG)
    assert {entry.recipe for entry in CATALOG} == {"llamacpp"}
