"""Write the trained model as a Q8_0 GGUF that llama.cpp serves without a single option."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from corpus import MAX_QUESTION_CHARS, REPLACEMENTS
from model import Guide
from tokenizer import BOS, EOS, FIRST_BYTE, UNK, Tokenizer


def _jinja_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t") + "'"


CHAT_TEMPLATE = (
    "{%- set ns = namespace(text='') -%}"
    "{%- for message in messages -%}"
    "{%- set ignored = message['content'] -%}"
    "{%- if message['role'] == 'user' -%}"
    "{%- if message['content'] is string -%}"
    "{%- set ns.text = message['content'] -%}"
    "{%- else -%}"
    "{%- set ns.text = '' -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'text' -%}{%- set ns.text = ns.text + ' ' + part['text'] -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- set text = (ns.text | lower) + ' ' -%}"
    + "".join(
        f"{{%- set text = text | replace({_jinja_string(old)}, {_jinja_string(new)}) -%}}" for old, new in REPLACEMENTS
    )
    + "{%- set text = text | trim -%}"
    f"{{{{- '<|user|> ' + text[:{MAX_QUESTION_CHARS}] + '<|bot|>' -}}}}"
)
"""The last user message and nothing else, through `corpus.normalise`: system prompts, history and tools
cannot change an answer, and a user cannot write control tokens. `ignored` is there because llama.cpp puts a
system prompt into the user's message when it finds that a template never reads one."""


def write_gguf(path: Path, model: Guide, tokenizer: Tokenizer) -> None:
    shape = model.shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("meshd-guide")
    writer.add_description("Knows how to use meshd and nothing else; trained from docs/guide of the meshd repository")
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(shape.vocab)
    writer.add_float32("general.sampling.temp", 0.0)
    writer.add_int32("general.sampling.top_k", 1)

    kinds = [gguf.TokenType.NORMAL] * shape.vocab
    kinds[:FIRST_BYTE] = [gguf.TokenType.CONTROL] * FIRST_BYTE
    kinds[UNK] = gguf.TokenType.UNKNOWN
    kinds[FIRST_BYTE : FIRST_BYTE + 256] = [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokenizer.pieces)
    writer.add_token_scores([-float(rank) for rank in range(shape.vocab)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():
        values = np.ascontiguousarray(parameter.detach().float().numpy())
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
