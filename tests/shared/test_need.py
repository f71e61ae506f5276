"""docs/spec/need.md: the larger of 1.1 x file size, and file size + KV cache + compute buffers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.need import SEQUENCE_PADDING_TOKENS, need_bytes


def need(**changes: int) -> int:
    values = {
        "file_size_bytes": 1000,
        "kv_bytes_per_token": 0,
        "compute_bytes": 0,
        "context_tokens": 0,
        "parallel": 1,
    }
    return need_bytes(**{**values, **changes})


def test_a_model_without_a_cache_needs_a_tenth_more_than_its_file() -> None:
    assert need() == 1100
    assert need(file_size_bytes=1001) == 1102, "rounded up"


def test_cache_and_buffers_count_when_they_are_more() -> None:
    assert need(kv_bytes_per_token=10, context_tokens=512, compute_bytes=7) == 1000 + 10 * 512 + 7
    assert need(compute_bytes=99) == 1100
    assert need(compute_bytes=101) == 1101


def test_each_request_has_its_own_padded_share_of_the_context() -> None:
    """-c is the total over all parallel requests; llama.cpp pads each share."""
    assert need(kv_bytes_per_token=1, context_tokens=1024, parallel=4) == 1000 + 4 * 256
    assert need(kv_bytes_per_token=1, context_tokens=1025, parallel=4) == 1000 + 4 * 512
    assert need(kv_bytes_per_token=1, context_tokens=1, parallel=0) == 1100 + 156


def test_a_70b_in_4_bits_reads_as_people_know_it() -> None:
    need_70b = need(file_size_bytes=42_520_000_000, kv_bytes_per_token=327_680, context_tokens=16_384, parallel=4)
    assert need_70b == 42_520_000_000 + 16_384 * 327_680


SIZES = st.integers(0, 10**13)


@given(SIZES, st.integers(0, 10**6), SIZES, st.integers(0, 10**6), st.integers(1, 64))
def test_more_of_anything_never_needs_less(file: int, kv: int, compute: int, context: int, parallel: int) -> None:
    def of(file: int, kv: int, compute: int, context: int) -> int:
        return need_bytes(
            file_size_bytes=file,
            kv_bytes_per_token=kv,
            compute_bytes=compute,
            context_tokens=context,
            parallel=parallel,
        )

    base = of(file, kv, compute, context)
    assert isinstance(base, int)
    assert base >= file + kv * context + compute
    assert base * 10 >= file * 11
    assert of(file + 1, kv, compute, context) >= base
    assert of(file, kv + 1, compute, context) >= base
    assert of(file, kv, compute + 1, context) >= base
    assert of(file, kv, compute, context + SEQUENCE_PADDING_TOKENS) >= base
