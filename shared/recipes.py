"""Recipes: which program runs a kind of model, how it is called, what it computes on and what it answers. Only data.

A recipe says everything that launcherd has to know of an engine. Eight are built in; ``[recipes.NAME]`` in mesh.toml
adds one or changes one. ``llamacpp`` alone has no command line here: launcherd makes it for each build.

Source: docs/spec/recipes.md; DESIGN §7.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from shared.errors import ConfigError
from shared.inference_paths import INFERENCE_PATHS
from shared.messages.models import MODEL_TYPES, ModelType, Processor

LLAMACPP = "llamacpp"

PLACEHOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "model": "the model's file, or its folder",
        "name": "what this node calls the model",
        "checkpoint": "where the model came from, else its name",
        "host": "the address to listen on, always loopback",
        "port": "the port to listen on",
        "context_tokens": "the context over all parallel requests",
        "parallel": "how many requests it is to work on at once",
        "threads": "how many CPU threads it may use",
        "api_key": "the key to ask for; every user of the machine can read it there, so prefer key_variable",
        "type_arguments": "an argument of its own: stands for the type_arguments of the model's type",
    }
)
"""What may stand in braces in ``arguments``."""
TYPE_ARGUMENTS = "{type_arguments}"

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One kind of engine. The fields but ``name`` are the keys of ``[recipes.NAME]``."""

    name: str
    program: str = ""
    """A path, or a name that is looked for on the PATH."""
    arguments: tuple[str, ...] = ()
    """Its command line without the program, with ``PLACEHOLDERS`` in braces."""
    type_arguments: Mapping[ModelType, tuple[str, ...]] = field(default_factory=dict)
    """What stands for ``{type_arguments}`` with a model of that type."""
    processors: frozenset[Processor] = frozenset({"gpu"})
    """What it computes on. ``gpu`` alone means the CPU on a machine without a GPU."""
    endpoints: tuple[str, ...] = ()
    """The inference paths it answers. They say which types it serves, and how it is asked whether it works."""
    key_variable: str = ""
    """Environment variable in which it finds the key to ask for; empty: it knows none, or ``{api_key}`` gives it."""
    health_path: str = "/health"
    """GET says whether it is ready."""
    ready_statuses: tuple[int, ...] = (200,)
    """Answers of ``health_path`` that mean ready."""
    probe_path: str = ""
    """GET is answered as long as it works, even while it is busy; empty: ``health_path``."""
    parallel: int = 0
    """Most requests it works on at once; 0: as many as are configured."""
    context_tokens: int = 0
    """Its context where nobody says another; 0: as the model was trained."""
    how_to_get: str = ""
    """Completes "install it: …" when its program is missing."""

    @property
    def types(self) -> tuple[ModelType, ...]:
        """The types of models it serves."""
        served = {INFERENCE_PATHS[path] for path in self.endpoints if path in INFERENCE_PATHS}
        return tuple(type for type in MODEL_TYPES if type in served)

    @property
    def has_key(self) -> bool:
        """Whether it asks for a key, so that a stranger on its port can be told from it."""
        return bool(self.key_variable) or any("{api_key}" in argument for argument in self.arguments)


_RYZENAI = Recipe(
    name="ryzenai-llm",
    program="ryzenai-server",
    # It reads from the model's genai_config.json whether to use the NPU, the NPU with the GPU, or the CPU.
    arguments=(
        *("-m", "{model}", "--host", "{host}", "--port", "{port}"),
        *("--ctx-size", "{context_tokens}", "--threads", "{threads}"),
    ),
    processors=frozenset({"npu"}),
    endpoints=("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    parallel=1,
    how_to_get="AMD's Ryzen AI software and ryzenai-server, from github.com/lemonade-sdk/ryzenai-server",
)

BUILTIN_RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe(
                name=LLAMACPP,
                program="llama-server",
                processors=frozenset({"gpu"}),
                endpoints=(
                    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
                    *("/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/v1/reranking"),
                ),
                key_variable="LLAMA_API_KEY",
                # /health is answered by a thread of its own, whatever the one that computes is doing.
                probe_path="/slots",
                how_to_get="llama.cpp's llama-server on the PATH, or the embedded engine with 'pip install xllamacpp'",
            ),
            replace(_RYZENAI, name="oga-hybrid", processors=frozenset({"gpu", "npu"})),
            replace(_RYZENAI, name="oga-npu"),
            replace(_RYZENAI, name="oga-cpu", processors=frozenset({"cpu"})),
            _RYZENAI,
            Recipe(
                name="flm",
                program="flm",
                arguments=("serve", TYPE_ARGUMENTS, "--host", "{host}", "--port", "{port}", "--quiet"),
                type_arguments={
                    "llm": ("{checkpoint}", "--ctx-len", "{context_tokens}"),
                    "embedding": ("--embed", "1"),
                    "audio": ("--asr", "1"),
                },
                processors=frozenset({"npu"}),
                endpoints=(
                    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
                    "/v1/audio/transcriptions",
                ),
                # It has no health route; this one is answered once it listens.
                health_path="/api/tags",
                parallel=1,
                how_to_get="FastFlowLM, from github.com/FastFlowLM/FastFlowLM, with AMD's NPU driver",
            ),
            Recipe(
                name="whispercpp",
                program="whisper-server",
                arguments=(
                    *("--model", "{model}", "--host", "{host}", "--port", "{port}", "--threads", "{threads}"),
                    *("--inference-path", "/v1/audio/transcriptions"),
                ),
                processors=frozenset({"gpu"}),
                endpoints=("/v1/audio/transcriptions",),
                # Builds without a health route listen only once the model is loaded.
                ready_statuses=(200, 404),
                parallel=1,
                how_to_get="whisper.cpp's whisper-server, from github.com/ggml-org/whisper.cpp, on the PATH",
            ),
            Recipe(
                name="sd-cpp",
                program="sd-server",
                arguments=(
                    *("--model", "{model}", "--listen-ip", "{host}", "--listen-port", "{port}"),
                    *("--threads", "{threads}"),
                ),
                processors=frozenset({"gpu"}),
                endpoints=("/v1/images/generations", "/v1/images/edits"),
                # It listens once the model is loaded.
                health_path="/v1/models",
                parallel=1,
                how_to_get="stable-diffusion.cpp's sd-server, from github.com/leejet/stable-diffusion.cpp, on the PATH",
            ),
        )
    }
)


