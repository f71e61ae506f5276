"""The management port of a real worker: who may do what, and what it says (TRAPS 36, 37)."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.proxyd.io.management_api import ROUTES
from services.proxyd.io.mesh_api import MESH_ROUTES
from shared.codec import Message
from shared.ids import ModelName
from shared.io.keys_file import create_key, revoke_key
from shared.messages.downloads import CancelPull, DeleteModel, PullModel
from shared.messages.models import LoadModel, PinModel, UnloadModel
from tests.engines.scripted_engine import Script
from tests.proxyd.supervised import MODEL, Supervised, scripted_model, supervised
from tests.waiting import wait_until

IN_MESH = {(method, path) for method, path, _ in MESH_ROUTES}
EVIL = "<img src=x onerror=alert(1)>"


ASKED: list[Message] = []
"""What launcherd was asked."""


@pytest.fixture(scope="module")
def node() -> Iterator[Supervised]:
    home = Path(tempfile.mkdtemp(prefix="mesh-", dir="/tmp"))
    try:
        with supervised(home) as running, scripted_model(running.paths, Script(tokens=3)) as launcherd:
            launcherd.asked = ASKED
            running.wait_live()
            wait_until(lambda: running.get("/live", port="console")[0] == 200, 20, "the management API")
            yield running
    finally:
        shutil.rmtree(home, ignore_errors=True)


def token(node: Supervised) -> dict[str, str]:
    return {"X-Mesh-Token": node.paths.console_token_file.read_text().strip()}


def test_every_read_route_answers_this_machine(node: Supervised) -> None:
    for method, path, _ in ROUTES:
        if method != "GET":
            continue
        filled = path.replace("{subject}", "gossipd").replace("{daemon}", "proxyd")
        status, body = node.get(filled, port="console")
        # Without gossipd nobody knows about the mesh, and that is said.
        assert status == (503 if (method, path) in IN_MESH else 200), (filled, body)
        assert body


def test_every_change_needs_the_token(node: Supervised) -> None:
    for method, path, _ in ROUTES:
        if method == "GET":
            continue
        filled = path.replace("{name}", "proxyd").replace("{invite_id}", "x")
        for headers in ({}, {"X-Mesh-Token": "0" * 64}, {"Authorization": "Bearer nonsense"}):
            status, _, body = node.request(method, filled, {}, headers, port="console")
            assert status == 401, (filled, body)
        assert "console_token" in json.loads(node.request(method, filled, {}, port="console")[2])["error"]["message"]


def test_a_route_that_is_not_listed_is_not_there(node: Supervised) -> None:
    described = json.loads(node.get("/openapi.json", port="console")[1])["paths"]
    listed = {path.partition("?")[0] for _, path, _ in ROUTES} - {"/openapi.json"} | {"/"}
    assert {path.replace("{subject:path}", "{subject}") for path in described} == listed
    assert node.get("/docs", port="console")[0] == 404, "its page would load scripts from a foreign host"


def test_dns_rebinding_and_foreign_pages_are_refused_on_both_ports(node: Supervised) -> None:
    for port, path in (("api", "/v1/models"), ("api", "/live"), ("console", "/api/mesh/status"), ("console", "/live")):
        for headers in (
            {"Host": f"evil.example:{node.ports()[port]}"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        ):
            status, answer, body = node.request("GET", path, None, headers, port=port)
            assert status == 403, (port, path, headers, body)
            assert "access-control-allow-origin" not in answer
        assert node.request("GET", path, None, {"Host": "localhost"}, port=port)[0] == 200


def test_csrf_a_form_post_with_a_foreign_origin_changes_nothing(node: Supervised) -> None:
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain", **token(node)}
    assert node.request("POST", "/api/mesh/daemons/proxyd/restart", {}, headers, port="console")[0] == 403


def test_preflights(node: Supervised) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-mesh-token"}
    for port in ("api", "console"):
        foreign = node.request(
            "OPTIONS", "/api/mesh/config/reload", None, {"Origin": "https://evil.example", **ask}, port=port
        )
        assert foreign[0] == 403
        own = f"http://127.0.0.1:{node.ports()['console']}"
        status, headers, _ = node.request("OPTIONS", "/api/mesh/config/reload", None, {"Origin": own, **ask}, port=port)
        assert status == 204
        assert headers["access-control-allow-origin"] == own
        assert headers["access-control-allow-headers"] == "x-mesh-token"


def test_answers_are_not_to_be_sniffed_framed_or_kept(node: Supervised) -> None:
    for path in ("/", "/api/mesh/status", "/nowhere"):
        headers = node.request("GET", path, port="console")[1]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "server" not in headers


def test_what_somebody_chose_never_becomes_html_or_a_path(node: Supervised) -> None:
    for path in (f"/api/mesh/why/{EVIL}", f"/api/mesh/logs/{EVIL}", f"/api/mesh/story/{EVIL}"):
        status, headers, _ = node.request("GET", path.replace(" ", "%20").replace("<", "%3C"), port="console")
        assert headers["content-type"].startswith("application/json"), (path, status)
    for name in ("..%2f..%2fetc%2fpasswd", "%2e%2e", "supervisord", "proxyd%00", ""):
        status, body = node.get(f"/api/mesh/logs/{name}", port="console")
        assert status == 404, (name, body)
        assert b"root:" not in body
    status, _, body = node.request("POST", "/api/mesh/daemons/supervisord/restart", {}, token(node), port="console")
    assert status == 404
    assert json.loads(body)["error"]["code"] == "unknown_daemon"


def test_status_models_why_logs_and_requests_say_something(node: Supervised) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    status, headers, _ = node.request("POST", "/v1/chat/completions", body)
    assert status == 200
    request_id = headers["x-request-id"]
    seen = json.loads(node.get("/api/mesh/requests", port="console")[1])
    assert [record["request_id"] for record in seen["recent"]][:1] == [request_id]
    why = json.loads(node.get(f"/api/mesh/why/{request_id}", port="console")[1])
    assert "was answered" in why["sentences"]["proxyd"][0]
    models = json.loads(node.get("/api/mesh/models", port="console")[1])["models"]
    assert [model["name"] for model in models] == [MODEL]
    rows = {row["name"]: row for row in json.loads(node.get("/api/mesh/status", port="console")[1])["daemons"]}
    assert rows["proxyd"]["state"] == "running"
    lines = json.loads(node.get("/api/mesh/logs/proxyd?lines=3", port="console")[1])["lines"]
    assert any("proxyd ready" in line or "event=" in line for line in lines)
    assert json.loads(node.get("/api/mesh/story/proxyd", port="console")[1])["entries"]
    metrics = node.get("/metrics", port="console")[1].decode()
    assert f'meshd_requests_total{{model="{MODEL}",route="/v1/chat/completions",status="200"}}' in metrics
    assert metrics.split("# HELP")[1] == node.get("/metrics")[1].decode().split("# HELP")[1]


@pytest.mark.parametrize(
    "path", ["/api/mesh/logs/proxyd?lines=0", "/api/mesh/logs/proxyd?lines=x", "/api/mesh/story/proxyd?limit=9999"]
)
def test_bad_parameters_are_named(node: Supervised, path: str) -> None:
    status, body = node.get(path, port="console")
    assert status == 400
    assert "query" in json.loads(body)["error"]["message"]


def test_a_bad_body_is_named(node: Supervised) -> None:
    for body in ({}, {"model": ""}, {"model": "x", "parallel": -1}, [1]):
        status, _, answer = node.request("POST", "/api/mesh/models/load", body, token(node), port="console")
        assert status == 400, body
        assert json.loads(answer)["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "load",
            {"model": "m", "engine_args": ["-b", "8"], "backend": "cpu", "pinned": True, "wait": False},
            LoadModel(model=ModelName("m"), extra_args=("-b", "8"), backend="cpu", pinned=True, wait=False),
        ),
        ("load", {"model": "m"}, LoadModel(model=ModelName("m"))),
        ("pin", {"model": "m"}, PinModel(model=ModelName("m"))),
        ("pin", {"model": "m", "pinned": False}, PinModel(model=ModelName("m"), pinned=False)),
        (
            "pull",
            {"model": "mine", "checkpoint": "o/r:Q4", "recipe": "llamacpp", "labels": ["vision"], "mmproj": "p.gguf"},
            PullModel(
                model="mine", checkpoint="o/r:Q4", recipe="llamacpp", labels=("vision",), mmproj="p.gguf", wait=False
            ),
        ),
        ("pull/cancel", {"model": "mine"}, CancelPull(model="mine")),
        ("delete", {"model": "mine"}, DeleteModel(model=ModelName("mine"))),
        ("unload", {"model": "m"}, UnloadModel(model=ModelName("m"))),
    ],
)
def test_what_is_done_with_models_is_asked_of_launcherd(
    node: Supervised, path: str, body: dict[str, Any], message: Message
) -> None:
    """docs/spec/management.md 7."""
    ASKED.clear()
    status, _, answer = node.request("POST", f"/api/mesh/models/{path}", body, token(node), port="console")
    assert status == 200, answer
    assert [message] == ASKED


def test_lemonades_routes_of_a_real_worker(node: Supervised) -> None:
    """docs/spec/lemonade.md 8 and 23."""
    health = json.loads(node.get("/api/v1/health")[1])
    assert (health["model_loaded"], health["all_models_loaded"][0]["type"]) == (MODEL, "llm")
    ASKED.clear()
    body = {"model_name": "known"}
    assert node.request("POST", "/api/v1/delete", body, {"X-Forwarded-For": "10.0.0.1"})[0] == 401
    assert node.request("POST", "/api/v1/delete", body, {"X-Mesh-Token": "0" * 64})[0] == 401
    assert ASKED == []
    assert node.request("POST", "/api/v1/delete", body)[0] == 200
    assert node.request("POST", "/api/v1/delete", body, {"X-Forwarded-For": "10.0.0.1", **token(node)})[0] == 200
    assert [DeleteModel(model=ModelName("known"))] * 2 == ASKED


def test_restart_through_the_api_replaces_the_worker(node: Supervised) -> None:
    before = node.workers()
    status, _, body = node.request("POST", "/api/mesh/daemons/proxyd/restart", {}, token(node), port="console")
    assert (status, json.loads(body)) == (200, {"restarted": "proxyd"})
    wait_until(lambda: (now := node.workers()) and not set(now) & set(before), 20, "another worker")
    wait_until(lambda: node.get("/api/mesh/status", port="console")[0] == 200, 20, "its management API")


def test_with_keys_inference_needs_one_and_live_and_management_do_not(node: Supervised) -> None:
    _, text = create_key(node.paths.keys_file, "laptop")
    try:
        wait_until(lambda: node.get("/v1/models")[0] == 401, 5, "the key counts")
        assert node.get("/v1/models", {"Authorization": f"Bearer {text}"})[0] == 200
        assert node.get("/v1/models", {"x-api-key": text})[0] == 200
        almost = text[:-1] + ("1" if text[-1] == "0" else "0")
        assert node.get("/v1/models", {"Authorization": f"Bearer {almost}"})[0] == 401
        assert node.get("/v1/models", {"Authorization": f"Bearer {token(node)['X-Mesh-Token']}"})[0] == 200
        assert node.get("/live")[0] == 200
        assert node.get("/metrics")[0] == 401
        assert node.get("/api/mesh/status", port="console")[0] == 200
        assert text not in node.log()
    finally:
        revoke_key(node.paths.keys_file, "laptop")
    wait_until(lambda: node.get("/v1/models")[0] == 200, 5, "without keys it is open again")
