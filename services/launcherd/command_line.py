"""From a model and options to the command that serves it.

Both engines of llama.cpp are called alike: a `llama-server` binary, or our embedded engine with the same flags. Flags
that only some builds know are left out when the build is known not to have them. Every other engine is called as its
recipe says. The API key goes into the environment, because a command line is visible to every user of the machine.

Source: DESIGN §7 (types choose engine flags), §4 (loopback, random key); TRAPS 25, 37; docs/spec/recipes.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

from services.launcherd.model_info import ModelFile, encoder_batch_tokens
from services.launcherd.recipes import FirstRequest, first_request, recipe_arguments
from shared.errors import OptionRefused
from shared.llamacpp_args import refusal
from shared.messages.models import ModelType
from shared.recipes import BUILTIN_RECIPES, LLAMACPP, Recipe

DEFAULT_PARALLEL = 4
DEFAULT_CONTEXT_TOKENS = 16_384
"""Over all parallel requests: 4096 each for the default four. A larger share costs KV cache: 128 KiB per token
for an 8B model."""
EMBEDDED = "embedded"
"""Kind of the engine that comes with meshd."""
EMBEDDED_USAGE_STATUS = 2
"""Its exit status for arguments that it cannot use. llama-server ends with 1, whatever it fails of."""
ENGINE_MARK = "MESHD_ENGINE"
"""Environment variable of every engine process: the path of its record, so that a process can be told to be ours
even if launcherd was killed before it could write down the pid."""

_WITHHELD_PREFIXES = ("LLAMA_ARG_", "MESH_", "SUPERVISOR_")
_WITHHELD = frozenset({"LLAMA_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "NOTIFY_SOCKET", "MTMD_BACKEND_DEVICE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that can be started. `program` is the argv prefix that runs it."""

    kind: str
    """`embedded`, `llama-server`, or the recipe's name."""
    program: tuple[str, ...]
    version: str
    flags: frozenset[str] | None = None
    """Flags its `--help` lists; None: not known, all are passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Resolved options of one load. Equal options mean that a reload would change nothing."""

    context_tokens: int = 0
    """Total over all parallel requests; 0: `default_context_tokens`."""
    parallel: int = DEFAULT_PARALLEL
    threads: int = 0
    """0: all cores but one, so that the daemons can breathe."""
    gpu_layers: int = -1
    """-1: as many as fit."""
    cache_ram_mib: int = 0
    """llama-server keeps up to 8 GiB of old prompts in RAM unless told otherwise, which no need accounts for."""
    pooling: str = ""
    """Embedding models: `mean`, `cls`, `last`; empty: as the file says."""
    extra_args: tuple[str, ...] = ()
    """For llama.cpp only."""
    recipe: str = LLAMACPP
    backend: str = ""
    """The build of llama.cpp; empty: not known yet, or another recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """All that is needed to start one engine and to talk to it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    model: ModelFile
    host: str
    port: int
    api_key: str
    recipe: Recipe = BUILTIN_RECIPES[LLAMACPP]
    first_request: FirstRequest | None = None
    """Proves that the engine works; None: its readiness is enough."""
    usage_status: int | None = None
    """Exit status by which the engine says that its arguments are to blame; None: it has none of its own for that."""

    @property
    def type(self) -> ModelType:
        return self.model.type


def default_context_tokens(model: ModelFile, parallel: int) -> int:
    """Total context when none is configured.

    llm: what the model was trained for, for each request, at most 16,384 tokens altogether. Encoders keep no KV
    cache, so each request gets all they were trained for, at most 8192.
    """
    if model.type in ("embedding", "reranking"):
        return encoder_batch_tokens(model.trained_context_tokens) * parallel
    return min((model.trained_context_tokens or 4096) * parallel, DEFAULT_CONTEXT_TOKENS)


def resolve_options(options: EngineOptions, model: ModelFile, cores: int) -> EngineOptions:
    """Options with every default filled in, so that they can be compared, shown and accounted for.

    `cores` are physical cores. Raises: OptionRefused.
    """
    if options.parallel < 1 or options.context_tokens < 0 or options.threads < 0:
        raise OptionRefused("parallel must be at least 1, context_tokens and threads at least 0")
    if why := refusal(options.extra_args):
        raise OptionRefused(why)
    return replace(
        options,
        context_tokens=options.context_tokens or default_context_tokens(model, options.parallel),
        threads=options.threads or max(1, cores - 1),
    )


