"""Deny by default: a walk over every route, every method and what lies beside them."""

from __future__ import annotations

import pytest

from services.proxyd.routes import (
    INFERENCE_ROUTES,
    LOCAL_ROUTES,
    MODELS_PREFIX,
    InferenceRoute,
    LocalRoute,
    NoSuchRoute,
    Route,
    WrongMethod,
    find_route,
)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT")
SERVED = {
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


def test_the_table_is_what_was_agreed() -> None:
    """A new route is a decision: it has to be written down here too."""
    assert {route.path: route.type for route in INFERENCE_ROUTES} == SERVED
    assert {route.path for route in LOCAL_ROUTES} == {"/v1/models", "/v1/models/", "/live", "/health", "/metrics"}


@pytest.mark.parametrize("route", [*INFERENCE_ROUTES, *LOCAL_ROUTES], ids=lambda route: route.path)
def test_each_route_takes_its_methods_and_no_other(route: Route) -> None:
    path = route.path + ("some/model" if route.path == MODELS_PREFIX else "")
    allowed = {"POST"} if isinstance(route, InferenceRoute) else {"GET", "HEAD"}
    for method in METHODS:
        found = find_route(method, path)
        if method in allowed:
            assert found == route
        else:
            assert isinstance(found, WrongMethod)
            assert set(found.allow.split(", ")) == allowed | {"OPTIONS"}


@pytest.mark.parametrize("route", INFERENCE_ROUTES, ids=lambda route: route.path)
@pytest.mark.parametrize("change", ["{}/", "{}x", "/{}", "{}/..", "{}%20", "/api{}", "{}/slots", " {}"])
def test_nothing_beside_a_route_is_served(route: InferenceRoute, change: str) -> None:
    path = change.format(route.path)
    if path in SERVED:
        return
    assert find_route("POST", path) == NoSuchRoute()


@pytest.mark.parametrize("path", ["", "*", "/", "/v1", "/v1/", "/v1/models/", "/slots", "/props", "/infill",
                                  "/tokenize", "/lora-adapters", "/v1/load", "/models"])  # fmt: skip
def test_an_engines_own_routes_are_out_of_reach(path: str) -> None:
    assert all(find_route(method, path) == NoSuchRoute() for method in METHODS)


def test_a_model_id_may_contain_slashes() -> None:
    found = find_route("GET", "/v1/models/org/repo:q4")
    assert isinstance(found, LocalRoute)
    assert found.answer == "model"


def test_anthropic_routes_speak_anthropics_errors() -> None:
    styles = {route.path: route.style for route in INFERENCE_ROUTES}
    assert {path for path, style in styles.items() if style == "anthropic"} == {
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
