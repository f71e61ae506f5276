"""Reads the header of a GGUF file: what the model is, without touching its weights.

A header is `magic | version u32 | tensor count u64 | key count u64 | keys and values | tensor infos`, and the
weights follow, aligned. Vocabularies make headers megabytes long; they are stepped over, not built. The file
may come from anywhere, so every count and length is checked against the bytes that exist and against limits,
and the only error that leaves this module is ModelFileBroken.

Source: the GGUF specification of ggml (versions 2 and 3); TRAPS 44.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.errors import ModelFileBroken

ReadAt = Callable[[int, int], bytes]
"""`read_at(offset, length)` returns that many bytes, or fewer where the file ends."""

WINDOW_BYTES = 1 << 20
MAX_KEYS = 4096
MAX_TENSORS = 100_000
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 256
MAX_DIMENSIONS = 4
MAX_NESTING = 2
KEPT_STRING_BYTES = 1 << 20
"""Longer strings (an embedded tokenizer.json) are stepped over."""
KEPT_ITEMS = 1024
"""Longer number arrays are stepped over; per-layer values are shorter."""
MAX_STRINGS = 4_000_000
"""Over all arrays of one file. The largest vocabularies have a quarter of a million tokens."""

_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    16: (256, 66),
    17: (256, 74),
    18: (256, 98),
    19: (256, 50),
    20: (32, 18),
    21: (256, 110),
    22: (256, 82),
    23: (256, 136),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    29: (256, 56),
    30: (1, 2),
    34: (256, 54),
    35: (256, 66),
    39: (32, 17),
}
"""ggml type -> (weights per block, bytes per block). Types newer than this list are not measured."""


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array value. `items` is None where it was only counted."""

    length: int
    items: tuple[int | float | bool, ...] | None


@dataclass(frozen=True, slots=True)
class GgufLongText:
    """A string too long to keep."""

    size_bytes: int