def processors_of(recipe: Recipe, device: str) -> tuple[Processor, ...]:
    """What ``recipe`` computes on where launcherd's device is ``device`` (``cpu``, or a GPU's name)."""
    if device == "cpu" and recipe.processors == {"gpu"}:
        return ("cpu",)
    order: tuple[Processor, ...] = ("cpu", "gpu", "npu")
    return tuple(processor for processor in order if processor in recipe.processors)


def changed_recipe(name: str, values: Mapping[str, object], *, source: str) -> Recipe:
    """The recipe ``name`` with checked ``values`` of its section put over it; a new one starts empty.

    Raises: ConfigError for what could never start or never be asked.
    """
    where = f"{source}: recipes.{name}"
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{where}: a recipe's name has lower-case letters, digits, '-', '_' and '.' only")
    known = BUILTIN_RECIPES.get(name)
    if name == LLAMACPP and (refused := sorted(set(values) - {"processors"})):
        raise ConfigError(
            f"{where}.{refused[0]}: the command line of llamacpp is made by meshd; name the program with engine.path "
            "or [engine.backends], and give options with engine.extra_args"
        )
    recipe = replace(known or Recipe(name=name), **values)  # type: ignore[arg-type]
    if not recipe.program:
        raise ConfigError(f'{where} has no program; give its name on the PATH or its path: program = "my-server"')
    if not recipe.processors:
        raise ConfigError(f"{where}.processors is empty; name one or more of cpu, gpu, npu")
    if not recipe.endpoints:
        raise ConfigError(f'{where} has no endpoints; name what it answers, e.g. endpoints = ["/v1/chat/completions"]')
    for path in recipe.endpoints:
        if path not in INFERENCE_PATHS:
            raise ConfigError(f"{where}.endpoints: {path!r} is no inference path{_nearest(path, INFERENCE_PATHS)}")
    for key in ("health_path", "probe_path"):
        path = getattr(recipe, key)
        if path and re.fullmatch(r"/[!-~]*", path) is None:
            raise ConfigError(f"{where}.{key} = {path!r}: a path begins with / and has no spaces")
    if not recipe.health_path or not recipe.ready_statuses:
        raise ConfigError(f"{where} needs a health_path and ready_statuses: how else would its readiness be known?")
    if recipe.key_variable and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", recipe.key_variable) is None:
        raise ConfigError(f"{where}.key_variable = {recipe.key_variable!r}: no name of an environment variable")
    if name != LLAMACPP:
        _check_arguments(recipe, where)
    return recipe


def _check_arguments(recipe: Recipe, where: str) -> None:
    for key, arguments in _all_arguments(recipe):
        for argument in arguments:
            if "\0" in argument:
                raise ConfigError(f"{where}.{key} has a NUL character in it")
            for name in _PLACEHOLDER.findall(argument):
                if name not in PLACEHOLDERS:
                    raise ConfigError(f"{where}.{key}: unknown placeholder {{{name}}}{_nearest(name, PLACEHOLDERS)}")
            if TYPE_ARGUMENTS in argument and (argument != TYPE_ARGUMENTS or key != "arguments"):
                raise ConfigError(f"{where}.{key}: {TYPE_ARGUMENTS} is an argument of its own, of arguments")
    given = {
        name for _, arguments in _all_arguments(recipe) for text in arguments for name in _PLACEHOLDER.findall(text)
    }
    if "port" not in given:
        raise ConfigError(
            f"{where}.arguments do not say which port to listen on: put {{port}} where the program takes it"
        )
    for type in recipe.type_arguments:
        if type not in recipe.types:
            raise ConfigError(f"{where}.type_arguments: none of its endpoints is for models of type {type}")
    if recipe.type_arguments and TYPE_ARGUMENTS not in recipe.arguments:
        raise ConfigError(f'{where}.type_arguments have no place: put "{TYPE_ARGUMENTS}" into arguments')


def _all_arguments(recipe: Recipe) -> Iterable[tuple[str, tuple[str, ...]]]:
    yield "arguments", recipe.arguments
    for type, arguments in recipe.type_arguments.items():
        yield f"type_arguments.{type}", arguments


def filled(arguments: Iterable[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """``arguments`` with every placeholder replaced; braces around anything else stay."""
    return tuple(_PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), argument) for argument in arguments)


RECIPE_KEYS = tuple(entry.name for entry in fields(Recipe) if entry.name != "name")


def _nearest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
