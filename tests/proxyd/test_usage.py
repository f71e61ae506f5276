"""Token counts are read from real llama.cpp answers, and from nothing that only looks like them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.proxyd.usage import KEPT_BYTES, BodyEnds, Usage, read_usage

CHAT = (
    b'{"choices":[{"finish_reason":"length","index":0,"message":{"role":"assistant","content":"a"}}],"created":1,'
    b'"usage":{"completion_tokens":20,"prompt_tokens":6,"total_tokens":26,"prompt_tokens_details":{"cached_tokens":0}},'
    b'"id":"x","timings":{"cache_n":0,"prompt_n":6,"prompt_ms":0.507,"predicted_n":20,"predicted_per_second":135.5}}'
)
STREAM_END = (
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"timings":{"cache_n":4,"prompt_n":2,'
    b'"predicted_n":7,"predicted_ms":1.4,"predicted_per_second":5e2}}\n\ndata: [DONE]\n\n'
)
MESSAGES = (
    b'{"id":"c","type":"message","content":[{"type":"text","text":"m"}],"usage":{"cache_read_input_tokens":5,'
    b'"input_tokens":1,"output_tokens":20}}'
)
MESSAGE_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"cache_read_input_tokens":5,'
    b'"input_tokens":1,"output_tokens":0}}}\n\n'
)
MESSAGE_END = (
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":4}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
RESPONSE = b'{"usage":{"input_tokens":6,"output_tokens":8,"input_tokens_details":{"cached_tokens":5}}}'
EMBEDDING = b'{"data":[{"embedding":[0.1]}],"usage": {"prompt_tokens": 3, "total_tokens": 3}}'


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([CHAT], Usage(6, 20, 135.5, 0, 0.000507)),
        ([b'data: {"choices":[]}\n\n', STREAM_END], Usage(6, 7, 500.0, 4)),
        ([MESSAGES], Usage(6, 20, None, 5)),
        ([MESSAGE_START, b"x" * 100, MESSAGE_END], Usage(6, 4, None, 5)),
        ([RESPONSE], Usage(6, 8, None, 5)),
        ([EMBEDDING], Usage(3, None, None)),
        ([b'{"object":"list"}'], Usage()),
        ([], Usage()),
    ],
)
def test_what_llama_cpp_says_is_understood(parts: list[bytes], expected: Usage) -> None:
    ends = BodyEnds()
    for part in parts:
        ends.add(part)
    assert ends.usage() == expected


def test_text_that_quotes_a_usage_object_is_not_believed() -> None:
    text = '"usage":{"completion_tokens":999,"prompt_tokens":999}'
    body = json.dumps({"usage": {"completion_tokens": 2, "prompt_tokens": 1}, "content": text}).encode()
    assert read_usage(body, body) == Usage(1, 2, None)


@given(st.lists(st.binary(max_size=40_000), max_size=8))
def test_the_ends_of_any_body_are_kept_in_bounded_memory(parts: list[bytes]) -> None:
    ends = BodyEnds()
    for part in parts:
        ends.add(part)
    whole = b"".join(parts)
    assert ends.last == whole[-KEPT_BYTES:]
    assert whole.startswith(ends.first)
    assert len(ends.first) <= KEPT_BYTES


@pytest.mark.parametrize(
    "usage", ["null", "[]", '"text"', '{"prompt_tokens":null}', '{"prompt_tokens":"6"}', '{"prompt_tokens":1e400}']
)
def test_what_an_engine_says_wrongly_is_not_believed(usage: str) -> None:
    body = b'{"usage":' + usage.encode() + b"}"
    assert read_usage(body, body) == Usage()


def test_searching_finds_what_parsing_finds() -> None:
    for body in (CHAT, MESSAGES, RESPONSE, EMBEDDING):
        assert read_usage(body, body) == read_usage(b"{", body)


@given(st.binary(max_size=300))
def test_no_bytes_whatsoever_break_it(noise: bytes) -> None:
    read_usage(noise, b'"usage":' + noise)
