"""The built-in catalog: well-known models in GGUF, from 0.3 to 63 GB, by the repositories that publish them.

Sizes are not written here: the hub says them when a model is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import ModelName
from shared.messages.models import ModelType


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model that the registry knows."""

    name: ModelName
    checkpoint: str
    """As `model_source.checkpoint_of` spells it; for other engines than llama.cpp also a path or their own name."""
    recipe: str = "llamacpp"
    type: ModelType = "llm"
    labels: tuple[str, ...] = ()
    mmproj: str = ""
    user: bool = False


def _model(name: str, checkpoint: str, *labels: str, type: ModelType = "llm", mmproj: str = "") -> Entry:
    return Entry(name=ModelName(name), checkpoint=checkpoint, type=type, labels=labels, mmproj=mmproj)


CATALOG: tuple[Entry, ...] = (
    _model("gemma-3-270m-it", "unsloth/gemma-3-270m-it-GGUF:Q8_0"),
    _model("Qwen3-0.6B", "Qwen/Qwen3-0.6B-GGUF:Q8_0", "reasoning", "tool-calling"),
    _model("Llama-3.2-1B-Instruct", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", "tool-calling"),
    _model("SmolLM3-3B", "ggml-org/SmolLM3-3B-GGUF:Q4_K_M", "reasoning", "tool-calling"),
    _model("gemma-3-4b-it", "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "vision", mmproj="mmproj-model-f16.gguf"),
    _model("Qwen3-4B", "Qwen/Qwen3-4B-GGUF:Q4_K_M", "reasoning", "tool-calling"),
    _model("Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", "coding"),
    _model("Llama-3.1-8B-Instruct", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", "tool-calling"),
    _model("Qwen3-8B", "Qwen/Qwen3-8B-GGUF:Q4_K_M", "reasoning", "tool-calling"),
    _model("gpt-oss-20b", "ggml-org/gpt-oss-20b-GGUF:MXFP4", "reasoning", "tool-calling"),
    _model("Qwen3-30B-A3B-Instruct-2507", "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M", "tool-calling"),
    _model("Llama-3.3-70B-Instruct", "bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M", "tool-calling"),
    _model("gpt-oss-120b", "ggml-org/gpt-oss-120b-GGUF:MXFP4", "reasoning", "tool-calling"),
    _model("nomic-embed-text-v1.5", "nomic-ai/nomic-embed-text-v1.5-GGUF:Q8_0", "embeddings", type="embedding"),
    _model("Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-0.6B-GGUF:Q8_0", "embeddings", type="embedding"),
    _model("bge-reranker-v2-m3", "gpustack/bge-reranker-v2-m3-GGUF:Q8_0", "reranking", type="reranking"),
)
