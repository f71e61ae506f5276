"""Writes real GGUF models of a few hundred kilobytes, for tests that run a real engine.

The models are random, but not arbitrary: at temperature 0 they speak whole English words, never stop by
themselves (so `max_tokens` decides the length), and their text tokenizes back to the tokens that made it, so
that a continued generation can be compared with an unbroken one. The same seed gives the same file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

WORDS = """
able acid aged also area army away baby back ball band bank base bath bear beat bell belt best bird blow
blue boat body bond bone book born both bowl bulk burn bush busy cake calm came camp card care case cash
cast cell chat chip city clay club coal coat code cold come cook cool cope copy core cost crew crop dark
data dawn days dead deal dean dear debt deep deny desk dial diet dirt disc disk done door dose down draw
dust duty each earn ease east easy edge else even ever evil exit face fact fair fall farm fast fate fear
""".split()  # noqa: SIM905 - a hundred quoted words are harder to read

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


@dataclass(frozen=True, kw_only=True)
class TinySize:
    """Shape of a tiny model. `LARGE` is about 28 MB in f32 and near a thousand tokens a second on one core."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    feed_forward: int = 128
    context_tokens: int = 4096


SMALL = TinySize()
LARGE = TinySize(width=256, layers=8, heads=8, feed_forward=688, context_tokens=8192)


