"""GGUF headers: read right, read fast, and nothing but ModelFileBroken from hostile bytes."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.launcherd import gguf as parser
from services.launcherd.gguf import GgufArray, GgufHeader, GgufLongText, parse_header, parse_header_bytes
from shared.errors import ModelFileBroken
from tests.engines import tiny_models


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, packed: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + packed


def file(*keys: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


SAMPLE = file(
    key("general.architecture", 8, text("llama")),
    key("a.byte", 0, b"\xff"),
    key("a.signed", 11, struct.pack("<q", -5)),
    key("a.float", 6, struct.pack("<f", 0.5)),
    key("a.flag", 7, b"\x01"),
    key("a.numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
    key("a.words", 9, struct.pack("<IQ", 8, 2) + text("one") + text("two")),
    key("a.nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 7, 8)),
    tensors=(tensor("weight", (4, 2)),),
)
SAMPLE += bytes(-len(SAMPLE) % 32) + bytes(32)


def parse_in_windows(data: bytes, window: int, monkeypatch: pytest.MonkeyPatch) -> GgufHeader:
    monkeypatch.setattr(parser, "WINDOW_BYTES", window)
    return parse_header_bytes(data)


def test_every_kind_of_value_is_read() -> None:
    header = parse_header_bytes(SAMPLE)
    assert header.version == 3
    assert dict(header.metadata) == {
        "general.architecture": "llama",
        "a.byte": 255,
        "a.signed": -5,
        "a.float": 0.5,
        "a.flag": True,
        "a.numbers": GgufArray(3, (1, -2, 3)),
        "a.words": GgufArray(2, None),
        "a.nested": GgufArray(1, None),
    }
    assert [(t.name, t.shape, t.elements, t.size_bytes) for t in header.tensors] == [("weight", (4, 2), 8, 32)]
    assert header.weights_end_bytes == len(SAMPLE)


@pytest.mark.parametrize("window", [1, 8, 9, 31, 100])
def test_the_size_of_reads_does_not_matter(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_in_windows(SAMPLE, window, monkeypatch) == parse_header_bytes(SAMPLE)


def test_bytes_after_the_weights_do_not_matter() -> None:
    assert parse_header_bytes(SAMPLE + b"trailing") == parse_header_bytes(SAMPLE)


def test_a_real_file_reads_as_the_reference_reader_reads_it(tiny_folder: Path) -> None:
    for path in sorted(tiny_folder.glob("*.gguf")):
        reference = gguf.GGUFReader(str(path))
        header = parse_header_bytes(path.read_bytes())
        known = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
        assert set(header.metadata) == set(known)
        for name, field in known.items():
            value = header.metadata[name]
            if isinstance(value, GgufArray):
                assert value.length == len(field.contents())
                assert value.items is None or list(value.items) == field.contents()
            else:
                assert value == field.contents()
        assert [(t.name, t.elements, t.kind, t.size_bytes) for t in header.tensors] == [
            (t.name, t.n_elements, t.tensor_type, t.n_bytes) for t in reference.tensors
        ]
        assert path.stat().st_size - 32 < header.weights_end_bytes <= path.stat().st_size


def test_block_sizes_are_those_of_the_reference() -> None:
    reference = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert dict(parser._BLOCKS).items() <= reference.items()


def test_a_vocabulary_of_150_thousand_is_stepped_over_in_a_moment(tmp_path: Path) -> None:
    size = tiny_models.TinySize(width=4, layers=1, heads=1, feed_forward=4)
    data = tiny_models.write_llm(tmp_path / "big.gguf", size=size, vocabulary_padding=150_000).read_bytes()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        header = parse_header_bytes(data)
        times.append(time.perf_counter() - started)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    assert tokens.length > 150_000
    assert tokens.items is None
    assert min(times) < 0.1


def test_long_number_arrays_and_texts_are_not_even_read() -> None:
    data = file(
        key("long.text", 8, text(b"x" * 3_000_000)),
        key("long.numbers", 9, struct.pack("<IQ", 4, 2_000_000) + bytes(8_000_000)),
        key("end", 0, b"\x07"),
    )
    read = 0

    def read_at(offset: int, length: int) -> bytes:
        nonlocal read
        read += length
        return data[offset : offset + length]

    header = parse_header(read_at, len(data))
    assert header.metadata["long.text"] == GgufLongText(3_000_000)
    assert header.metadata["long.numbers"] == GgufArray(2_000_000, None)
    assert header.integer("end") == 7
    assert read <= 3 * parser.WINDOW_BYTES


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"GGU", "truncated"),
        (b"PK\x03\x04" + bytes(100), "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (file(version=1), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "cannot fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "cannot fit"),
        (file(key("k", 99, b"")), "unknown value type 99"),
        (file(key("k", 9, struct.pack("<IQ", 4, 1 << 61))), "cannot fit"),
        (file(key("k", 9, struct.pack("<IQ", 8, 3) + text("x") + struct.pack("<QQ", 1 << 62, 0))), "truncated"),
        (file(key("k", 9, struct.pack("<IQ", 77, 1))), "unknown array type 77"),
        (file(key("k", 0, b"\0"), key("k", 0, b"\0")), "appears twice"),
        (file(text(b"\xff\xfe") + bytes(20)), "not UTF-8"),
        (file(text(b"k" * 70_000) + bytes(20)), "key of 70000 bytes"),
        (file(key("general.alignment", 4, bytes(4)), tensors=(tensor("w", (1,)),)), "alignment"),
        (file(tensors=(tensor("w", (1, 1, 1, 1, 1)),)), "5 dimensions"),
        (file(tensors=(tensor("w", (1,)), tensor("w", (1,)))) + bytes(99), "tensor name appears twice"),
        (file(tensors=(tensor("w", (1 << 40, 1 << 40)),)), "truncated"),
        (SAMPLE[:-1], "truncated"),
    ],
)
def test_broken_files_are_refused_with_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ModelFileBroken, match=reason):
        parse_header_bytes(data)


def test_endless_nesting_is_refused() -> None:
    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(100_000))
    with pytest.raises(ModelFileBroken, match="unknown array type 9"):
        parse_header_bytes(file(key("k", 9, nested)))


def test_more_strings_than_any_vocabulary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "MAX_STRINGS", 5)
    words = struct.pack("<IQ", 8, 3) + text("") * 3
    with pytest.raises(ModelFileBroken, match="more than 5 strings"):
        parse_header_bytes(file(key("a", 9, words), key("b", 9, words)))


def test_every_truncation_is_noticed() -> None:
    for length in range(len(SAMPLE)):
        with pytest.raises(ModelFileBroken):
            parse_header_bytes(SAMPLE[:length])


def test_a_file_that_shrinks_while_it_is_read_is_truncated() -> None:
    with pytest.raises(ModelFileBroken, match="truncated"):
        parse_header(lambda offset, length: SAMPLE[:100][offset : offset + length], len(SAMPLE))


@given(st.binary(max_size=400))
def test_random_bytes_only_ever_raise_model_file_broken(data: bytes) -> None:
    for candidate in (data, b"GGUF\x03\0\0\0" + data):
        try:
            parse_header_bytes(candidate)
        except ModelFileBroken:
            pass


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_headers_only_ever_raise_model_file_broken(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for position, value in changes:
        data[position] = value
    try:
        parse_header_bytes(bytes(data))
    except ModelFileBroken:
        pass
