"""What a model on disk is and what it needs, computed from its headers.

`file_facts` reduces one file's header to the few values worth caching; `build_model` joins the parts of a model.
Peers compare needs, so every number here is a function of the files alone.

Source: DESIGN §6 (model identity, need), §7 (types); TRAPS 17, 44.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import shared.need
from services.launcherd.gguf import GgufArray, GgufHeader
from shared.errors import ModelFileBroken
from shared.messages.models import ModelType

F16_BYTES = 2
F32_BYTES = 4
UBATCH_TOKENS = 512
"""llama.cpp's physical batch: compute buffers are sized for it."""
ENCODER_BATCH_LIMIT_TOKENS = 8192
"""An encoder reads its whole input in one batch; longer inputs are not served."""
READINESS_LEAST_SECONDS = 600.0
READINESS_SECONDS_PER_GB = 120.0

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
_POOLING_NONE, _POOLING_RANK = 0, 4
_ENCODERS = frozenset({"bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
                       "modern-bert", "eurobert", "gemma-embedding", "t5encoder"})  # fmt: skip
_FILE_TYPE_GUESSED = 1024
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
    36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What one file's header says. Plain values only, so that it can be cached as JSON."""

    architecture: str
    type: ModelType
    trained_context_tokens: int
    parameters: int
    kv_bytes_per_token: int
    compute_bytes: int
    quantization: str
    chat_template: bool
    split_number: int
    split_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One model on disk. `parts` are its files in order; `file_size_bytes` is their sum."""

    name: str
    type: ModelType
    path: str
    parts: tuple[str, ...]
    architecture: str
    trained_context_tokens: int
    parameters: int
    file_size_bytes: int
    kv_bytes_per_token: int
    """f16 keys and values of one token over all layers; 0 for encoders. Sliding-window layers count in full, so
    this is an upper bound for models that have them."""
    compute_bytes: int
    """Estimate of the engine's scratch buffers for one physical batch."""
    quantization: str
    chat_template: bool


@dataclass(frozen=True, slots=True)
class PartName:
    """`stem-00002-of-00003.gguf` taken apart; `number` counts from 1. A whole file is part 1 of 1."""

    stem: str
    number: int
    count: int


def split_part_name(file_name: str) -> PartName:
    """Takes a `.gguf` file name apart."""
    stem = file_name[: -len(".gguf")]
    match = _PART.fullmatch(stem)
    if match is None:
        return PartName(stem, 1, 1)
    return PartName(match["stem"], int(match["number"]), int(match["count"]))


def file_facts(header: GgufHeader) -> FileFacts:
    """The facts of one file.

    Raises: ModelFileBroken when it is no model of its own (a projector, an adapter) or lacks what a model needs.
    """
    architecture = header.text("general.architecture")
    if not architecture:
        raise ModelFileBroken("the header names no architecture")
    kind = header.text("general.type") or "model"
    if architecture == "clip" or kind == "mmproj":
        raise ModelFileBroken("a multimodal projector, which is part of another model")
    if kind != "model":
        raise ModelFileBroken(f"a GGUF file of type {kind!r}, not a model")
    split_number = header.integer("split.no") or 0
    if not header.tensors:
        raise ModelFileBroken("the file has no weights")
    layers = header.integer(f"{architecture}.block_count")
    if layers is None and split_number == 0:
        raise ModelFileBroken("the header does not say how many layers the model has")
    if layers is not None and not 0 <= layers <= 100_000:
        raise ModelFileBroken(f"the header speaks of {layers} layers")
    model_type = _model_type(header, architecture)
    context_tokens = max(0, header.integer(f"{architecture}.context_length") or 0)
    return FileFacts(
        architecture=architecture,
        type=model_type,
        trained_context_tokens=context_tokens,
        parameters=sum(tensor.elements for tensor in header.tensors),
        kv_bytes_per_token=_kv_bytes_per_token(header, architecture, layers or 0),
        compute_bytes=_compute_bytes(header, architecture, model_type, context_tokens),
        quantization=_quantization(header),
        chat_template="tokenizer.chat_template" in header.metadata,
        split_number=split_number,
        split_count=header.integer("split.count") or 1,
    )


def build_model(name: str, parts: Sequence[tuple[str, int, FileFacts]]) -> ModelFile:
    """Joins the files of one model: (path, size in bytes, facts) in part order; the first has the metadata.

    Raises: ModelFileBroken when the parts do not belong together.
    """
    path, _, first = parts[0]
    for index, (part_path, _, facts) in enumerate(parts):
        if facts.split_count != len(parts) or facts.split_number != index:
            raise ModelFileBroken(
                f"{part_path.rpartition('/')[2]} says it is part {facts.split_number + 1} of {facts.split_count}, "
                f"its name says part {index + 1} of {len(parts)}"
            )
        if facts.architecture != first.architecture:
            raise ModelFileBroken(f"the parts have different architectures: {first.architecture}, {facts.architecture}")
    return ModelFile(
        name=name,
        type=first.type,
        path=path,
        parts=tuple(part_path for part_path, _, _ in parts),
        architecture=first.architecture,
        trained_context_tokens=first.trained_context_tokens,
        parameters=sum(facts.parameters for _, _, facts in parts),
        file_size_bytes=sum(size for _, size, _ in parts),
        kv_bytes_per_token=first.kv_bytes_per_token,
        compute_bytes=first.compute_bytes,
        quantization=first.quantization,
        chat_template=first.chat_template,
    )


