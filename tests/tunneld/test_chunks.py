"""Framing inside TLS, fed whole, byte by byte and with what nobody should send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tunneld.chunks import (
    CHUNK_LIMIT_BYTES,
    END,
    END_BYTES,
    REASON_LIMIT_BYTES,
    ChunkReader,
    Cut,
    Piece,
    encode_chunk,
    encode_cut,
)
from shared.errors import SchemaError


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring bytes as one: how they were cut up does not matter."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.just(END)), max_size=12), st.data())
def test_what_went_in_comes_out_however_it_is_cut_up(pieces: list[Piece], data: st.DataObject) -> None:
    wire = b"".join(encode_chunk(piece) if isinstance(piece, bytes) else END_BYTES for piece in pieces)
    reader = ChunkReader()
    out: list[Piece] = []
    at = 0
    while at < len(wire):
        size = data.draw(st.integers(1, len(wire) - at))
        out += reader.feed(wire[at : at + size])
        at += size
    assert joined(out) == joined(pieces)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_a_cut_carries_its_reason(step: int) -> None:
    wire = encode_chunk(b"abc") + encode_cut("no more of this")
    reader = ChunkReader()
    out = [piece for at in range(0, len(wire), step) for piece in reader.feed(wire[at : at + step])]
    assert joined(out) == [b"abc", Cut("no more of this")]


def test_a_reason_is_cut_to_its_limit() -> None:
    (cut,) = ChunkReader().feed(encode_cut("x" * 5000))
    assert cut == Cut("x" * REASON_LIMIT_BYTES)


@pytest.mark.parametrize(
    "wire",
    [
        (CHUNK_LIMIT_BYTES + 1).to_bytes(4),
        (0xFFFF_FFFE).to_bytes(4),
        b"\xff\xff\xff\xff" + (REASON_LIMIT_BYTES + 1).to_bytes(2),
    ],
)
def test_lengths_over_the_limit_are_refused_before_anything_is_kept(wire: bytes) -> None:
    with pytest.raises(SchemaError, match="over the limit"):
        ChunkReader().feed(wire)


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_random_bytes_are_pieces_or_a_refusal(parts: list[bytes]) -> None:
    reader = ChunkReader()
    try:
        for part in parts:
            assert sum(len(piece) for piece in reader.feed(part) if isinstance(piece, bytes)) <= len(b"".join(parts))
    except SchemaError:
        pass
