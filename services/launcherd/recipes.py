"""What launcherd does with a recipe: the arguments of its program, and the first request that proves it works."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from shared.errors import LoadFailed
from shared.messages.models import Processor
from shared.recipes import BUILTIN_RECIPES, Recipe, processors_of


class RecipeUnknown(LoadFailed):
    """A model's recipe is not one of this node's."""

    code = "recipe_unknown"


def recipe_of(name: str, recipes: Mapping[str, Recipe] = BUILTIN_RECIPES) -> Recipe:
    """The recipe of that name; `recipes` are the node's (`NodeConfig.recipes`). Raises: RecipeUnknown."""
    recipe = recipes.get(name)
    if recipe is None:
        close = difflib.get_close_matches(name, list(recipes), n=1, cutoff=0.5)
        raise RecipeUnknown(
            f"no recipe {name!r} here; known: {', '.join(recipes)}"
            + (f"; did you mean {close[0]}?" if close else "")
            + ". [recipes.NAME] in mesh.toml adds one"
        )
    return recipe


def processors(name: str, device: str, recipes: Mapping[str, Recipe] = BUILTIN_RECIPES) -> tuple[Processor, ...]:
    """What a model of the recipe `name` computes on, in the order cpu, gpu, npu.

    `device` is launcherd's: `cpu`, or a GPU's name. A recipe that this node does not know can't be loaded; it counts
    as the CPU's.
    """
    recipe = recipes.get(name)
    return processors_of(recipe, device) if recipe is not None else ("cpu",)
