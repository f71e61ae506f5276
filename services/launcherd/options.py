"""From configuration and a `LoadModel` request to the options an engine is started with, and what they cost.

Source: docs/spec/options.md.
"""

from __future__ import annotations

from dataclasses import replace

from services.launcherd.command_line import EngineOptions, resolve_options
from services.launcherd.model_info import need_bytes
from services.launcherd.recipes import recipe_of
from services.launcherd.slot_events import DeviceMeasured, KnownModel
from shared.config import NodeConfig
from shared.errors import BackendUnknown, OptionRefused
from shared.messages.models import LoadModel, LocalModel
from shared.recipes import LLAMACPP


def engine_options(
    model: KnownModel, config: NodeConfig, cores: int, request: LoadModel | None = None, *, backend: str = ""
) -> EngineOptions:
    """Options for `model`, every default filled in. What a request does not name is as configured.

    `cores` are physical; `backend` is the build of llama.cpp that runs what names none. Raises: OptionRefused.
    """
    recipe, section = recipe_of(model.recipe, config.recipes), config.engine
    if model.file.type not in recipe.types:
        raise OptionRefused(
            f"{model.name} is of type {model.file.type}, its recipe {recipe.name} serves {' and '.join(recipe.types)}"
        )
    asked_args, asked_backend = (request.extra_args, request.backend) if request else (None, "")
    llamacpp = recipe.name == LLAMACPP
    if not llamacpp and (asked_args or asked_backend):
        raise OptionRefused(
            f"{model.name} is run by the recipe {recipe.name}: llamacpp_args and llamacpp_backend are for llama.cpp; "
            f"change how it is started with [recipes.{recipe.name}] in mesh.toml"
        )
    if asked_backend and asked_backend not in section.backend_names:
        raise BackendUnknown(
            f"no llamacpp_backend {asked_backend!r} here; known: {', '.join(section.backend_names)}. "
            "[engine.backends] in mesh.toml adds one"
        )
    parallel = (request.parallel if request else 0) or section.parallel
    return resolve_options(
        EngineOptions(
            context_tokens=(request.context_tokens if request else 0)
            or section.context_tokens
            or recipe.context_tokens,
            parallel=min(parallel, recipe.parallel or parallel),
            threads=section.threads or (cores - 1 if cores > 2 else max(1, cores)),
            gpu_layers=section.gpu_layers,
            extra_args=() if not llamacpp else section.extra_args if asked_args is None else asked_args,
            recipe=recipe.name,
            backend=asked_backend or section.backend or backend if llamacpp else "",
        ),
        model.file,
        cores,
    )


def listed_options(model: KnownModel, config: NodeConfig, cores: int) -> EngineOptions:
    """What the list of models says of `model`, also of one whose load would be refused."""
    try:
        return engine_options(model, config, cores)
    except OptionRefused:
        parallel, context_tokens = config.engine.parallel, config.engine.context_tokens
        return resolve_options(EngineOptions(parallel=parallel, context_tokens=context_tokens), model.file, cores)


def engine_missing(options: EngineOptions, device: DeviceMeasured) -> str:
    """Why no program is installed that could run a model with `options`, and how to get one; empty if there is one."""
    if options.recipe != LLAMACPP:
        return device.missing_recipes.get(options.recipe, "")
    if options.backend:
        return device.missing_backends.get(options.backend, "")
    return "" if device.engine else device.engine_reason or "no inference engine is installed"


def options_need_bytes(model: KnownModel, options: EngineOptions) -> int:
    """Memory that the model takes when it is loaded with `options`, its projector included."""
    whole = replace(model.file, file_size_bytes=model.size_bytes)
    return need_bytes(whole, options.context_tokens, options.parallel)


def local_model(model: KnownModel, options: EngineOptions) -> LocalModel:
    """What the rest of the node is told about a model on disk."""
    file = model.file
    return LocalModel(
        name=model.name,
        type=file.type,
        path=file.path,
        file_size_bytes=model.size_bytes,
        file_hash=model.file_hash,
        architecture=file.architecture,
        quantization=file.quantization,
        parameters=file.parameters,
        trained_context_tokens=file.trained_context_tokens,
        context_tokens=options.context_tokens,
        parallel=options.parallel,
        kv_bytes_per_token=file.kv_bytes_per_token,
        compute_bytes=file.compute_bytes,
        need_bytes=options_need_bytes(model, options),
        builtin=model.builtin,
        recipe=model.recipe,
        labels=model.labels,
        checkpoint=model.checkpoint,
    )
