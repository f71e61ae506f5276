"""What clients of Lemonade Server are shown of this node, under the names they know. Pure views of mirrored state.

Source: docs/spec/lemonade.md; TRAPS 27 (one whole record for ``stats``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from services.proxyd.local_view import LocalView, SeenSlot
from services.proxyd.replies import Failure
from services.proxyd.requests_log import RequestRecord
from shared.ids import ModelName
from shared.messages.downloads import DownloadChanged, RegisteredModel
from shared.messages.models import MODEL_TYPES, LocalModel, SlotChanged
from shared.version import VERSION

GB = 1e9
GIB = 1024**3
OWNER = "lemonade"
"""What Lemonade Server says; some clients tell its models from others' by it."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What this node's own API does with one model."""

    busy: bool = False
    streaming: bool = False
    last_use: float = 0.0
    """Unix time; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """Measured once. Empty and 0: not known."""

    os_version: str = ""
    processor: str = ""
    architecture: str = ""
    cores: int = 0
    threads: int = 0
    memory_bytes: int = 0


def activity_here(
    active: Iterable[RequestRecord], recent: Iterable[RequestRecord], *, now: float, unix_now: float
) -> dict[ModelName, Activity]:
    """By the mesh's name of the model, of the requests this node's own engines have. ``now`` is monotonic."""
    found: dict[ModelName, Activity] = {}
    for record in active:
        if record.model is not None and record.attempts and not record.elsewhere:
            streaming = record.streaming and record.first_byte_seconds is not None
            known = found.get(record.model)
            found[record.model] = Activity(True, streaming or (known is not None and known.streaming), unix_now)
    for record in recent:
        if record.model is not None and record.attempts and not record.elsewhere:
            ended = unix_now - (now - record.started - record.total_seconds)
            known = found.get(record.model, Activity())
            if ended > known.last_use:
                found[record.model] = Activity(known.busy, known.streaming, ended)
    return found


# -- health -------------------------------------------------------------------------------------------------


def health(view: LocalView, activity: Mapping[ModelName, Activity]) -> dict[str, Any]:
    """``GET health``. ``activity`` by launcherd's names."""
    loaded = view.loaded()
    newest = next((seen.slot for seen in loaded if seen.slot.type == "llm"), loaded[0].slot if loaded else None)
    return {
        "status": "ok",
        "version": VERSION,
        "checkpoint_loaded": None if newest is None else shown_checkpoint(newest.checkpoint),
        "model_loaded": None if newest is None else view.mesh_name(newest.model),
        "all_models_loaded": [_loaded(view, seen, activity.get(seen.slot.model, Activity())) for seen in loaded],
        "models_loading": [_starting(view, seen.slot) for seen in view.starting()],
        "max_models": {kind: view.limits.get(kind) for kind in MODEL_TYPES},
        "pinned_models": {
            kind: sum(seen.slot.pinned for seen in loaded if seen.slot.type == kind) for kind in MODEL_TYPES
        },
    }


def _starting(view: LocalView, slot: SlotChanged) -> dict[str, Any]:
    name = view.mesh_name(slot.model)
    return {"model_name": name, "type": slot.type, "status": slot.state, "reason": slot.reason}


def _loaded(view: LocalView, seen: SeenSlot, activity: Activity) -> dict[str, Any]:
    slot = seen.slot
    return {
        "model_name": view.mesh_name(slot.model),
        "checkpoint": shown_checkpoint(slot.checkpoint),
        "last_use": round(max(seen.last_use, activity.last_use), 3),
        "type": slot.type,
        "device": " ".join(slot.processors),
        "backend_url": f"http://127.0.0.1:{slot.port}/v1",
        "recipe": slot.recipe,
        "recipe_options": recipe_options(slot),
        "pid": slot.pid,
        "status": slot.state,
        "loaded": True,
        "pinned": slot.pinned,
        "is_busy": activity.busy or slot.in_use > 0 or slot.waiting > 0,
        "is_streaming": activity.streaming,
    }


def recipe_options(slot: SlotChanged) -> dict[str, Any]:
    """The options a slot was loaded with, by their names in a load request."""
    options: dict[str, Any] = {}
    if slot.context_tokens:
        options["ctx_size"] = slot.context_tokens
    if slot.backend:
        options[f"{slot.recipe}_backend"] = slot.backend
    if slot.engine_args:
        options[f"{slot.recipe}_args"] = shlex.join(slot.engine_args)
    return options


def shown_checkpoint(checkpoint: str) -> str:
    """Where a model came from. Of a file only its name: where it lies is this machine's own business."""
    return checkpoint.replace("\\", "/").rpartition("/")[2] if checkpoint.startswith(("/", "~")) else checkpoint


