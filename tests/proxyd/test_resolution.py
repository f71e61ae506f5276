"""Each dead end has its status and says what to do next."""

from __future__ import annotations

import pytest

from services.proxyd.mesh_view import NoneReady, Unknown, Unnamed, WrongType
from services.proxyd.resolution import IDLE, failure_of, failure_of_refusal
from services.proxyd.routes import INFERENCE_ROUTES
from shared.errors import RequestRefused
from shared.ids import ModelName

CHAT = INFERENCE_ROUTES[0]
M = ModelName("m")


@pytest.mark.parametrize(
    ("resolution", "status", "code", "words"),
    [
        (Unknown("x", ("y", "z")), 404, "model_not_found", ["'x'", "y, z", "GET /v1/models"]),
        (WrongType(M, "embedding"), 400, "wrong_model_type", ["m is a model of type embedding", "/v1/embeddings"]),
        (Unnamed((M, ModelName("n"))), 400, "model_required", ["m, n"]),
        (Unnamed(()), 400, "model_required", ["no model of type llm is ready", "GET /v1/models"]),
        (NoneReady("no model of type llm is ready"), 503, "not_ready", ["name a model"]),
    ],
)
def test_dead_ends(
    resolution: Unknown | WrongType | Unnamed | NoneReady, status: int, code: str, words: list[str]
) -> None:
    failure = failure_of(resolution, CHAT)
    assert (failure.status, failure.code) == (status, code)
    assert all(word in failure.message for word in words), failure.message
    assert (failure.retry_after_seconds is not None) == (status == 503)


@pytest.mark.parametrize(
    ("code", "status"),
    [("overloaded", 429), ("model_not_found", 404), ("model_file_missing", 404), ("load_failed", 503), ("idle", 503)],
)
def test_refusals_by_other_daemons(code: str, status: int) -> None:
    failure = failure_of_refusal("m", RequestRefused(code, "because", 4.0))
    assert (failure.status, failure.code) == (status, code)
    assert "because" in failure.message
    assert failure.retry_after_seconds == (None if status == 404 else 4.0)


def test_an_idle_node_says_how_to_start() -> None:
    assert IDLE.status == 503
    assert "meshctl up" in IDLE.message
