"""What launcherd publishes of the node besides its slots: models on disk, what it computes with, limits."""

from __future__ import annotations

from collections.abc import Iterable

from services.launcherd.options import listed_options, local_model
from services.launcherd.slot_events import DeviceMeasured, KnownModel
from shared.config import NodeConfig, type_limit
from shared.messages.models import MODEL_TYPES, DeviceChanged, InventoryChanged, LimitsChanged, SkippedFile
from shared.recipes import LLAMACPP


def inventory_message(
    models: Iterable[KnownModel], skipped: tuple[SkippedFile, ...], config: NodeConfig, cores: int
) -> InventoryChanged:
    """Every model with what it would be loaded with now."""
    listed = tuple(local_model(known, listed_options(known, config, cores)) for known in models)
    return InventoryChanged(models=listed, skipped=skipped)


def device_message(device: DeviceMeasured, config: NodeConfig, others_bytes: int) -> DeviceChanged:
    """``others_bytes`` is what loaded models of other types than llm take."""
    return DeviceChanged(
        device=device.device,
        vram_bytes=max(0, device.capacity_bytes - others_bytes),
        total_bytes=device.total_bytes,
        reserve_bytes=device.reserve_bytes,
        engine=device.engine,
        engine_reason=device.engine_reason,
        npus=device.npus,
        backends={name: device.missing_backends.get(name, "") for name in config.engine.backend_names},
        recipes={name: device.missing_recipes.get(name, "") for name in config.recipes if name != LLAMACPP},
    )


def limits_message(config: NodeConfig, limits_set: tuple[int, ...]) -> LimitsChanged:
    """``limits_set`` is what somebody set while the node runs, else empty."""
    limits = limits_set or config.models.max_loaded_models
    return LimitsChanged(
        max_loaded_models=tuple(type_limit(limits, type) for type in MODEL_TYPES),
        reason="set while the node runs, until the configured limits change" if limits_set else "as configured",
    )