# -- stats --------------------------------------------------------------------------------------------------


def stats(record: RequestRecord | None, requests_total: int) -> dict[str, Any]:
    """``GET stats``: the newest request that an engine answered, all of it from that one record."""
    shown: dict[str, Any] = {
        "time_to_first_token": None,
        "tokens_per_second": None,
        "input_tokens": None,
        "output_tokens": None,
        "prompt_tokens": None,
        "cache_tokens": None,
        "model_name": None,
        "request_id": None,
        "request_count_total": requests_total,
    }
    if record is None:
        return shown
    prompt, cached = record.prompt_tokens, record.cached_tokens
    first = _first_token_seconds(record)
    shown |= {
        "time_to_first_token": None if first is None else round(first, 6),
        "tokens_per_second": record.tokens_per_second,
        "input_tokens": prompt if prompt is None or cached is None else max(0, prompt - cached),
        "output_tokens": record.completion_tokens,
        "prompt_tokens": prompt,
        "cache_tokens": cached,
        "model_name": record.model,
        "request_id": record.request_id,
    }
    return shown


def _first_token_seconds(record: RequestRecord) -> float | None:
    """From the whole request to its first token: a stream's first byte; else what the engine says of the prompt."""
    if record.streaming:
        return record.first_byte_seconds
    return None if record.prompt_seconds is None else record.queue_seconds + record.prompt_seconds


# -- models -------------------------------------------------------------------------------------------------


def models_list(view: LocalView, *, show_all: bool) -> dict[str, Any]:
    """``GET models``: what is on this node's disk; with ``show_all`` also what could be."""
    names = {*view.inventory, *(view.registry if show_all else ())}
    return {"object": "list", "data": [entry for name in sorted(names) if (entry := model_entry(view, name))]}


def model_entry(view: LocalView, name: str) -> dict[str, Any] | None:
    """``GET models/ID``; None when neither disk nor registry has it."""
    local = view.on_disk(name)
    registered = view.registry.get(ModelName(name) if local is None else local.name)
    if local is None and registered is None:
        return None
    return {"object": "model", "created": 0, "owned_by": OWNER, **model_facts(view, local, registered)}


def model_facts(view: LocalView, local: LocalModel | None, registered: RegisteredModel | None) -> dict[str, Any]:
    """What disk, registry and slots tell of one model; one of the first two is there."""
    named = local or registered
    assert named is not None
    size = local.file_size_bytes if local is not None else registered.size_bytes if registered is not None else 0
    labels = tuple(dict.fromkeys((*(registered.labels if registered else ()), *(local.labels if local else ()))))
    # Of a file that somebody put there himself its name, as `health` shows it.
    checkpoint = (local.checkpoint if local else "") or (registered.checkpoint if registered else "")
    checkpoint = checkpoint or (local.path if local else "")
    facts: dict[str, Any] = {
        "id": named.name if local is None else view.mesh_name(local.name),
        "checkpoint": shown_checkpoint(checkpoint),
        "recipe": named.recipe,
        "type": named.type,
        "labels": list(labels),
        "downloaded": local is not None or (registered is not None and registered.downloaded),
        "suggested": registered is not None and not registered.user,
        "size_bytes": size,
    }
    if size:
        facts["size"] = round(size / GB, 3)
    slots = [seen.slot for seen in view.loaded() if seen.slot.model == named.name]
    facts["recipe_options"] = recipe_options(slots[0]) if slots else {}
    if local is not None and local.trained_context_tokens:
        facts["max_context_window"] = local.trained_context_tokens
    return facts


def unknown_model(name: str, view: LocalView) -> Failure:
    """404 with the nearest names."""
    nearest = view.nearest(name)
    near = f" Nearest: {', '.join(nearest)}." if nearest else ""
    return Failure(
        404,
        "model_not_found",
        f"there is no model {name!r} on this node or in its registry.{near} GET models?show_all=true lists them all; "
        "give 'checkpoint' to register a new one",
        param="model_name",
    )


def query_flag(query: bytes, name: str) -> bool:
    """Whether ``name=true`` (or 1, yes) is in a query string."""
    values: Iterable[str] = parse_qs(query.decode("latin-1"), keep_blank_values=True).get(name, ())
    return any(value.lower() in ("true", "1", "yes") for value in values)


# -- system-info --------------------------------------------------------------------------------------------

UNKNOWN = "unknown"


def system_info(view: LocalView, facts: SystemFacts) -> dict[str, Any]:
    """``GET system-info``. What nobody has measured is said to be unknown."""
    return {
        "OS Version": facts.os_version or UNKNOWN,
        "Processor": facts.processor or UNKNOWN,
        "Physical Memory": f"{facts.memory_bytes / GIB:.1f} GB" if facts.memory_bytes else UNKNOWN,
        "devices": _devices(view, facts),
        "recipes": _recipes(view),
    }


