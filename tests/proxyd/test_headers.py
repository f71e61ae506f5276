"""What passes in each direction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.proxyd.headers import engine_request, is_event_stream, read_headers, returned_headers

NAME = st.sampled_from([b"accept", b"x-custom", b"cookie", b"accept-language", b"user-agent", b"content-type"])
VALUE = st.binary(max_size=20).filter(lambda value: b"\r" not in value and b"\n" not in value)


@given(st.lists(st.tuples(NAME, VALUE), max_size=10))
def test_end_to_end_headers_pass_in_order_with_repetitions(headers: list[tuple[bytes, bytes]]) -> None:
    lines = read_headers(headers).forwarded.split(b"\r\n")
    assert lines.pop() == b""
    assert lines == [name + b": " + value for name, value in headers]


def test_what_is_ours_or_hop_by_hop_stays_here() -> None:
    names = (
        b"authorization", b"x-api-key", b"host", b"content-length", b"transfer-encoding", b"connection", b"keep-alive",
        b"te", b"trailer", b"upgrade", b"expect", b"proxy-authorization", b"proxy-connection",
    )  # fmt: skip
    assert read_headers([(name, b"1") for name in names]).forwarded == b""


def test_headers_that_connection_names_stay_here_too() -> None:
    found = read_headers([(b"x-a", b"1"), (b"connection", b"close, X-A ,x-b"), (b"x-b", b"2"), (b"x-c", b"3")])
    assert found.forwarded == b"x-c: 3\r\n"


def test_what_routing_needs_is_found() -> None:
    own = [(b"content-type", b"application/json"), (b"content-length", b"12"), (b"x-request-id", b"abc")]
    found = read_headers([*own, (b"origin", b"o")])
    assert (found.content_type, found.content_length, found.request_id, found.origin) == (
        b"application/json", 12, b"abc", True,
    )  # fmt: skip


def test_a_request_to_an_engine() -> None:
    head = engine_request(b"/v1/x?y=1", b"127.0.0.1:5", "key", b"a: b\r\n", 7)
    assert head == (
        b"POST /v1/x?y=1 HTTP/1.1\r\nhost: 127.0.0.1:5\r\nauthorization: Bearer key\r\n"
        b"a: b\r\ncontent-length: 7\r\n\r\n"
    )
    assert b"authorization" not in engine_request(b"/", b"h", "", b"", 0)


def test_an_answers_headers() -> None:
    given_headers = [
        (b"Content-Type", b"text/event-stream"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Access-Control-Allow-Origin", b"*"),
        (b"X-Request-Id", b"engine"),
        (b"X-Engine", b"Kept"),
    ]
    assert returned_headers(given_headers) == [(b"content-type", b"text/event-stream"), (b"x-engine", b"Kept")]


def test_an_event_stream_is_known_by_its_type() -> None:
    assert is_event_stream([(b"x", b"y"), (b"Content-Type", b"Text/Event-Stream; charset=utf-8")])
    assert not is_event_stream([(b"Content-Type", b"application/json")])
    assert not is_event_stream([])
