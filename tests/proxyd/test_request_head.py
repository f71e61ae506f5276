"""TRAPS 33: the model's name is found by a real parser, whatever else the body contains."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.proxyd.request_head import BadRequest, RequestHead, parse_head, session_key
from shared.ids import ModelName

JSON = b"application/json"
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.just("model") | st.text(max_size=8), inner),
    max_leaves=20,
)


@given(TREES, st.text(min_size=1, max_size=20), st.booleans(), st.booleans())
def test_only_the_outermost_model_counts(tree: object, model: str, stream: bool, first: bool) -> None:
    rest = {"messages": tree, "tools": [tree]}
    own = {"model": model, "stream": stream}
    body = json.dumps({**own, **rest} if first else {**rest, **own}).encode()
    assert parse_head(body, JSON) == RequestHead(ModelName(model), stream)


def test_the_last_of_two_keys_counts_as_in_the_engine() -> None:
    assert parse_head(b'{"model":"a","model":"b"}', JSON).model == "b"


@pytest.mark.parametrize("body", [b"{}", b'{"model":null}', b'{"model":""}', b'{"messages":[{"model":"m"}]}'])
def test_no_model(body: bytes) -> None:
    assert parse_head(body, JSON).model is None


@pytest.mark.parametrize("stream", [b'"true"', b"1", b"null", b"[true]"])
def test_only_true_streams(stream: bytes) -> None:
    assert parse_head(b'{"model":"m","stream":%b}' % stream, JSON).stream is False


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        (b"", "invalid_json", "no body"),
        (b"  ", "invalid_json", "no body"),
        (b"{", "invalid_json", "not valid JSON"),
        (b'{"model":"m"} trailing', "invalid_json", "not valid JSON"),
        (b"null", "invalid_json", "JSON object"),
        (b'"model"', "invalid_json", "JSON object"),
        (b'{"model":"\xff"}', "invalid_json", "not valid JSON"),
        (b'{"model":["m"]}', "invalid_type", "string"),
        (b'{"model":"%b"}' % (b"x" * 600), "invalid_value", "longer"),
        (b"[" * 100_000, "invalid_json", "recursion"),
    ],
)
def test_what_is_no_request(body: bytes, code: str, word: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_head(body, JSON)
    assert caught.value.code == code
    assert word in caught.value.message


def test_a_byte_order_mark_is_no_error() -> None:
    assert parse_head(b"\xef\xbb\xbf" + b'{"model":"m"}', JSON).model == "m"


@given(st.binary(max_size=200), st.sampled_from([JSON, b"", b"multipart/form-data; boundary=x", b"multipart/"]))
def test_random_bytes_only_ever_raise_bad_request(body: bytes, content_type: bytes) -> None:
    try:
        parse_head(body, content_type)
    except BadRequest:
        pass


def test_a_body_of_nine_megabytes_takes_milliseconds() -> None:
    body = json.dumps({"messages": [{"content": "x" * 1000}] * 9000, "model": "m"}).encode()
    started = time.perf_counter()
    assert parse_head(body, JSON).model == "m"
    assert time.perf_counter() - started < 0.2


def form(*fields: tuple[str, bytes], boundary: bytes = b"B") -> bytes:
    parts = [
        b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        % (boundary, name.encode(), b'; filename="a.wav"' if name == "file" else b"", value)
        for name, value in fields
    ]
    return b"".join(parts) + b"--%b--\r\n" % boundary


def test_a_form_names_its_model_in_a_field() -> None:
    audio = b'\x00\xff name="model"\r\n\r\nwrong\r\n'
    body = form(("file", audio), ("model", b"whisper"), ("stream", b"true"))
    assert parse_head(body, b'Multipart/Form-Data; boundary="B"') == RequestHead(ModelName("whisper"), True)


def test_a_preamble_before_a_form_is_skipped() -> None:
    body = b"preamble\r\n" + form(("model", b"m"))
    assert parse_head(body, b"multipart/form-data; boundary=B").model == "m"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(("model", b"m")), b"multipart/form-data"),
        (b"nothing", b"multipart/form-data; boundary=B"),
        (form(("model", b"m"))[:-10], b"multipart/form-data; boundary=B"),
        (form(*[("x", b"1")] * 100), b"multipart/form-data; boundary=B"),
        (form(("model", b"\xff")), b"multipart/form-data; boundary=B"),
    ],
)
def test_broken_forms(body: bytes, content_type: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_head(body, content_type)


def chat(*messages: tuple[str, str], **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in messages], **fields}).encode()


def test_a_conversation_keeps_its_session_as_it_grows() -> None:
    first = chat(("system", "s"), ("user", "one"))
    later = chat(("system", "s"), ("user", "one"), ("assistant", "a"), ("user", "two"))
    other = chat(("system", "s"), ("user", "other"))
    assert session_key(first) == session_key(later) != session_key(other)


def test_what_the_client_names_comes_first() -> None:
    assert session_key(chat(("user", "one"), user="u1")) == "u1"
    assert session_key(chat(("user", "one"), user="u1", prompt_cache_key="k")) == "k"
    assert session_key(b'{"metadata":{"user_id":"anthropic"},"messages":[]}') == "anthropic"


@pytest.mark.parametrize("body", [b"{}", b"[]", b"not json", b'{"messages":[]}', b'{"messages":{}}'])
def test_a_request_without_a_session(body: bytes) -> None:
    assert session_key(body) is None


@pytest.mark.parametrize("body", [b'{"prompt":"once upon"}', b'{"input":"x"}', b'{"input":[{"role":"user"}]}'])
def test_other_routes_have_sessions_too(body: bytes) -> None:
    assert session_key(body)
