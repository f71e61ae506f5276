"""The part of `llama-server`'s command line that the embedded engine understands.

One table maps flags to settings of llama.cpp's `CommonParams`. As in llama.cpp a flag takes the next argument
whatever it looks like, and an unknown flag is an error: silently ignoring one would load a model in another way
than asked.

Source: llama.cpp tools/server/README.md; ENGINES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

AUTO_PARALLEL = 4
"""llama-server's own choice for `-np -1`, which then shares one KV cache between the requests."""


class UsageError(Exception):
    """The command line cannot be understood; the text says why."""


@dataclass(frozen=True, slots=True)
class EnumName:
    """A value by its name in one of the binding's enumerations, resolved where the binding is at hand."""

    enumeration: str
    member: str


Setting = int | float | str | bool | EnumName | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArguments:
    """`settings` are `CommonParams` attributes (dotted where nested) in the order to apply."""

    action: Literal["serve", "help", "version"]
    settings: Mapping[str, Setting]


_INTEGERS: Mapping[str, tuple[str, ...]] = {
    "-c --ctx-size": ("n_ctx",),
    "-t --threads": ("cpuparams.n_threads",),
    "-tb --threads-batch": ("cpuparams_batch.n_threads",),
    "-b --batch-size": ("n_batch",),
    "-ub --ubatch-size": ("n_ubatch",),
    "-n --predict --n-predict": ("n_predict",),
    "-np --parallel": ("n_parallel",),
    "-cram --cache-ram": ("cache_ram_mib",),
    "-ctxcp --ctx-checkpoints --swa-checkpoints": ("n_ctx_checkpoints",),
    "-mg --main-gpu": ("main_gpu",),
    "-lv --verbosity --log-verbosity": ("verbosity",),
    "-to --timeout": ("timeout_read", "timeout_write"),
    "-s --seed": ("sampling.seed",),
    "--port": ("port",),
    "--keep": ("n_keep",),
    "--poll": ("cpuparams.poll",),
    "--cache-reuse": ("n_cache_reuse",),
    "--threads-http": ("n_threads_http",),
    "--embd-normalize": ("embd_normalize",),
    "--sse-ping-interval": ("sse_ping_interval",),
    "--yarn-orig-ctx": ("yarn_orig_ctx",),
}
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "-sps --slot-prompt-similarity": ("slot_prompt_similarity",),
    "--rope-freq-base": ("rope_freq_base",),
    "--rope-freq-scale": ("rope_freq_scale",),
    "--yarn-ext-factor": ("yarn_ext_factor",),
    "--yarn-attn-factor": ("yarn_attn_factor",),
    "--temp --temperature": ("sampling.temp",),
    "--top-p": ("sampling.top_p",),
    "--min-p": ("sampling.min_p",),
}
_TEXTS: Mapping[str, str] = {
    "-m --model": "model.path",
    "-mm --mmproj": "mmproj.path",
    "-a --alias": "model_alias",
    "--chat-template": "chat_template",
    "--slot-save-path": "slot_save_path",
}
_SWITCHES: Mapping[str, Mapping[str, Setting]] = {
    "--embedding --embeddings": {"embedding": True},
    "--rerank --reranking": {
        "embedding": True,
        "pooling_type": EnumName("llama_pooling_type", "LLAMA_POOLING_TYPE_RANK"),
    },
    "--ui --webui": {"ui": True},
    "--no-ui --no-webui": {"ui": False},
    "--warmup": {"warmup": True},
    "--no-warmup": {"warmup": False},
    "--metrics": {"endpoint_metrics": True},
    "--props": {"endpoint_props": True},
    "--slots": {"endpoint_slots": True},
    "--no-slots": {"endpoint_slots": False},
    "--jinja": {"use_jinja": True},
    "--no-jinja": {"use_jinja": False},
    "-kvu --kv-unified": {"kv_unified": True},
    "-no-kvu --no-kv-unified": {"kv_unified": False},
    "-cb --cont-batching": {"cont_batching": True},
    "-nocb --no-cont-batching": {"cont_batching": False},
    "--cache-prompt": {"cache_prompt": True},
    "--no-cache-prompt": {"cache_prompt": False},
    "--context-shift": {"ctx_shift": True},
    "--no-context-shift": {"ctx_shift": False},
    "--swa-full": {"swa_full": True},
    "--check-tensors": {"check_tensors": True},
    "--mlock": {"load_mode": EnumName("llama_load_mode", "LLAMA_LOAD_MODE_MMAP_MLOCK")},
    "--no-mmap": {"load_mode": EnumName("llama_load_mode", "LLAMA_LOAD_MODE_NONE")},
    "-nkvo --no-kv-offload": {"no_kv_offload": True},
    "--offline": {"offline": True},
}
_POOLING = {name: f"LLAMA_POOLING_TYPE_{name.upper()}" for name in ("none", "mean", "cls", "last", "rank")}
_CACHE_TYPES = {
    name: f"GGML_TYPE_{name.upper()}"
    for name in ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
}
_CHOICES: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "--pooling": ("pooling_type", "llama_pooling_type", _POOLING),
    "-ctk --cache-type-k": ("cache_type_k", "ggml_type", _CACHE_TYPES),
    "-ctv --cache-type-v": ("cache_type_v", "ggml_type", _CACHE_TYPES),
    "-sm --split-mode": (
        "split_mode",
        "llama_split_mode",
        {name: f"LLAMA_SPLIT_MODE_{name.upper()}" for name in ("none", "layer", "row")},
    ),
}
_FLASH = {
    "on": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
    "off": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
    "auto": "LLAMA_FLASH_ATTN_TYPE_AUTO",
}
_SPECIAL = ("--host", "--api-key", "--api-key-file", "--chat-template-file", "-ngl --gpu-layers --n-gpu-layers",
            "-fa --flash-attn")  # fmt: skip


