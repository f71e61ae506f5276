"""Heads of requests from peers: what may go to an engine, byte by byte and at random."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tunneld.http_request import HEAD_LIMIT_BYTES, RequestHead, RequestReader
from shared.errors import RequestRefused
from shared.inference_paths import INFERENCE_PATHS

HEAD = (
    b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\nX-Api-Key: secret\r\n"
    b"Content-Type: application/json\r\nConnection: keep-alive\r\nx-request-id: 7\r\nContent-Length: 2\r\n\r\n"
)


@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
def test_a_head_is_read_however_it_is_cut_up(step: int) -> None:
    reader = RequestReader()
    wire = HEAD + b"{}"
    head = None
    for at in range(0, len(wire), step):
        head = head or reader.feed(wire[at : at + step])
    assert head == RequestHead(
        b"/v1/chat/completions?x=1", b"Content-Type: application/json\r\nx-request-id: 7\r\n", 2
    )
    assert (reader.rest or b"{}").startswith(b"{") or step < 10_000


def test_the_engine_gets_its_own_key_and_nothing_of_the_senders() -> None:
    head = RequestReader().feed(HEAD)
    assert head is not None
    written = head.for_engine(b"127.0.0.1:9", "engine-key")
    assert written == (
        b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nhost: 127.0.0.1:9\r\nauthorization: Bearer engine-key\r\n"
        b"Content-Type: application/json\r\nx-request-id: 7\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"
    )
    assert b"secret" not in written


@pytest.mark.parametrize("path", INFERENCE_PATHS)
def test_every_inference_path_passes(path: str) -> None:
    head = RequestReader().feed(f"POST {path} HTTP/1.1\r\ncontent-length: 0\r\n\r\n".encode())
    assert head is not None
    assert head.target == path.encode()


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (b"POST /props HTTP/1.1\r\ncontent-length: 0\r\n\r\n", "not_allowed"),
        (b"POST /slots/0?action=erase HTTP/1.1\r\ncontent-length: 0\r\n\r\n", "not_allowed"),
        (b"POST /v1/chat/completions/../../props HTTP/1.1\r\ncontent-length: 0\r\n\r\n", "not_allowed"),
        (b"POST //v1/completions HTTP/1.1\r\ncontent-length: 0\r\n\r\n", "not_allowed"),
        (b"POST http://x/v1/completions HTTP/1.1\r\ncontent-length: 0\r\n\r\n", "not_allowed"),
        (b"GET /v1/completions HTTP/1.1\r\ncontent-length: 0\r\n\r\n", "not_allowed"),
        (b"GET /health HTTP/1.1\r\n\r\n", "not_allowed"),
        (b"POST /v1/completions HTTP/1.0\r\ncontent-length: 0\r\n\r\n", "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\n\r\n", "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\n", "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n", "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n", "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\nno colon\r\ncontent-length: 1\r\n\r\n", "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\nbad name: 1\r\ncontent-length: 1\r\n\r\n", "bad_request"),
        (b"POST /v1/completions HTTP/1.1\r\nx: a\nauthorization: b\r\ncontent-length: 1\r\n\r\n", "bad_request"),
        (b"\r\n\r\n", "bad_request"),
    ],
)
def test_whatever_else_is_refused(wire: bytes, code: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        RequestReader().feed(wire)
    assert refused.value.code == code


def test_an_endless_head_is_refused_in_time() -> None:
    reader = RequestReader()
    for _ in range(HEAD_LIMIT_BYTES // 1000):
        assert reader.feed(b"x" * 1000) is None
    with pytest.raises(RequestRefused, match="at most"):
        reader.feed(b"x" * 1000)


@given(st.lists(st.binary(max_size=200), max_size=10), st.booleans())
def test_random_bytes_only_ever_wait_or_are_refused(parts: list[bytes], with_end: bool) -> None:
    reader = RequestReader()
    try:
        for part in (*parts, b"\r\n\r\n" if with_end else b""):
            reader.feed(part)
    except RequestRefused:
        pass
