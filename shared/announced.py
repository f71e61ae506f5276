"""What is told of a model on disk and of a ready slot: gossipd to the mesh, electiond to itself, the same way."""

from __future__ import annotations

from collections.abc import Iterable

from shared.messages.mesh import AvailableModel, ServedModel
from shared.messages.models import LocalModel, SlotChanged


def available_model(model: LocalModel) -> AvailableModel:
    """``model`` as other nodes see it: all that they need to compute its need, and no path."""
    return AvailableModel(
        name=model.name,
        type=model.type,
        file_size_bytes=model.file_size_bytes,
        file_hash=model.file_hash,
        kv_bytes_per_token=model.kv_bytes_per_token,
        compute_bytes=model.compute_bytes,
        context_tokens=model.context_tokens,
        parallel=model.parallel,
        architecture=model.architecture,
        quantization=model.quantization,
        parameters=model.parameters,
        builtin=model.builtin,
    )


def hosted_models(slots: Iterable[SlotChanged]) -> tuple[ServedModel, ...]:
    """What is routable on a node: its slots that passed a health check, by name."""
    return tuple(
        ServedModel(model=slot.model, type=slot.type, parallel=slot.parallel)
        for slot in sorted(slots, key=lambda slot: slot.model)
        if slot.state == "ready"
    )
