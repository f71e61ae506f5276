"""What the inference port answers itself, and what each kind of model name leads to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import RequestRefused
from shared.messages.models import InventoryChanged
from tests.proxyd.plane import Plane, local_model
from tests.proxyd.raw_upstream import RawUpstream
from tests.proxyd.wire import in_background
from tests.waiting import wait_until


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer)["error"]
    return error


def test_an_unknown_model_is_404_with_the_nearest_names(plane: Plane) -> None:
    plane.declare("qwen3-8b-instruct")
    status, headers, answer = plane.chat("qwen3-8b")
    assert status == 404
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "qwen3-8b-instruct" in error["message"]
    assert "GET /v1/models" in error["message"]
    assert headers["x-request-id"]


def test_no_model_means_the_only_ready_one_else_400(plane: Plane, upstream: RawUpstream) -> None:
    status, _, answer = plane.chat(None)
    assert (status, error_of(answer)["code"]) == (400, "model_required")
    plane.serve_model("m", upstream.port)
    plane.serve_model("e", upstream.port, type="embedding")
    assert plane.chat(None)[0] == 200
    assert plane.request("POST", "/v1/embeddings", {"input": "x"})[0] == 200
    plane.serve_model("n", upstream.port)
    status, _, answer = plane.chat(None)
    assert status == 400
    assert "m, n" in error_of(answer)["message"]


def test_auto_is_the_largest_ready_model(plane: Plane, upstream: RawUpstream) -> None:
    status, headers, answer = plane.chat("auto")
    assert (status, error_of(answer)["code"]) == (503, "not_ready")
    assert headers["retry-after"]
    for name, size in (("small", 1), ("big", 9), ("middle", 5)):
        plane.serve_model(name, upstream.port, key=f"key-of-{name}")
        plane.declare(name, size=size)
    assert plane.chat("auto")[0] == 200
    assert upstream.requests[0].header(b"authorization") == b"Bearer key-of-big"


def test_a_model_of_the_wrong_type_is_400(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("e", upstream.port, type="embedding")
    status, _, answer = plane.chat("e")
    assert (status, error_of(answer)["code"]) == (400, "wrong_model_type")
    assert "/v1/embeddings" in error_of(answer)["message"]
    assert upstream.requests == []


def test_anthropic_routes_get_anthropics_errors(plane: Plane) -> None:
    status, _, answer = plane.request("POST", "/v1/messages", {"model": "x", "messages": []})
    body = json.loads(answer)
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    status, _, answer = plane.request("GET", "/v1/messages")
    assert (status, json.loads(answer)["error"]["type"]) == (405, "invalid_request_error")


def test_an_idle_node_says_what_to_do_next(plane: Plane) -> None:
    plane.is_idle = True
    status, headers, answer = plane.chat()
    assert (status, error_of(answer)["code"]) == (503, "idle")
    assert "meshctl up" in error_of(answer)["message"]
    assert headers["retry-after"]
    assert plane.request("GET", "/live")[0] == 200
    state = json.loads(plane.request("GET", "/health")[2])
    assert (state["status"], state["state"]) == ("ok", "idle")
    assert json.loads(plane.request("GET", "/v1/models")[2]) == {"object": "list", "data": []}


def test_the_models_of_the_whole_mesh_ready_and_loadable_alike(plane: Plane, upstream: RawUpstream) -> None:
    plane.declare("cold", size=7)
    plane.serve_model("warm", upstream.port)
    listed = {model["id"]: model for model in json.loads(plane.request("GET", "/v1/models")[2])["data"]}
    assert set(listed) == {"cold", "warm"}
    assert (listed["cold"]["status"], listed["cold"]["size_bytes"]) == ("unloaded", 7)
    assert (listed["warm"]["status"], listed["warm"]["object"]) == ("ready", "model")
    status, _, answer = plane.request("GET", "/v1/models/cold")
    assert (status, json.loads(answer)["reason"]) == (200, "cold is unloaded")
    status, _, answer = plane.request("GET", "/v1/models/wold")
    assert status == 404
    assert "cold" in error_of(answer)["message"]


def test_hostile_model_names_stay_text(plane: Plane) -> None:
    """TRAPS 37: names come from peers and clients; here they are only ever JSON strings."""
    name = '<script>alert(1)</script>"/../../etc'
    plane.declare(name)
    answer = plane.request("GET", "/v1/models")
    assert answer[1]["content-type"].startswith("application/json")
    assert json.loads(answer[2])["data"][0]["id"] == name
    status, _, body = plane.chat("\r\nX-Evil: 1\u2028")
    assert status == 404
    assert "x-evil" not in plane.chat("\r\nX-Evil: 1")[1]
    assert error_of(body)


def test_metrics_come_from_the_sink(plane: Plane) -> None:
    status, headers, body = plane.request("GET", "/metrics")
    assert (status, headers["content-type"], body) == (200, "text/plain; version=0.0.4", b"meshd_requests 1\n")


def test_every_request_leaves_one_whole_record(plane: Plane, upstream: RawUpstream) -> None:
    """TRAPS 27."""
    usage = {"prompt_tokens": 5, "completion_tokens": 7}
    upstream.handler = lambda peer, _request: peer.json({"usage": usage})
    plane.serve_model("m", upstream.port)
    plane.request("POST", "/v1/completions", {"model": "m"}, {"X-Request-Id": "mine"})
    plane.chat("unknown")
    wait_until(lambda: len(plane.metrics.records) == 2, 2, "both are filed")
    good, bad = plane.metrics.records
    assert (good.request_id, good.route, good.model, good.outcome) == ("mine", "/v1/completions", "m", "ok")
    assert (good.status, good.prompt_tokens, good.completion_tokens, good.attempts) == (200, 5, 7, 1)
    assert good.first_byte_seconds is not None
    assert 0 < good.first_byte_seconds <= good.total_seconds
    assert good.overhead_seconds < good.total_seconds
    assert (bad.status, bad.outcome, bad.attempts) == (404, "refused", 0)
    assert plane.metrics.running == 0
    assert "was answered with status 200" in plane.log.explain("mine", now=0)[0]


def test_demand_that_nobody_could_serve_is_told_once(plane: Plane, upstream: RawUpstream) -> None:
    plane.declare("huge")
    plane.place_error = RequestRefused("needs_capacity", "needs 40 GB")
    assert plane.chat("huge")[0] == 503
    assert plane.chat("unknown")[0] == 404
    plane.serve_model("m", upstream.port)
    assert plane.chat("m")[0] == 200
    assert plane.unserved == ["huge"]


def test_a_proxyd_that_has_just_started_waits_before_it_calls_a_model_unknown(
    mesh_home: Path, plane: Plane, upstream: RawUpstream
) -> None:
    plane.call(plane.view.replace, "launcherd", [InventoryChanged(models=(), scanning=True)])
    result = in_background(lambda: plane.chat("m"))
    wait_until(lambda: plane.app.active_count == 1, 2, "it waits")
    plane.call(plane.view.apply, InventoryChanged(models=(local_model("m"),)))
    plane.serve_model("m", upstream.port)
    wait_until(lambda: result, 5, "it is answered")
    assert result[0][0] == 200