def need_bytes(model: ModelFile, context_tokens: int, parallel: int) -> int:
    """Memory that the model takes on its device with `context_tokens` in total over `parallel` requests.

    Source: docs/spec/need.md.
    """
    return shared.need.need_bytes(
        file_size_bytes=model.file_size_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        compute_bytes=model.compute_bytes,
        context_tokens=context_tokens,
        parallel=parallel,
    )


def readiness_timeout_seconds(file_size_bytes: int, least_seconds: float = READINESS_LEAST_SECONDS) -> float:
    """How long a load may take: at least `least_seconds`, 120 s per GB for large models. Source: TRAPS 30."""
    return max(least_seconds, READINESS_SECONDS_PER_GB * file_size_bytes / 1e9)


def encoder_batch_tokens(trained_context_tokens: int) -> int:
    """Longest input of an embedding or reranking model, which it reads in one batch."""
    return min(trained_context_tokens or UBATCH_TOKENS, ENCODER_BATCH_LIMIT_TOKENS)


def combined_hash(part_hashes: Sequence[str]) -> str:
    """A model's identity from its parts' SHA-256 in hex: that of the only part, or of all digests in order."""
    if len(part_hashes) == 1:
        return part_hashes[0]
    return hashlib.sha256(b"".join(bytes.fromhex(part) for part in part_hashes)).hexdigest()


def _model_type(header: GgufHeader, architecture: str) -> ModelType:
    pooling = header.integer(f"{architecture}.pooling_type")
    if pooling == _POOLING_RANK:
        return "reranking"
    if architecture in _ENCODERS:
        # Older conversions of rerankers carry the classification head but no pooling type.
        headed = pooling is None and any(tensor.name.startswith("cls") for tensor in header.tensors)
        return "reranking" if headed else "embedding"
    return "llm" if pooling in (None, _POOLING_NONE) else "embedding"


def _quantization(header: GgufHeader) -> str:
    file_type = header.integer("general.file_type")
    return "unknown" if file_type is None else _FILE_TYPES.get(file_type & ~_FILE_TYPE_GUESSED, "unknown")


def _per_layer(header: GgufHeader, key: str, layers: int) -> list[int] | None:
    """A value given once or per layer, as a list of `layers` numbers."""
    value = header.metadata.get(key)
    if isinstance(value, GgufArray) and value.items is not None and value.length >= layers:
        return [max(0, int(item)) for item in value.items[:layers]]
    one = header.integer(key)
    return None if one is None else [max(0, one)] * layers


def _kv_bytes_per_token(header: GgufHeader, architecture: str, layers: int) -> int:
    if architecture in _ENCODERS:
        return 0
    attention = f"{architecture}.attention."
    heads = _per_layer(header, f"{architecture}.attention.head_count", layers)
    heads_kv = _per_layer(header, attention + "head_count_kv", layers) or heads
    if heads is None or heads_kv is None:
        return 0  # No attention at all: a state-space model keeps a state of fixed size instead.
    width = header.integer(f"{architecture}.embedding_length") or 0
    default = width // max(1, max(heads, default=1))
    key_length = header.integer(attention + "key_length")
    value_length = header.integer(attention + "value_length")
    per_head = max(0, default if key_length is None else key_length)
    per_head += max(0, default if value_length is None else value_length)
    return sum(heads_kv) * per_head * F16_BYTES


def _compute_bytes(header: GgufHeader, architecture: str, model_type: ModelType, context_tokens: int) -> int:
    """The larger of the output logits and one layer's activations, in f32, for one physical batch.

    llama.cpp's allocator reuses everything else. Measured: 258.5 MiB for Llama 3 8B, this gives 266.5.
    """
    width = max(0, header.integer(f"{architecture}.embedding_length") or 0)
    wide = max(_per_layer(header, f"{architecture}.feed_forward_length", 1) or [0])
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    vocabulary = tokens.length if isinstance(tokens, GgufArray) else 0
    layer = 2 * wide + 6 * width
    if model_type == "llm":
        return UBATCH_TOKENS * F32_BYTES * max(vocabulary + 2 * width, layer)
    return encoder_batch_tokens(context_tokens) * F32_BYTES * layer
