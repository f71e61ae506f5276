"""The sentences that slots carry as reasons."""

from __future__ import annotations

from collections.abc import Sequence

from services.launcherd.slot_events import DeviceMeasured
from shared.words import size_words

REASON_LIMIT = 900
PLAIN_CODES = frozenset(
    {
        "model_file_missing",
        "model_file_broken",
        "model_too_large",
        "engine_missing",
        "option_refused",
        "all_pinned",
        "backend_unknown",
        "recipe_unknown",
    }
)
"""Failures that are told by their own code; all others are `load_failed`."""


def requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def too_large(model: str, need_bytes: int, file_bytes: int, context_tokens: int, device: DeviceMeasured) -> str:
    """Why a model is refused before it starts, with the numbers."""
    need, file, may_use, total, reserve = (
        size_words(count)
        for count in (need_bytes, file_bytes, device.capacity_bytes, device.total_bytes, device.reserve_bytes)
    )
    return (
        f"{model} needs {need} (file {file}, context of {context_tokens} tokens), but models may use {may_use} of this "
        f"node's {device.device}: {total} in all, {reserve} kept back. Nothing was unloaded for it. Try a smaller "
        "context or quantization, or raise what models may use under [node] in mesh.toml"
    )


def all_pinned(model: str, blocked: str) -> str:
    """Why a model is refused because what would make room for it is pinned."""
    return (
        f"{model} has no place: {blocked}. Unpin a model ('meshctl unpin MODEL'), unload one ('meshctl unload MODEL'), "
        "or allow more models at once (max_loaded_models)"
    )


def waits_for(parts: Sequence[str]) -> str:
    return "waits " + " and ".join(parts) if parts else "waits for its place"


def code_of(code: str) -> str:
    return code if code in PLAIN_CODES else "load_failed"


def clip(text: str) -> str:
    return text if len(text) <= REASON_LIMIT else text[: REASON_LIMIT - 1] + "…"
