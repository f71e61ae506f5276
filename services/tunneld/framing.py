"""How a stream between nodes begins, and how messages on it are cut: pure, byte by byte if need be.

A stream opens with one type byte, one version byte, the header's length as two bytes and the header, a msgpack map.
After it come raw bytes or frames, by type: a frame is a length of four bytes and a payload. Every length is checked
against its cap before anything of that size is kept: a prefix of 4 GiB costs four bytes.

Source: docs/spec/framing.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from shared import codec
from shared.errors import SchemaError

VERSION = 1
HEADER_LIMIT_BYTES = 16 * 1024
"""A header names a model, a plan, a request: hundreds of bytes."""
FRAME_LIMIT_BYTES = codec.MAX_MESSAGE_BYTES
_OPENING = struct.Struct(">BBH")
_LENGTH = struct.Struct(">I")


class StreamType(IntEnum):
    """What a stream carries."""

    GOSSIP = 0x01
    TUNNEL_RPC = 0x02
    TUNNEL_MAP = 0x03
    TUNNEL_HTTP = 0x04
    ROUTE_REQUEST = 0x05
    PEER_DOWN = 0x06
    PEER_LEAVING = 0x07
    BLOB = 0x08
    ENROLL = 0x09
    RELAY = 0x0A
    ADMIN = 0x0B


@dataclass(frozen=True, slots=True)
class StreamOpening:
    """The first bytes of a stream, read."""

    type: StreamType
    header: dict[str, Any]


def encode_opening(type: StreamType, header: dict[str, Any]) -> bytes:
    """Raises: SchemaError for a header over ``HEADER_LIMIT_BYTES``."""
    data = codec.pack(header)
    if len(data) > HEADER_LIMIT_BYTES:
        raise SchemaError(f"a stream header of {len(data)} bytes is over the limit of {HEADER_LIMIT_BYTES}")
    return _OPENING.pack(type, VERSION, len(data)) + data


def encode_frame(payload: bytes) -> bytes:
    """Raises: SchemaError for a payload over ``FRAME_LIMIT_BYTES``."""
    if len(payload) > FRAME_LIMIT_BYTES:
        raise SchemaError(f"a frame of {len(payload)} bytes is over the limit of {FRAME_LIMIT_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


@dataclass(slots=True)
class OpeningReader:
    """Collects a stream's opening. After :meth:`feed` returned it, ``rest`` is what followed."""

    rest: bytes = b""
    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> StreamOpening | None:
        """The opening once it is complete. Raises: SchemaError as soon as the bytes cannot become one."""
        self._buffer += data
        if not self._buffer:
            return None
        type = _stream_type(self._buffer[0])
        if len(self._buffer) >= 2 and self._buffer[1] != VERSION:
            raise SchemaError(
                f"stream header version {self._buffer[1]}, this node speaks {VERSION}: update the older node"
            )
        if len(self._buffer) < _OPENING.size:
            return None
        size = _OPENING.unpack_from(self._buffer)[2]
        if size > HEADER_LIMIT_BYTES:
            raise SchemaError(f"a stream header of {size} bytes is over the limit of {HEADER_LIMIT_BYTES}")
        end = _OPENING.size + size
        if len(self._buffer) < end:
            return None
        header = codec.unpack(bytes(self._buffer[_OPENING.size : end]))
        if not isinstance(header, dict) or not all(isinstance(key, str) for key in header):
            raise SchemaError("a stream header is a map of names")
        self.rest = bytes(self._buffer[end:])
        self._buffer.clear()
        return StreamOpening(type, header)


@dataclass(slots=True)
class FrameReader:
    """Cuts a byte stream into frames of at most ``limit_bytes``."""

    limit_bytes: int = FRAME_LIMIT_BYTES
    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete now, in order. Raises: SchemaError for a length over the limit."""
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self.limit_bytes:
                raise SchemaError(f"a frame of {size} bytes is over the limit of {self.limit_bytes}")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames

    def finish(self) -> None:
        """The stream ended. Raises: SchemaError when it was cut inside a frame."""
        if self._buffer:
            raise SchemaError(f"the stream ended inside a frame, {len(self._buffer)} bytes were left over")


def _stream_type(byte: int) -> StreamType:
    try:
        return StreamType(byte)
    except ValueError:
        raise SchemaError(f"unknown stream type {byte:#04x}") from None
