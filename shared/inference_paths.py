"""The paths that an engine answers, all POST: what proxyd offers to clients is what tunneld lets through from peers.

Anything else is denied.
"""

from __future__ import annotations

from shared.messages.models import ModelType

INFERENCE_PATHS: dict[str, ModelType] = {
    "/v1/chat/completions": "llm",
    "/v1/completions": "llm",
    "/v1/responses": "llm",
    "/v1/messages": "llm",
    "/v1/messages/count_tokens": "llm",
    "/v1/embeddings": "embedding",
    "/v1/rerank": "reranking",
    "/v1/reranking": "reranking",
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
    "/v1/audio/speech": "audio",
    "/v1/images/generations": "image",
    "/v1/images/edits": "image",
    "/v1/images/variations": "image",
}
