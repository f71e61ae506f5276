"""What launcherd does with recipes."""

from __future__ import annotations

import pytest

from services.launcherd.recipes import RecipeUnknown, processors, recipe_of


def test_processors_by_name() -> None:
    """docs/spec/recipes.md 2: which processors a recipe computes on is data; `gpu` alone is the CPU without a GPU."""
    assert processors("llamacpp", "cpu") == ("cpu",)
    assert processors("llamacpp", "NVIDIA H200") == ("gpu",)
    assert processors("oga-hybrid", "cpu") == ("gpu", "npu")
    assert processors("never heard of", "cpu") == ("cpu",)


def test_an_unknown_recipe_is_refused_with_those_there_are() -> None:
    with pytest.raises(RecipeUnknown, match=r"no recipe 'whisper' here; known: llamacpp, .* did you mean whispercpp\?"):
        recipe_of("whisper")
    assert recipe_of("flm").name == "flm"
