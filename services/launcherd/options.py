"""From configuration and a `LoadModel` request to the options an engine is started with, and what they cost."""

from __future__ import annotations

from services.launcherd.command_line import EngineOptions, resolve_options
from services.launcherd.model_info import ModelFile, need_bytes
from services.launcherd.slot_events import KnownModel
from shared.config import EngineSection
from shared.messages.models import LoadModel, LocalModel


def engine_options(
    model: ModelFile, section: EngineSection, cores: int, request: LoadModel | None = None
) -> EngineOptions:
    """Options for `model`, every default filled in. What a request does not name is as configured.

    `cores` are physical. Raises: OptionRefused.
    """
    asked_args = request.extra_args if request else None
    threads = section.threads or (cores - 1 if cores > 2 else max(1, cores))
    return resolve_options(
        EngineOptions(
            context_tokens=(request.context_tokens if request else 0) or section.context_tokens,
            parallel=(request.parallel if request else 0) or section.parallel,
            threads=threads,
            gpu_layers=section.gpu_layers,
            extra_args=section.extra_args if asked_args is None else asked_args,
        ),
        model,
        cores,
    )


def options_need_bytes(model: ModelFile, options: EngineOptions) -> int:
    """Memory that the model takes when it is loaded with `options`."""
    return need_bytes(model, options.context_tokens, options.parallel)


def local_model(model: KnownModel, options: EngineOptions) -> LocalModel:
    """What the rest of the node is told about a model on disk."""
    file = model.file
    return LocalModel(
        name=model.name,
        type=file.type,
        path=file.path,
        file_size_bytes=file.file_size_bytes,
        file_hash=model.file_hash,
        architecture=file.architecture,
        quantization=file.quantization,
        parameters=file.parameters,
        trained_context_tokens=file.trained_context_tokens,
        context_tokens=options.context_tokens,
        parallel=options.parallel,
        kv_bytes_per_token=file.kv_bytes_per_token,
        compute_bytes=file.compute_bytes,
        need_bytes=options_need_bytes(file, options),
        builtin=model.builtin,
    )
