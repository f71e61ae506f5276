"""Light framing inside TLS, which has no half-close of its own that everybody's TLS supports: pure.

A direction of a stream is a row of chunks, each a length of four bytes and so many bytes. Length 0 is the direction's
clean end; ``0xFFFFFFFF`` and a short reason cut the whole stream. After both directions' ends the same connection
carries the next stream. Chunks are passed on as they come, in pieces: nothing waits for a whole one.

Source: docs/spec/transport.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from shared.errors import SchemaError

CHUNK_LIMIT_BYTES = 16 * 1024 * 1024
CUT = 0xFFFF_FFFF
REASON_LIMIT_BYTES = 1024
_LENGTH = struct.Struct(">I")
END_BYTES = _LENGTH.pack(0)


@dataclass(frozen=True, slots=True)
class End:
    """The direction ended cleanly."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The stream was cut."""

    reason: str


END = End()
Piece = bytes | End | Cut


def encode_chunk(data: bytes) -> bytes:
    """``data`` is not empty and at most ``CHUNK_LIMIT_BYTES``."""
    return _LENGTH.pack(len(data)) + data


def encode_cut(reason: str) -> bytes:
    text = reason.encode("utf-8", "replace")[:REASON_LIMIT_BYTES]
    return _LENGTH.pack(CUT) + struct.pack(">H", len(text)) + text


class ChunkReader:
    """Takes a connection's bytes apart."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the present chunk still to come."""
        self._head = b""
        """A beginning too short to be understood."""

    def feed(self, data: bytes) -> list[Piece]:
        """Everything that ``data`` brought, in order. Raises: SchemaError for a length over the limit."""
        if not self._head and len(data) <= self._left:
            self._left -= len(data)
            return [data] if data else []
        pieces: list[Piece] = []
        if self._head:
            data = self._head + data
            self._head = b""
        at, size = 0, len(data)
        while at < size:
            if self._left:
                part = data[at : at + self._left]
                pieces.append(part)
                at += len(part)
                self._left -= len(part)
                continue
            if size - at < 4:
                break
            (length,) = _LENGTH.unpack_from(data, at)
            if length == CUT:
                reason = _reason(data, at + 4)
                if reason is None:
                    break
                pieces.append(Cut(reason))
                return pieces
            if length > CHUNK_LIMIT_BYTES:
                raise SchemaError(f"a chunk of {length} bytes is over the limit of {CHUNK_LIMIT_BYTES}")
            at += 4
            if length == 0:
                pieces.append(END)
            self._left = length
        self._head = data[at:]
        return pieces


def _reason(data: bytes, at: int) -> str | None:
    """The reason of a cut, None while it is incomplete. Raises: SchemaError."""
    if len(data) < at + 2:
        return None
    length = int.from_bytes(data[at : at + 2])
    if length > REASON_LIMIT_BYTES:
        raise SchemaError(f"a reason of {length} bytes is over the limit of {REASON_LIMIT_BYTES}")
    if len(data) < at + 2 + length:
        return None
    return data[at + 2 : at + 2 + length].decode("utf-8", "replace")
