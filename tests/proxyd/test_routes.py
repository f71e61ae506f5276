"""Deny by default: a walk over every route, every method and what lies beside them."""

from __future__ import annotations

import pytest

from services.proxyd.routes import (
    INFERENCE_ROUTES,
    LEMONADE_ROUTES,
    LOCAL_ROUTES,
    InferenceRoute,
    LemonadeRoute,
    LocalRoute,
    NoSuchRoute,
    Route,
    WrongMethod,
    find_route,
    model_id,
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


PREFIXES = ("/v1", "/api/v1", "/v0", "/api/v0")
GETS = {"health": "/health", "stats": "/stats", "system-info": "/system-info", "models": "/models"}
POSTS = {
    "load": "/load", "unload": "/unload", "pull": "/pull", "delete": "/delete", "set": "/internal/set",
    "pin": "/internal/pin",
}  # fmt: skip
CHANGES = {"pull", "delete", "set", "pin"}


def agreed() -> dict[str, tuple[set[str], object]]:
    """Path -> (methods, what it is)."""
    table: dict[str, tuple[set[str], object]] = {}
    for prefix in PREFIXES:
        for path, kind in SERVED.items():
            table[prefix + path.removeprefix("/v1")] = ({"POST"}, (path, kind))
        for name, path in GETS.items():
            table[prefix + path] = ({"GET", "HEAD"}, name)
        table[prefix + "/models/some/model"] = ({"GET", "HEAD"}, "model")
        for name, path in POSTS.items():
            table[prefix + path] = ({"POST"}, name)
    for path in ("/internal/set", "/internal/pin"):
        table[path] = ({"POST"}, path.removeprefix("/internal/"))
    for path, name in (("/live", "live"), ("/health", "health here"), ("/metrics", "metrics")):
        table[path] = ({"GET", "HEAD"}, name)
    table["/v1/models"] = ({"GET", "HEAD"}, "mesh models")
    table["/v1/models/some/model"] = ({"GET", "HEAD"}, "mesh model")
    return table


AGREED = agreed()


def what_it_is(route: Route) -> object:
    match route:
        case InferenceRoute():
            return (route.path, route.type)
        case LemonadeRoute():
            assert route.changes_machine == (route.operation in CHANGES)
            return route.operation
        case LocalRoute(path=path, answer=answer):
            in_mesh = path.startswith("/v1/models")
            return f"mesh {answer}" if in_mesh else "health here" if answer == "health" else answer


@pytest.mark.parametrize("path", sorted(AGREED))
def test_each_route_takes_its_methods_and_no_other(path: str) -> None:
    """docs/spec/lemonade.md 1 and 2: under each prefix; a known path with another method is 405 with `Allow`."""
    allowed, meant = AGREED[path]
    for method in METHODS:
        found = find_route(method, path)
        if method in allowed:
            assert isinstance(found, InferenceRoute | LocalRoute | LemonadeRoute)
            assert what_it_is(found) == meant
        else:
            assert isinstance(found, WrongMethod), (method, found)
            assert set(found.allow.split(", ")) == allowed | {"OPTIONS"}


def test_a_new_route_is_a_decision() -> None:
    """It has to be written down here too."""
    assert {route.path: route.type for route in INFERENCE_ROUTES} == SERVED
    assert {route.path for route in LOCAL_ROUTES} == {"/v1/models", "/v1/models/", "/live", "/health", "/metrics"}
    assert {route.path for route in LEMONADE_ROUTES} == {*GETS.values(), *POSTS.values(), "/models/"}


@pytest.mark.parametrize("change", ["{}/", "{}x", "/{}", "{}/..", "{}%20", "/api{}", "{}/slots", " {}", "/v1{}"])
def test_nothing_beside_a_route_is_served(change: str) -> None:
    for path, (allowed, _) in AGREED.items():
        changed = change.format(path)
        if changed not in AGREED and "/models" not in path:
            assert find_route(min(allowed), changed) == NoSuchRoute(), changed


@pytest.mark.parametrize("path", ["", "*", "/", "/v1", "/v1/", "/v1/models/", "/api/v0/models/", "/slots", "/props",
                                  "/infill", "/tokenize", "/lora-adapters", "/load", "/models", "/models/x",
                                  "/api/models", "/api/v1", "/api/v2/load", "/internal", "/v1/internal", "/api/v1/live",
                                  "/api/v1/metrics"])  # fmt: skip
def test_an_engines_own_routes_are_out_of_reach(path: str) -> None:
    assert all(find_route(method, path) == NoSuchRoute() for method in METHODS)


def test_a_model_id_may_contain_slashes() -> None:
    found = find_route("GET", "/v1/models/org/repo:q4")
    assert isinstance(found, LocalRoute)
    assert found.answer == "model"
    assert model_id("/api/v1/models/org/repo:q4") == "org/repo:q4"
    assert model_id("/v1/models/a/models/b") == "a/models/b"


def test_anthropic_routes_speak_anthropics_errors() -> None:
    styles = {route.path: route.style for route in INFERENCE_ROUTES}
    assert {path for path, style in styles.items() if style == "anthropic"} == {
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
