"""The head of a request that a peer sends for an engine: read with limits, judged, written anew for the engine.

A peer is verified, and still nothing of what it sends is believed: one POST to a path of ``INFERENCE_PATHS`` with a
Content-Length; its own Authorization never reaches the engine, which gets launcherd's key instead.

Source: docs/spec/tunnel_http.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shared.errors import RequestRefused
from shared.inference_paths import INFERENCE_PATHS

HEAD_LIMIT_BYTES = 64 * 1024
_END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,8192}) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*([ \t\x21-\x7e\x80-\xff]*)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_NOT_FORWARDED = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
    }
)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request that may go to an engine. ``headers``: the lines that go with it, each with its end."""

    target: bytes
    headers: bytes
    content_length: int

    def for_engine(self, authority: bytes, api_key: str) -> bytes:
        """The head as the engine gets it; one request per connection, so that its end is seen."""
        key = b"authorization: Bearer %b\r\n" % api_key.encode("ascii") if api_key else b""
        return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b%bconnection: close\r\ncontent-length: %d\r\n\r\n" % (
            self.target, authority, key, self.headers, self.content_length,
        )  # fmt: skip


@dataclass(slots=True)
class RequestReader:
    """Collects a head. After :meth:`feed` returned it, ``rest`` is the beginning of the body."""

    rest: bytes = b""
    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> RequestHead | None:
        """The head once it is complete. Raises: RequestRefused as soon as it cannot become an acceptable one."""
        self._buffer += data
        end = self._buffer.find(_END)
        if end < 0:
            if len(self._buffer) > HEAD_LIMIT_BYTES:
                raise RequestRefused("head_too_large", f"a request head has at most {HEAD_LIMIT_BYTES} bytes")
            return None
        if end > HEAD_LIMIT_BYTES:
            raise RequestRefused("head_too_large", f"a request head has at most {HEAD_LIMIT_BYTES} bytes")
        head = _judge(bytes(self._buffer[:end]))
        self.rest = bytes(self._buffer[end + len(_END) :])
        self._buffer.clear()
        return head


def _judge(text: bytes) -> RequestHead:
    first, *lines = text.split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise RequestRefused("bad_request", "this is no HTTP/1.1 request line")
    target = line[2]
    path = target.partition(b"?")[0].decode("ascii")
    if path not in INFERENCE_PATHS:
        raise RequestRefused("not_allowed", f"peers may not use {path[:200]} of an engine")
    if line[1] != b"POST":
        raise RequestRefused("not_allowed", f"{path} takes POST only")
    kept: list[bytes] = []
    length: int | None = None
    for raw in lines:
        header = _HEADER.fullmatch(raw)
        if header is None:
            raise RequestRefused("bad_request", "a header line cannot be read")
        name = header[1].lower()
        if name == b"transfer-encoding":
            raise RequestRefused("bad_request", "between nodes a body has a Content-Length")
        if name == b"content-length":
            if length is not None or _LENGTH.fullmatch(header[2].strip()) is None:
                raise RequestRefused("bad_request", "the Content-Length cannot be read")
            length = int(header[2])
        if name not in _NOT_FORWARDED:
            kept.append(header[1] + b": " + header[2].strip(b" \t") + b"\r\n")
    if length is None:
        raise RequestRefused("bad_request", "the request has no Content-Length")
    return RequestHead(target, b"".join(kept), length)