Value = int | float | bool | str | GgufArray | GgufLongText


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor; `shape` as stored, fastest dimension first; `offset` from the start of the weights."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product

    @property
    def size_bytes(self) -> int | None:
        """None for a type this module does not know."""
        block = _BLOCKS.get(self.kind)
        return None if block is None else -(-self.elements // block[0]) * block[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """All of a header. `weights_end_bytes` is the least size that the whole file must have."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    header_bytes: int
    weights_end_bytes: int

    def integer(self, key: str) -> int | None:
        """The value of `key` if it is an integer, or the only item of an array of one."""
        value = self.metadata.get(key)
        if isinstance(value, GgufArray) and value.items is not None and value.length == 1:
            value = value.items[0]
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None


def parse_header(read_at: ReadAt, file_size_bytes: int) -> GgufHeader:
    """Reads the header of one file.

    Raises: ModelFileBroken with the reason; errors of `read_at` pass through.
    """
    cursor = _Cursor(read_at, file_size_bytes)
    version = _read_preamble(cursor)
    tensor_count = cursor.count(MAX_TENSORS, "tensors", least_bytes=24)
    key_count = cursor.count(MAX_KEYS, "keys", least_bytes=13)
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.name(MAX_KEY_BYTES, "key")
        if key in metadata:
            raise ModelFileBroken(f"broken GGUF header: the key {key!r} appears twice")
        metadata[key] = _read_value(cursor, cursor.number(_U32))
    tensors = tuple(_read_tensor(cursor) for _ in range(tensor_count))
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelFileBroken("broken GGUF header: a tensor name appears twice")
    header = GgufHeader(
        version=version,
        metadata=metadata,
        tensors=tensors,
        header_bytes=cursor.position,
        weights_end_bytes=_weights_end(cursor.position, metadata, tensors),
    )
    if header.weights_end_bytes > file_size_bytes:
        raise ModelFileBroken(
            f"truncated: the file has {file_size_bytes} bytes, its header describes {header.weights_end_bytes}"
        )
    return header


def parse_header_bytes(data: bytes) -> GgufHeader:
    """`parse_header` of a whole file in memory. Raises: ModelFileBroken."""
    return parse_header(lambda offset, length: data[offset : offset + length], len(data))


def _read_preamble(cursor: _Cursor) -> int:
    if cursor.file_size_bytes == 0:
        raise ModelFileBroken("the file is empty")
    if cursor.raw(4) != b"GGUF":
        raise ModelFileBroken("not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.number(_U32)
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version:
        raise ModelFileBroken("a big-endian GGUF file, which engines on this machine cannot load")
    raise ModelFileBroken(f"GGUF version {version}; versions 2 and 3 can be read")


def _read_value(cursor: _Cursor, kind: int) -> Value:
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        return cursor.number(scalar)
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        return _read_array(cursor, depth=0)
    raise ModelFileBroken(f"broken GGUF header: unknown value type {kind} at byte {cursor.position}")


def _read_array(cursor: _Cursor, depth: int) -> GgufArray:
    kind = cursor.number(_U32)
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        length = cursor.count(None, "array items", least_bytes=scalar.size)
        if length > KEPT_ITEMS:
            cursor.skip(length * scalar.size)
            return GgufArray(length, None)
        packed = cursor.raw(length * scalar.size)
        return GgufArray(length, tuple(item for (item,) in scalar.iter_unpack(packed)))
    if kind == _STRING:
        length = cursor.count(MAX_STRINGS, "array items", least_bytes=8)
        cursor.skip_strings(length)
        return GgufArray(length, None)
    if kind == _ARRAY and depth < MAX_NESTING:
        length = cursor.count(KEPT_ITEMS, "nested arrays", least_bytes=12)
        for _ in range(length):
            _read_array(cursor, depth + 1)
        return GgufArray(length, None)
    raise ModelFileBroken(f"broken GGUF header: unknown array type {kind} at byte {cursor.position}")


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.name(MAX_TENSOR_NAME_BYTES, "tensor name")
    dimensions = cursor.number(_U32)
    if dimensions > MAX_DIMENSIONS:
        raise ModelFileBroken(f"broken GGUF header: tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.number(_U64) for _ in range(dimensions))
    return TensorInfo(name, shape, cursor.number(_U32), cursor.number(_U64))


def _weights_end(header_bytes: int, metadata: Mapping[str, Value], tensors: tuple[TensorInfo, ...]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise ModelFileBroken(f"broken GGUF header: the alignment is {alignment!r}")
    if not tensors:
        return header_bytes
    start = -(-header_bytes // alignment) * alignment
    return start + max(tensor.offset + (tensor.size_bytes or 0) for tensor in tensors)


class _Cursor:
    """A position in the file with a window of bytes around it."""

    def __init__(self, read_at: ReadAt, file_size_bytes: int) -> None:
        self.position = 0
        self.file_size_bytes = file_size_bytes
        self._read_at = read_at
        self._window = b""
        self._window_start = 0
        self._strings = 0

    def _ensure(self, length: int) -> int:
        """Index in the window of `length` readable bytes at the position."""
        index = self.position - self._window_start
        if index >= 0 and index + length <= len(self._window):
            return index
        if self.position + length > self.file_size_bytes:
            raise _truncated(self.position, self.file_size_bytes)
        wanted = min(max(length, WINDOW_BYTES), self.file_size_bytes - self.position)
        self._window = self._read_at(self.position, wanted)
        self._window_start = self.position
        if len(self._window) < length:
            raise _truncated(self.position, self.file_size_bytes)
        return 0

    def raw(self, length: int) -> bytes:
        index = self._ensure(length)
        self.position += length
        return self._window[index : index + length]

    def number(self, layout: struct.Struct) -> int:
        index = self._ensure(layout.size)
        self.position += layout.size
        value: int = layout.unpack_from(self._window, index)[0]
        return value

    def count(self, limit: int | None, what: str, *, least_bytes: int) -> int:
        """A count whose items, `least_bytes` each, still fit into the file."""
        value = self.number(_U64)
        if value * least_bytes > self.file_size_bytes - self.position:
            raise ModelFileBroken(f"broken or truncated GGUF header: {value} {what} cannot fit into the file")
        if limit is not None and value > limit:
            raise ModelFileBroken(f"broken GGUF header: {value} {what}, at most {limit} are believable")
        return value

    def skip(self, length: int) -> None:
        if self.position + length > self.file_size_bytes:
            raise _truncated(self.position, self.file_size_bytes)
        self.position += length

    def name(self, limit: int, what: str) -> str:
        length = self.number(_U64)
        if length > limit:
            raise ModelFileBroken(f"broken GGUF header: a {what} of {length} bytes")
        try:
            return self.raw(length).decode()
        except UnicodeDecodeError:
            raise ModelFileBroken(f"broken GGUF header: a {what} is not UTF-8") from None

    def text(self) -> str | GgufLongText:
        length = self.number(_U64)
        if length > KEPT_STRING_BYTES:
            self.skip(length)
            return GgufLongText(length)
        return self.raw(length).decode(errors="replace")

    def skip_strings(self, count: int) -> None:
        """Steps over `count` strings. A vocabulary has hundreds of thousands: no call per string here."""
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise ModelFileBroken(f"broken GGUF header: more than {MAX_STRINGS} strings")
        unpack = _U64.unpack_from
        done = 0
        while done < count:
            index = self._ensure(8)
            window, last = self._window, len(self._window) - 8
            while done < count and index <= last:
                index += 8 + unpack(window, index)[0]
                done += 1
            self.position = self._window_start + index
            if self.position > self.file_size_bytes:
                raise _truncated(self.position, self.file_size_bytes)


def _truncated(position: int, size: int) -> ModelFileBroken:
    return ModelFileBroken(f"truncated: the header goes on at byte {position}, the file has {size} bytes")
