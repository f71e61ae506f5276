"""How much memory a model needs: one formula, so that every node computes the same from the same announcement."""

from __future__ import annotations

SEQUENCE_PADDING_TOKENS = 256
"""llama.cpp rounds each request's share of the context up to this."""


def need_bytes(
    *, file_size_bytes: int, kv_bytes_per_token: int, compute_bytes: int, context_tokens: int, parallel: int
) -> int:
    """max(1.1 x file size, file size + KV cache + compute buffers).

    ``context_tokens`` is the total over all ``parallel`` requests, as ``-c`` of llama-server.
    Source: docs/spec/need.md.
    """
    requests = max(1, parallel)
    share = -(-context_tokens // requests)
    padded = -(-share // SEQUENCE_PADDING_TOKENS) * SEQUENCE_PADDING_TOKENS * requests
    return max(-(-file_size_bytes * 11 // 10), file_size_bytes + kv_bytes_per_token * padded + compute_bytes)
