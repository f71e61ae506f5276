"""What models are and need, computed from headers alone."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from services.launcherd.gguf import GgufArray, GgufHeader, TensorInfo, Value
from services.launcherd.model_info import (
    FileFacts,
    ModelFile,
    build_model,
    combined_hash,
    encoder_batch_tokens,
    file_facts,
    need_bytes,
    readiness_timeout_seconds,
    split_part_name,
)
from shared.errors import ModelFileBroken


def header(architecture: str = "llama", tensors: tuple[str, ...] = ("w",), **keys: Value) -> GgufHeader:
    """A header with `block_count` 2; `a__b` stands for `architecture.a.b`, `general__x` for itself."""
    metadata: dict[str, Value] = {"general.architecture": architecture, f"{architecture}.block_count": 2}
    for name, value in keys.items():
        dotted = name.replace("__", ".")
        own = dotted.startswith(("general.", "tokenizer.", "split."))
        metadata[dotted if own else f"{architecture}.{dotted}"] = value
    infos = tuple(TensorInfo(name, (10, 3), 0, 0) for name in tensors)
    return GgufHeader(version=3, metadata=metadata, tensors=infos, header_bytes=1, weights_end_bytes=1)


LLAMA_8B: dict[str, Any] = {
    "block_count": 32,
    "context_length": 8192,
    "embedding_length": 4096,
    "feed_forward_length": 14336,
    "attention__head_count": 32,
    "attention__head_count_kv": 8,
    "general__file_type": 15,
    "tokenizer__ggml__tokens": GgufArray(128_256, None),
    "tokenizer__chat_template": "{{ x }}",
}


def facts(**changes: Any) -> FileFacts:
    return replace(file_facts(header(**LLAMA_8B)), **changes)


def test_a_llama_8b_has_its_known_numbers() -> None:
    known = facts()
    assert known.type == "llm"
    assert known.kv_bytes_per_token == 128 * 1024
    assert known.trained_context_tokens == 8192
    assert known.quantization == "Q4_K_M"
    assert known.chat_template
    assert known.parameters == 30
    assert 258 * 2**20 < known.compute_bytes < 280 * 2**20


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (header("llama"), "llm"),
        (header("qwen3", pooling_type=3), "embedding"),
        (header("qwen3", pooling_type=4), "reranking"),
        (header("llama", pooling_type=0), "llm"),
        (header("bert"), "embedding"),
        (header("bert", pooling_type=1), "embedding"),
        (header("nomic-bert"), "embedding"),
        (header("bert", pooling_type=4), "reranking"),
        (header("bert", tensors=("w", "cls.weight")), "reranking"),
        (header("bert", tensors=("w", "cls.weight"), pooling_type=2), "embedding"),
    ],
)
def test_the_type_follows_from_architecture_and_pooling(found: GgufHeader, expected: str) -> None:
    assert file_facts(found).type == expected


def test_kv_counts_heads_per_layer_and_explicit_lengths() -> None:
    found = header(
        attention__head_count=8,
        attention__head_count_kv=GgufArray(2, (4, 0)),
        attention__key_length=192,
        attention__value_length=128,
        embedding_length=1024,
    )
    assert file_facts(found).kv_bytes_per_token == 4 * (192 + 128) * 2


def test_kv_falls_back_to_the_heads_and_to_nothing() -> None:
    assert file_facts(header(attention__head_count=8, embedding_length=64)).kv_bytes_per_token == 2 * 8 * 16 * 2
    assert file_facts(header("mamba")).kv_bytes_per_token == 0
    assert file_facts(header("bert", attention__head_count=8, embedding_length=64)).kv_bytes_per_token == 0


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (header(""), "no architecture"),
        (header("clip"), "projector"),
        (header(general__type="mmproj"), "projector"),
        (header(general__type="adapter"), "'adapter'"),
        (header(tensors=()), "no weights"),
        (header(block_count="many"), "how many layers"),
        (header(block_count=1 << 40), "layers"),
    ],
)
def test_what_is_no_model_is_refused_with_a_reason(found: GgufHeader, reason: str) -> None:
    with pytest.raises(ModelFileBroken, match=reason):
        file_facts(found)


@pytest.mark.parametrize(
    "keys",
    [
        {"attention__head_count": -8, "embedding_length": -64},
        {"attention__head_count": 0, "embedding_length": 64},
        {"attention__head_count": GgufArray(5000, None)},
        {"attention__head_count": GgufArray(1, (3,)), "attention__key_length": -1},
        {"feed_forward_length": GgufArray(0, ())},
        {"context_length": -1, "general__file_type": 12345},
        {"context_length": "long", "pooling_type": "all"},
    ],
)
def test_nonsense_in_a_header_never_gives_negative_numbers(keys: dict[str, Any]) -> None:
    found = file_facts(header(**keys))
    assert min(found.kv_bytes_per_token, found.compute_bytes, found.trained_context_tokens) >= 0


@pytest.mark.parametrize(
    ("name", "stem", "number", "count"),
    [
        ("model.gguf", "model", 1, 1),
        ("model-00002-of-00003.gguf", "model", 2, 3),
        ("model-2-of-3.gguf", "model-2-of-3", 1, 1),
        ("a-00001-of-00002-00002-of-00002.GGUF", "a-00001-of-00002", 2, 2),
    ],
)
def test_part_names(name: str, stem: str, number: int, count: int) -> None:
    part = split_part_name(name)
    assert (part.stem, part.number, part.count) == (stem, number, count)


def test_parts_are_one_model() -> None:
    """TRAPS 17: model files in several parts are one model."""
    first = facts(split_count=2)
    second = facts(split_count=2, split_number=1, kv_bytes_per_token=0, trained_context_tokens=0)
    model = build_model("m", [("/x/m-00001-of-00002.gguf", 5, first), ("/x/m-00002-of-00002.gguf", 7, second)])
    assert (model.file_size_bytes, model.parameters, model.kv_bytes_per_token) == (12, 60, 128 * 1024)
    assert model.path == model.parts[0] == "/x/m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    "second",
    [facts(split_count=2, split_number=0), facts(), facts(split_count=2, split_number=1, architecture="qwen3")],
)
def test_parts_that_do_not_belong_together_are_refused(second: FileFacts) -> None:
    with pytest.raises(ModelFileBroken):
        build_model("m", [("/x/1", 5, facts(split_count=2)), ("/x/2", 7, second)])


def test_a_part_alone_is_not_a_model() -> None:
    with pytest.raises(ModelFileBroken, match="part 2 of 3"):
        build_model("m", [("/x/renamed.gguf", 5, facts(split_count=3, split_number=1))])


def model(size: int = 1000, kv: int = 10, compute: int = 100) -> ModelFile:
    known = build_model("m", [("/m.gguf", size, facts())])
    return replace(known, kv_bytes_per_token=kv, compute_bytes=compute)


def test_need_is_the_larger_of_a_tenth_more_and_cache_plus_buffers() -> None:
    """DESIGN §6: max(1.1 × file size, file size + KV cache for context × parallel + compute buffers)."""
    assert need_bytes(model(size=1_000_000), 512, 1) == 1_100_000
    assert need_bytes(model(size=1000), 1024, 4) == 1000 + 1024 * 10 + 100


def test_need_counts_the_context_as_llama_server_rounds_it() -> None:
    """`-c 1000 -np 3` gives each request 512 tokens."""
    assert need_bytes(model(size=1000), 1000, 3) == 1000 + 3 * 512 * 10 + 100
    assert need_bytes(model(size=7), 0, 1) == 7 + 100


def test_readiness_grows_with_the_file() -> None:
    """TRAPS 30: max(600 s, 120 s/GB)."""
    assert readiness_timeout_seconds(10**9) == 600
    assert readiness_timeout_seconds(70 * 10**9) == 8400
    assert readiness_timeout_seconds(0, least_seconds=5) == 5


def test_encoders_read_what_they_were_trained_for() -> None:
    assert [encoder_batch_tokens(tokens) for tokens in (0, 512, 8192, 40_960)] == [512, 512, 8192, 8192]


def test_the_hash_of_one_file_is_its_own_and_depends_on_order() -> None:
    one, two = (hashlib.sha256(text).hexdigest() for text in (b"1", b"2"))
    assert combined_hash([one]) == one
    assert len({combined_hash([one, two]), combined_hash([two, one]), one, two}) == 4