def known_flags() -> list[str]:
    """One line per flag, for `--help`."""
    tables = (*_INTEGERS, *_NUMBERS, *_TEXTS, *_SWITCHES, *_CHOICES, *_SPECIAL)
    return sorted(tables, key=lambda line: line.split()[-1].lstrip("-"))


def parse_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> ServerArguments:
    """Understands a command line (without the program's name).

    `chat_template_file` and `api_key_file` come back as settings of that name: reading them is not for here.
    Raises: UsageError.
    """
    settings: dict[str, Setting] = {"hostnames": ("127.0.0.1",), "n_parallel": -1}
    keys = _keys(environ.get("LLAMA_API_KEY", ""))
    remaining = list(argv)
    while remaining:
        flag = remaining.pop(0)
        if flag in ("-h", "--help", "--usage"):
            return ServerArguments(action="help", settings={})
        if flag == "--version":
            return ServerArguments(action="version", settings={})
        if flag in ("-fa", "--flash-attn"):
            # Older builds take no value here.
            word = remaining.pop(0) if remaining and remaining[0] in _FLASH else "on"
            settings["flash_attn_type"] = EnumName("llama_flash_attn_type", _FLASH[word])
        elif flag == "--api-key":
            keys += _keys(_value(flag, remaining))
        else:
            settings.update(_setting(flag, remaining))
    if "model.path" not in settings:
        raise UsageError("no model: give one with -m FILE")
    if keys:
        settings["api_keys"] = keys
    if settings["n_parallel"] == -1:
        settings["n_parallel"] = AUTO_PARALLEL
        settings.setdefault("kv_unified", True)
    return ServerArguments(action="serve", settings=settings)


def _setting(flag: str, remaining: list[str]) -> Mapping[str, Setting]:
    for names, attributes in _INTEGERS.items():
        if flag in names.split():
            number = _integer(flag, _value(flag, remaining))
            return dict.fromkeys(attributes, number)
    for names, attributes in _NUMBERS.items():
        if flag in names.split():
            return dict.fromkeys(attributes, _number(flag, _value(flag, remaining)))
    for names, attribute in _TEXTS.items():
        if flag in names.split():
            return {attribute: _value(flag, remaining)}
    for names, switched in _SWITCHES.items():
        if flag in names.split():
            return switched
    for names, (attribute, enumeration, members) in _CHOICES.items():
        if flag in names.split():
            word = _value(flag, remaining)
            if word not in members:
                raise UsageError(f"{flag} takes one of {', '.join(members)}, not {word!r}")
            return {attribute: EnumName(enumeration, members[word])}
    if flag == "--host":
        return {"hostnames": (_value(flag, remaining),)}
    if flag == "--chat-template-file":
        return {"chat_template_file": _value(flag, remaining)}
    if flag == "--api-key-file":
        return {"api_key_file": _value(flag, remaining)}
    if flag in ("-ngl", "--gpu-layers", "--n-gpu-layers"):
        word = _value(flag, remaining)
        return {"n_gpu_layers": {"auto": -1, "all": -2}.get(word) or _integer(flag, word)}
    raise UsageError(f"unknown argument: {flag}")


def _value(flag: str, remaining: list[str]) -> str:
    if not remaining:
        raise UsageError(f"{flag} needs a value")
    return remaining.pop(0)


def _integer(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{flag} takes a whole number, not {text!r}") from None


def _number(flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{flag} takes a number, not {text!r}") from None


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key for key in text.split(",") if key)
