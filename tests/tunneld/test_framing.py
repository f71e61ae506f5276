"""services.tunneld.framing against docs/spec/framing.md."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tunneld.framing import (
    FRAME_LIMIT_BYTES,
    HEADER_LIMIT_BYTES,
    FrameReader,
    OpeningReader,
    StreamOpening,
    StreamType,
    encode_frame,
    encode_opening,
)
from shared.errors import SchemaError

HEADER = {"model": "tiny", "deadline_seconds": 12.5}


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize("type", StreamType)
def test_an_opening_comes_back(type: StreamType) -> None:
    """1. A stream opens with a type byte, a version byte, a length and a header."""
    data = encode_opening(type, HEADER)
    assert data[0] == type
    reader = OpeningReader()
    assert reader.feed(data + b"what follows") == StreamOpening(type, HEADER)
    assert reader.rest == b"what follows"


@given(st.lists(st.integers(0, 1000), max_size=20), st.binary(max_size=30))
def test_an_opening_in_pieces(cuts: list[int], follows: bytes) -> None:
    """4. However the bytes are cut on the way, the same openings come out."""
    data = encode_opening(StreamType.TUNNEL_HTTP, HEADER)
    reader = OpeningReader()
    found = [opening for piece in pieces(data, cuts) if (opening := reader.feed(piece)) is not None]
    assert found == [StreamOpening(StreamType.TUNNEL_HTTP, HEADER)]
    assert reader.rest == b""
    byte_by_byte = OpeningReader()
    results = [byte_by_byte.feed(bytes([byte])) for byte in data]
    assert results[:-1] == [None] * (len(data) - 1)
    whole = OpeningReader()
    whole.feed(data + follows)
    assert whole.rest == follows


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x00", "type"),
        (b"\x0c", "type"),
        (b"GET / HTTP/1.1\r\n", "type"),
        (b"\x01\x02", "update"),
        (b"\x01\x01\xff\xff", "limit"),
        (b"\x01\x01\x00\x01\x90", "map"),
        (b"\x01\x01\x00\x03\x81\x01\x02", "msgpack"),
        (b"\x01\x01\x00\x00", "msgpack"),
    ],
)
def test_what_is_no_opening_is_refused_at_once(data: bytes, words: str) -> None:
    """2. ... refused as soon as it can be known."""
    with pytest.raises(SchemaError, match=words):
        OpeningReader().feed(data)


def test_nothing_too_large_is_made() -> None:
    """2. and 3., on the sending side."""
    with pytest.raises(SchemaError, match="limit"):
        encode_opening(StreamType.GOSSIP, {"x": "y" * HEADER_LIMIT_BYTES})
    with pytest.raises(SchemaError, match="limit"):
        encode_frame(bytes(FRAME_LIMIT_BYTES + 1))


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 1000), max_size=20))
def test_frames_in_pieces(payloads: list[bytes], cuts: list[int]) -> None:
    """4. However the bytes are cut on the way, the same frames come out."""
    data = b"".join(map(encode_frame, payloads))
    reader = FrameReader()
    assert [frame for piece in pieces(data, cuts) for frame in reader.feed(piece)] == payloads
    reader.finish()


def test_a_length_of_4_gib_costs_four_bytes() -> None:
    """3. A larger length is refused before anything is kept."""
    with pytest.raises(SchemaError, match="4294967295"):
        FrameReader().feed(b"\xff\xff\xff\xff")
    with pytest.raises(SchemaError):
        FrameReader(limit_bytes=10).feed(encode_frame(bytes(11)))
    assert FrameReader(limit_bytes=10).feed(encode_frame(bytes(10))) == [bytes(10)]


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_cut_inside_a_frame_is_no_end(cut: int) -> None:
    """5. A stream that ends inside a frame was cut."""
    reader = FrameReader()
    assert reader.feed(encode_frame(b"payload")[:cut]) == []
    with pytest.raises(SchemaError, match="inside a frame"):
        reader.finish()


@given(st.binary(max_size=200))
def test_random_bytes_are_only_refused(data: bytes) -> None:
    """2. and 3. Only clean refusals."""
    with contextlib.suppress(SchemaError):
        OpeningReader().feed(data)
    with contextlib.suppress(SchemaError):
        FrameReader().feed(data)