def write_llm(
    path: Path,
    *,
    name: str = "tiny-llm",
    seed: int = 1,
    size: TinySize = SMALL,
    vocabulary_padding: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Writes a llama-architecture model; other seeds speak other words. Padding adds unused tokens."""
    rng = np.random.default_rng(seed)
    tokens, scores, types, spoken = _spm_vocabulary(vocabulary_padding)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    writer.add_context_length(size.context_tokens)
    writer.add_embedding_length(size.width)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.feed_forward)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(max(1, size.heads // 2))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size.width // size.heads)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    if chat_template is not None:
        writer.add_chat_template(chat_template)

    kv_width = size.width // size.heads * max(1, size.heads // 2)
    add = _adder(writer, rng)
    add("token_embd.weight", (len(tokens), size.width), 1.0)
    output = np.zeros((len(tokens), size.width), dtype=np.float32)
    # Rows of zeros for everything but words: the largest logit of a hundred random ones is always above zero,
    # so greedy decoding never says a control or byte token.
    output[spoken] = rng.standard_normal((len(spoken), size.width), dtype=np.float32)
    writer.add_tensor("output.weight", output)
    add("output_norm.weight", (size.width,), None)
    scale = size.width**-0.5
    for layer in range(size.layers):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", (size.width,), None)
        add(block + "ffn_norm.weight", (size.width,), None)
        add(block + "attn_q.weight", (size.width, size.width), scale)
        add(block + "attn_k.weight", (kv_width, size.width), scale)
        add(block + "attn_v.weight", (kv_width, size.width), scale)
        add(block + "attn_output.weight", (size.width, size.width), scale)
        add(block + "ffn_gate.weight", (size.feed_forward, size.width), scale)
        add(block + "ffn_up.weight", (size.feed_forward, size.width), scale)
        add(block + "ffn_down.weight", (size.width, size.feed_forward), size.feed_forward**-0.5)
    _finish(writer)
    return path


def write_embedding(path: Path, *, name: str = "tiny-embedding", seed: int = 1, size: TinySize = SMALL) -> Path:
    """Writes a BERT with mean pooling, for `/v1/embeddings`."""
    return _write_bert(path, name=name, seed=seed, size=size, pooling=gguf.PoolingType.MEAN)


def write_reranking(path: Path, *, name: str = "tiny-reranking", seed: int = 1, size: TinySize = SMALL) -> Path:
    """Writes a BERT with a classification head and rank pooling, for `/v1/rerank`."""
    return _write_bert(path, name=name, seed=seed, size=size, pooling=gguf.PoolingType.RANK)


def write_parts(folder: Path, stem: str, source: Path, *, parts: int = 3) -> list[Path]:
    """Splits a model as `gguf-split` does: `stem-00001-of-0000N.gguf` and on, the first with all the metadata."""
    reader = gguf.GGUFReader(str(source))
    tensors = list(reader.tensors)
    share = -(-len(tensors) // parts)
    paths = []
    for number in range(parts):
        path = folder / f"{stem}-{number + 1:05}-of-{parts:05}.gguf"
        architecture = reader.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(str(path), architecture)
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    kind = field.types[0]
                    item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[number * share : (number + 1) * share]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        _finish(writer)
        paths.append(path)
    return paths


def _write_bert(path: Path, *, name: str, seed: int, size: TinySize, pooling: gguf.PoolingType) -> Path:
    rng = np.random.default_rng(seed)
    tokens, types = _wordpiece_vocabulary()
    context_tokens = 512
    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_name(name)
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(size.width)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.feed_forward)
    writer.add_head_count(size.heads)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(tokens))
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)

    add = _adder(writer, rng)
    width, scale = size.width, size.width**-0.5
    add("token_embd.weight", (len(tokens), width), 1.0)
    add("token_types.weight", (2, width), 0.1)
    add("position_embd.weight", (context_tokens, width), 0.1)
    _add_norm(add, "token_embd_norm", width)
    for layer in range(size.layers):
        block = f"blk.{layer}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}{part}.weight", (width, width), scale)
            add(f"{block}{part}.bias", (width,), 0.02)
        _add_norm(add, block + "attn_output_norm", width)
        add(block + "ffn_up.weight", (size.feed_forward, width), scale)
        add(block + "ffn_up.bias", (size.feed_forward,), 0.02)
        add(block + "ffn_down.weight", (width, size.feed_forward), size.feed_forward**-0.5)
        add(block + "ffn_down.bias", (width,), 0.02)
        _add_norm(add, block + "layer_output_norm", width)
    if pooling == gguf.PoolingType.RANK:
        add("cls.weight", (width, width), scale)
        add("cls.bias", (width,), 0.02)
        add("cls.output.weight", (1, width), scale)
        add("cls.output.bias", (1,), 0.02)
    _finish(writer)
    return path


_Add = Callable[[str, tuple[int, ...], float | None], None]


def _adder(writer: gguf.GGUFWriter, rng: np.random.Generator) -> _Add:
    def add(name: str, shape: tuple[int, ...], scale: float | None) -> None:
        """`scale` is the standard deviation; None means ones."""
        data: NDArray[np.float32] = np.ones(shape, dtype=np.float32)
        if scale is not None:
            data = (rng.standard_normal(shape, dtype=np.float32) * scale).astype(np.float32)
        writer.add_tensor(name, data)

    return add


def _add_norm(add: _Add, name: str, width: int) -> None:
    add(name + ".weight", (width,), None)
    add(name + ".bias", (width,), 0.02)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _spm_vocabulary(padding: int) -> tuple[list[str], list[float], list[int], list[int]]:
    """Tokens, scores, types, and the ids that the model may say.

    Every prefix of a word is a token, because the tokenizer builds a word by joining neighbours one at a time.
    """
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256
    prefixes = dict.fromkeys("▁" + word[:length] for word in WORDS for length in range(1, len(word) + 1))
    tokens += ["▁", *prefixes, *(chr(code) for code in range(33, 127))]
    spoken = [tokens.index("▁" + word) for word in WORDS]
    tokens += [f"<pad{number}>" for number in range(padding)]
    types += [_NORMAL] * (len(tokens) - len(types))
    scores = [float(len(token)) if token.startswith("▁") else 0.0 for token in tokens]
    return tokens, scores, types, spoken


def _wordpiece_vocabulary() -> tuple[list[str], list[int]]:
    """BERT tokens as llama.cpp stores them: a word's start carries U+2581, a continuation nothing."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(33, 127)]
    tokens = [*special, *("▁" + letter for letter in letters), *letters, *("▁" + word for word in WORDS)]
    return tokens, [_CONTROL] * len(special) + [_NORMAL] * (len(tokens) - len(special))
