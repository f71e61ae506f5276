"""Which headers pass through in each direction, and the bytes of a request to an engine.

Source: DESIGN §8 (headers byte for byte except Authorization, Host and hop-by-hop); RFC 9110 §7.6.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"authorization",
    b"host",
    b"x-api-key",  # the client's word to us, as Authorization is
    b"content-length",  # written anew: a chunked body arrives whole at the engine
    b"expect",  # already answered
}
_OURS = frozenset({b"x-request-id", b"x-mesh-node", b"x-mesh-queue-ms", b"x-mesh-overhead-ms", b"x-mesh-attempts"})
_NOT_RETURNED = _HOP_BY_HOP | _OURS
_SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class IncomingHeaders:
    """What one pass over a request's headers finds."""

    content_type: bytes
    content_length: int | None
    request_id: bytes
    """The client's own, if it is a sane one, else empty."""
    origin: bool
    forwarded: bytes
    """The header lines that go to the engine, each with its line end."""


def read_headers(headers: Headers) -> IncomingHeaders:
    """One pass; names are in lower case, as ASGI gives them."""
    content_type = request_id = b""
    content_length: int | None = None
    origin = False
    named: set[bytes] | None = None
    lines: list[bytes] = []
    for name, value in headers:
        if name in _NOT_FORWARDED:
            if name == b"content-length":
                content_length = int(value)
            elif name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
                named = (named or set()) | {word.strip().lower() for word in value.split(b",")}
            continue
        if name == b"content-type":
            content_type = value
        elif name == b"x-request-id":
            if _SANE_REQUEST_ID.fullmatch(value):
                request_id = value
        elif name == b"origin":
            origin = True
        lines += (name, b": ", value, b"\r\n")
    if named:
        # Headers that Connection names are hop-by-hop too.
        kept = [(name, value) for name, value in headers if name not in _NOT_FORWARDED and name not in named]
        lines = [part for name, value in kept for part in (name, b": ", value, b"\r\n")]
    return IncomingHeaders(content_type, content_length, request_id, origin, b"".join(lines))


def engine_request(target: bytes, authority: bytes, api_key: str, forwarded: bytes, body_bytes: int) -> bytes:
    """The head of a POST to an engine."""
    key = b"authorization: Bearer %b\r\n" % api_key.encode("ascii") if api_key else b""
    return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b%bcontent-length: %d\r\n\r\n" % (
        target, authority, key, forwarded, body_bytes,
    )  # fmt: skip


def returned_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The engine's response headers that go to the client.

    Who may read an answer from a web page is decided here and not by an engine: its CORS headers are dropped.
    """
    kept = []
    for name, value in headers:
        lower = name.lower()
        if lower not in _NOT_RETURNED and not lower.startswith(b"access-control-"):
            kept.append((lower, value))
    return kept


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an answer with these headers is a stream of events."""
    for name, value in headers:
        if len(name) == 12 and name.lower() == b"content-type":
            return value[:17].lower() == b"text/event-stream"
    return False