def fingerprint(engine: Engine, model: ModelFile, options: EngineOptions) -> str:
    """Equal for two loads that would run the same engine on the same files with the same resolved options.

    Compared by a restarted launcherd to tell whether an engine is still as wanted.
    """
    text = repr((engine.program, engine.version, model.parts, model.file_size_bytes, astuple(options)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def build_command(
    engine: Engine,
    model: ModelFile,
    options: EngineOptions,
    *,
    port: int,
    api_key: str,
    environ: Mapping[str, str],
    mark: str,
    host: str = "127.0.0.1",
    recipe: Recipe = BUILTIN_RECIPES[LLAMACPP],
    checkpoint: str = "",
    projector: str = "",
) -> EngineCommand:
    """The command that serves `model` with resolved `options` on `host:port`; `mark` is the record's path.

    `environ` is inherited but for what would configure the engine behind our back or is none of its business.
    Raises: OptionRefused for a type that the recipe does not serve.
    """
    if model.type not in recipe.types:
        raise OptionRefused(f"the recipe {recipe.name} serves no models of type {model.type}")
    if recipe.name == LLAMACPP:
        seeing = _if_known(engine, "--mmproj", projector) if projector else []
        arguments = (*_llamacpp_arguments(engine, model, options, host, port), *seeing, *options.extra_args)
    else:
        values = {
            "model": model.path,
            "name": model.name,
            "checkpoint": checkpoint or model.name,
            "host": host,
            "port": str(port),
            "context_tokens": str(options.context_tokens),
            "parallel": str(options.parallel),
            "threads": str(options.threads),
            "api_key": api_key,
        }
        arguments = recipe_arguments(recipe, model.type, values)
    env = {name: value for name, value in environ.items() if not _withheld(name)} | {ENGINE_MARK: mark}
    if recipe.key_variable:
        env[recipe.key_variable] = api_key
    return EngineCommand(
        argv=(*engine.program, *arguments),
        env=env,
        model=model,
        host=host,
        port=port,
        api_key=api_key,
        recipe=recipe,
        first_request=first_request(recipe, model.type, checkpoint or model.name),
        usage_status=EMBEDDED_USAGE_STATUS if engine.kind == EMBEDDED else None,
    )


def _llamacpp_arguments(
    engine: Engine, model: ModelFile, options: EngineOptions, host: str, port: int
) -> tuple[str, ...]:
    arguments = ["--model", model.path, "--host", host, "--port", str(port)]
    arguments += ["--ctx-size", str(options.context_tokens), "--parallel", str(options.parallel)]
    arguments += ["--threads", str(options.threads), "--threads-batch", str(options.threads)]
    if options.gpu_layers >= 0:
        arguments += ["--n-gpu-layers", str(options.gpu_layers)]
    arguments += _if_known(engine, "--alias", model.name.replace(",", "_"))
    arguments += _if_known(engine, "--cache-ram", str(options.cache_ram_mib))
    arguments += _if_known(engine, "--no-webui") or _if_known(engine, "--no-ui")
    arguments += _if_known(engine, "--slots") + _if_known(engine, "--metrics")
    if model.type == "llm":
        arguments += _if_known(engine, "--jinja")
    else:
        batch = str(encoder_batch_tokens(model.trained_context_tokens))
        arguments += ["--batch-size", batch, "--ubatch-size", batch]
        arguments += ["--reranking"] if model.type == "reranking" else ["--embeddings"]
        if model.type == "embedding" and options.pooling:
            arguments += ["--pooling", options.pooling]
    return tuple(arguments)


def _if_known(engine: Engine, flag: str, *values: str) -> list[str]:
    return [flag, *values] if engine.flags is None or flag in engine.flags else []


def _withheld(name: str) -> bool:
    return name in _WITHHELD or name.startswith(_WITHHELD_PREFIXES)
