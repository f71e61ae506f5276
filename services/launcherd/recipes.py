"""What launcherd does with a recipe: the arguments of its program, and the first request that proves it works."""

from __future__ import annotations

import difflib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import RecipeUnknown
from shared.inference_paths import INFERENCE_PATHS
from shared.messages.models import ModelType, Processor
from shared.recipes import BUILTIN_RECIPES, TYPE_ARGUMENTS, Recipe, filled, processors_of

_SILENCE_RATE_HZ = 16_000
_SILENCE_SAMPLES = 1_600
_BOUNDARY = "meshd-first-request"


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """A POST whose good answer proves that an engine works."""

    path: str
    content_type: str
    body: bytes


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


def recipe_arguments(recipe: Recipe, type: ModelType, values: Mapping[str, str]) -> tuple[str, ...]:
    """The command line without the program, for a model of `type`; `values` has every placeholder."""
    template: list[str] = []
    for argument in recipe.arguments:
        if argument == TYPE_ARGUMENTS:
            template += recipe.type_arguments.get(type, ())
        else:
            template.append(argument)
    return filled(template, values)


def first_request(recipe: Recipe, type: ModelType, model: str) -> FirstRequest | None:
    """What a new engine is asked first; `model` is what it calls the model. None where an answer may take minutes."""
    for path in recipe.endpoints:
        if INFERENCE_PATHS.get(path) != type:
            continue
        if path == "/v1/audio/transcriptions":
            return FirstRequest(path, f"multipart/form-data; boundary={_BOUNDARY}", _silence_form(model))
        body = _BODIES.get(path)
        if body is not None:
            return FirstRequest(path, "application/json", json.dumps({"model": model, **body}).encode())
    return None


_BODIES: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1, "temperature": 0, "cache_prompt": False},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/rerank": {"query": "Hello", "documents": ["Hello"]},
    "/v1/reranking": {"query": "Hello", "documents": ["Hello"]},
}


def _silence_form(model: str) -> bytes:
    """A transcription of 0.1 s of silence, as a form."""
    fields = {"model": model, "response_format": "json"}
    head = "".join(
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    head += (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="silence.wav"\r\n'
        "Content-Type: audio/wav\r\n\r\n"
    )
    return head.encode() + silent_wav() + f"\r\n--{_BOUNDARY}--\r\n".encode()


def silent_wav() -> bytes:
    """0.1 s of silence: 16 kHz, mono, 16 bits, as whisper.cpp takes it."""
    data = bytes(2 * _SILENCE_SAMPLES)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, _SILENCE_RATE_HZ, 2 * _SILENCE_RATE_HZ, 2, 16)
    chunks = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(chunks)) + chunks