def _devices(view: LocalView, facts: SystemFacts) -> dict[str, Any]:
    device = view.device
    devices: dict[str, Any] = {
        "cpu": {
            "name": facts.processor or UNKNOWN,
            "cores": facts.cores or None,
            "threads": facts.threads or None,
            "available": True,
            "family": facts.architecture or UNKNOWN,
        },
        "gpu": {"name": UNKNOWN, "available": None, "reason": "launcherd has not said yet what it computes with"},
        "npu": _npu(view),
    }
    if device is None:
        return devices
    if any(_vendor(name) == "amd" for name in device.npus):
        devices["amd_npu"] = devices["npu"]
    if device.device == "cpu":
        devices["gpu"] = {"name": "none", "available": False, "reason": "launcherd found no GPU that it can use"}
        return devices
    gpu = {"name": device.device, "available": True, "vram_gb": round(device.total_bytes / GIB, 1)}
    devices["gpu"] = gpu
    vendor = _vendor(device.device)
    if vendor:
        devices[f"{vendor}_gpu"] = [gpu]
    return devices


def _npu(view: LocalView) -> dict[str, Any]:
    npus = view.device.npus if view.device is not None else ()
    users = [view.mesh_name(seen.slot.model) for seen in view.loaded() if "npu" in seen.slot.processors]
    reason = f"{users[0]} runs on it" if users else ""
    if npus:
        return {"name": npus[0], "available": True, "reason": reason or "free"}
    if users:
        return {"name": UNKNOWN, "available": True, "reason": reason}
    if view.device is None:
        return {"name": UNKNOWN, "available": None, "reason": "launcherd has not said yet what it computes with"}
    return {"name": "none", "available": False, "reason": "the kernel knows of no NPU"}


def _vendor(name: str) -> str:
    words = name.lower()
    if any(word in words for word in ("nvidia", "geforce", "rtx", "tesla", "quadro")):
        return "nvidia"
    return "amd" if any(word in words for word in ("amd", "radeon", "instinct")) else ""


def _recipes(view: LocalView) -> dict[str, Any]:
    """What launcherd says of its builds of llama.cpp and of its other engines."""
    device = view.device
    if device is None:
        backend = _backend([], UNKNOWN, "launcherd has not said yet which engines it has")
        return {"llamacpp": {"default_backend": "default", "backends": {"default": backend}}}
    runs_on = ["cpu"] if device.device == "cpu" else ["cpu", "gpu"]
    default = _state(device.engine_reason if not device.engine else "", runs_on) | {"version": device.engine}
    builds = {name: _state(reason, runs_on) for name, reason in sorted(device.backends.items())}
    recipes: dict[str, Any] = {"llamacpp": {"default_backend": "default", "backends": {"default": default, **builds}}}
    running: dict[str, list[str]] = {seen.slot.recipe: [*seen.slot.processors] for seen in view.loaded()}
    for recipe, reason in sorted(device.recipes.items()):
        backend = _state(reason, running.get(recipe, []))
        recipes[recipe] = {"default_backend": "default", "backends": {"default": backend}}
    return recipes


def _state(reason: str, devices: list[str]) -> dict[str, Any]:
    """``reason``: why it cannot be used and how to get it, empty when it can."""
    return _backend([], "installable", reason) if reason else _backend(devices, "installed", "")


def _backend(devices: list[str], state: str, message: str) -> dict[str, Any]:
    return {"devices": devices, "state": state, "message": message, "action": ""}


# -- downloads ----------------------------------------------------------------------------------------------


def progress(download: DownloadChanged) -> dict[str, Any]:
    """The data of a ``progress`` event. Bytes are over all files."""
    total = download.bytes_total
    return {
        "file": download.file,
        "file_index": download.file_index,
        "total_files": download.file_count,
        "bytes_downloaded": download.bytes_done,
        "bytes_total": total,
        "percent": min(100, download.bytes_done * 100 // total) if total > 0 else 0,
        "bytes_per_second": round(download.bytes_per_second),
        "status": download.state,
        "reason": download.reason,
        "model_name": download.model,
    }


def complete(model: str, download: DownloadChanged | None) -> dict[str, Any]:
    """The data of the ``complete`` event."""
    files = download.file_count if download is not None else 0
    size = download.bytes_total if download is not None else 0
    return {
        "file_index": files,
        "total_files": files,
        "bytes_downloaded": size,
        "bytes_total": size,
        "percent": 100,
        "model_name": model,
    }
