"""TRAPS 33 and 36 on the wire: what clients may send, in whatever pieces, and what the engine then sees."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from services.proxyd.routes import INFERENCE_ROUTES
from tests.proxyd.plane import Plane, running_plane
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"


def body_of(model: str = "m", **fields: object) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def head_of(size: int, *lines: str, path: str = CHAT) -> bytes:
    first = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {size}"]
    return "\r\n".join([*first, *lines]).encode() + b"\r\n\r\n"


def connect(plane: Plane) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


@pytest.fixture
def ready(plane: Plane, upstream: RawUpstream) -> Plane:
    plane.serve_model("m", upstream.port)
    return plane


def test_the_body_arrives_byte_for_byte_and_the_engines_key_replaces_the_clients(
    ready: Plane, upstream: RawUpstream
) -> None:
    """"The body goes to the engine byte for byte, headers too except Authorization, Host and hop-by-hop"."""
    body = b'{ "messages":[ {"role":"user","content":"\\u00e9 \xc3\xa9  "} ],\n "model" : "m", "t":1.0e0 ,"x":1}'
    headers = {
        "Authorization": "Bearer sk-client",
        "X-Api-Key": "sk-client",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "X-Custom": "Kept As Is",
        "Accept": "*/*",
        "User-Agent": "test",
        "TE": "trailers",
    }
    status, answered, answer = ready.request("POST", CHAT + "?a=b&c=%20", body, headers)
    assert (status, json.loads(answer)) == (200, {"ok": True})
    [seen] = upstream.requests
    assert seen.body == body
    assert seen.line == b"POST /v1/chat/completions?a=b&c=%20 HTTP/1.1"
    assert seen.header(b"authorization") == b"Bearer engine-key"
    assert seen.header(b"host") == b"127.0.0.1:%d" % upstream.port
    assert seen.header(b"x-custom") == b"Kept As Is"
    assert seen.header(b"user-agent") == b"test"
    for name in (b"x-api-key", b"x-hop", b"te", b"connection"):
        assert seen.header(name) is None, name
    assert answered["x-mesh-node"] == "testnode"
    assert answered["x-mesh-attempts"] == "1"
    assert float(answered["x-mesh-overhead-ms"]) >= 0
    assert float(answered["x-mesh-queue-ms"]) >= 0


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-123", True), ("a" * 65, False), ("two words", False), ("é", False), ("", False)]
)
def test_a_sane_request_id_is_honoured(ready: Plane, given: str, kept: bool) -> None:
    connection = connect(ready)
    body = body_of()
    connection.sendall(head_of(len(body), f"X-Request-Id: {given}") + body)
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    assert (answer.headers["x-request-id"] == given) is kept
    assert answer.headers["x-request-id"]
    connection.close()


def test_the_word_model_inside_message_text_misleads_nobody(ready: Plane, upstream: RawUpstream) -> None:
    text = '{"model":"other"} "model": "other"'
    body = json.dumps({"messages": [{"role": "user", "content": text, "model": "other"}], "model": "m"}).encode()
    assert ready.request("POST", CHAT, body)[0] == 200
    assert upstream.requests[0].body == body


def test_a_request_in_segments_of_one_byte(ready: Plane, upstream: RawUpstream) -> None:
    body = body_of()
    connection = connect(ready)
    for byte in head_of(len(body)) + body:
        connection.send(bytes([byte]))
    assert read_answer(connection)[0] == 200
    assert upstream.requests[0].body == body
    connection.close()


def test_a_chunked_body_arrives_whole(ready: Plane, upstream: RawUpstream) -> None:
    body = body_of()
    connection = connect(ready)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    for at in range(0, len(body), 7):
        part = body[at : at + 7]
        connection.sendall(b"%x;ext=1\r\n%b\r\n" % (len(part), part))
    connection.sendall(b"0\r\nX-Trailer: 1\r\n\r\n")
    assert read_answer(connection)[0] == 200
    assert upstream.requests[0].body == body
    assert upstream.requests[0].header(b"content-length") == b"%d" % len(body)
    assert upstream.requests[0].header(b"transfer-encoding") is None
    connection.close()


def test_two_models_on_one_keep_alive_connection(ready: Plane, upstream: RawUpstream) -> None:
    ready.serve_model("other", upstream.port, key="other-key")
    connection = connect(ready)
    for model in ("m", "other", "m"):
        body = body_of(model)
        connection.sendall(head_of(len(body)) + body)
        assert read_answer(connection)[0] == 200
    keys = [request.header(b"authorization") for request in upstream.requests]
    assert keys == [b"Bearer engine-key", b"Bearer other-key", b"Bearer engine-key"]
    assert len(upstream.peers) == 1, "the connection to the engine is kept alive too"
    connection.close()


def test_expect_100_continue(ready: Plane, upstream: RawUpstream) -> None:
    body = body_of()
    connection = connect(ready)
    connection.sendall(head_of(len(body), "Expect: 100-continue"))
    assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert read_answer(connection)[0] == 200
    assert upstream.requests[0].header(b"expect") is None
    connection.close()


def test_pipelined_requests_are_answered_in_order(ready: Plane, upstream: RawUpstream) -> None:
    def echo(peer: Peer, request: Received) -> None:
        peer.json({"n": json.loads(request.body)["n"]})

    upstream.handler = echo
    bodies = [body_of(n=number) for number in range(5)]
    connection = connect(ready)
    connection.sendall(b"".join(head_of(len(body)) + body for body in bodies))
    connection.shutdown(socket.SHUT_WR)
    received = b""
    while data := connection.recv(65536):
        received += data
    assert [b'{"n": %d}' % number in received for number in range(5)] == [True] * 5
    assert received.index(b'{"n": 0}') < received.index(b'{"n": 4}')
    assert received.count(b"HTTP/1.1 200 OK") == 5
    connection.close()


@pytest.mark.parametrize("seconds", [0.0, 0.6])
def test_a_half_closed_client_gets_its_answer(ready: Plane, upstream: RawUpstream, seconds: float) -> None:
    """Also when the answer takes longer than it takes to look whether the client is still there."""

    def answer(peer: Peer, _request: Received) -> None:
        threading.Event().wait(seconds)
        peer.json({"late": True})

    upstream.handler = answer
    body = body_of()
    connection = connect(ready)
    connection.sendall(head_of(len(body)) + body)
    connection.shutdown(socket.SHUT_WR)
    assert read_answer(connection) == (200, b'{"late": true}')
    assert connection.recv(10) == b"", "a half-closed connection ends after its answer"
    connection.close()


def test_a_body_of_nine_mebibytes(ready: Plane, upstream: RawUpstream) -> None:
    body = body_of(image="A" * (9 * 1024**2))
    status, _, _ = ready.request("POST", CHAT, body)
    assert status == 200
    assert upstream.requests[0].body == body


def test_a_slow_reader_costs_bounded_memory(ready: Plane, upstream: RawUpstream) -> None:
    """The engine is held back instead: what it could send stays within socket buffers and our water marks."""
    sent = [0]
    blob = b"x" * 65536

    def flood(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        for _ in range(2000):
            peer.chunk(blob)
            sent[0] += len(blob)
        peer.end_stream()

    upstream.handler = flood
    body = body_of(stream=True)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.connect(("127.0.0.1", ready.port))
    connection.sendall(head_of(len(body)) + body)
    assert connection.recv(100)

    last: list[float] = [0, time.monotonic()]

    def stalled() -> bool:
        if sent[0] != last[0]:
            last[:] = [sent[0], time.monotonic()]
        return sent[0] > 0 and time.monotonic() - last[1] > 0.3

    wait_until(stalled, 10, "the engine is held back")
    assert sent[0] < 24 * 1024**2
    received = 0
    while data := connection.recv(1 << 20):
        received += len(data)
        if data.endswith(b"0\r\n\r\n"):
            break
    assert received > 2000 * 65536
    connection.close()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"model": "m", ', "invalid_json"),
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'{"model": 5}', "invalid_type"),
        (b"\xff\xfe", "invalid_json"),
    ],
)
def test_what_is_no_request_gets_400(ready: Plane, upstream: RawUpstream, body: bytes, code: str) -> None:
    status, _, answer = ready.request("POST", CHAT, body)
    assert status == 400
    error = json.loads(answer)["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert upstream.requests == []


def test_get_on_post_routes_is_405_with_allow(ready: Plane) -> None:
    for route in INFERENCE_ROUTES:
        status, headers, answer = ready.request("GET", route.path)
        assert (status, headers["allow"]) == (405, "POST, OPTIONS"), route
        assert json.loads(answer)["error"]["code"] == "method_not_allowed"


NO_ROUTES = (
    "/", "/v1", "/v1/models/", "/v1/chat", "/v1/chat/completions/", "/slots", "/props", "/metrics/x", "/tokenize",
    "/v1/chat/completions/../../slots", "//v1/models",
)  # fmt: skip


@pytest.mark.parametrize("path", NO_ROUTES)
def test_everything_else_is_404(ready: Plane, upstream: RawUpstream, path: str) -> None:
    """Deny by default: an engine's own management routes are out of reach."""
    for method in ("GET", "POST"):
        assert ready.request(method, path, b"{}")[0] == 404
    assert upstream.requests == []


def test_head_has_no_body(ready: Plane) -> None:
    status, headers, answer = ready.request("HEAD", "/v1/models")
    assert (status, answer) == (200, b"")
    assert int(headers["content-length"]) > 10


def test_the_body_limit(mesh_home: Path, upstream: RawUpstream) -> None:
    with running_plane(mesh_home, max_body_bytes=1000) as plane:
        plane.serve_model("m", upstream.port)
        assert plane.request("POST", CHAT, body_of(x="a" * 500))[0] == 200
        status, _, answer = plane.request("POST", CHAT, body_of(x="a" * 1000))
        assert status == 413
        assert "api.max_body_bytes" in json.loads(answer)["error"]["message"]
        connection = connect(plane)
        # Chunked: no length to judge by. The connection stays usable.
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(30):
            connection.sendall(b"64\r\n" + b"a" * 100 + b"\r\n")
        assert read_answer(connection)[0] == 413
        connection.sendall(b"0\r\n\r\n")
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(connection)[0] == 200
        connection.close()
        assert len(upstream.requests) == 1


def test_who_may_not_pass_is_refused_on_every_route(ready: Plane, upstream: RawUpstream) -> None:
    """TRAPS 36. The check itself has its own tests."""
    posts = [("POST", route.path) for route in INFERENCE_ROUTES]
    for method, path in [("GET", "/live"), ("GET", "/v1/models"), *posts]:
        status, _, answer = ready.request(method, path, b"{}", {"Host": "evil.example"})
        assert status == 403, path
        assert json.loads(answer)["error"]["type"] == "permission_error"
    assert upstream.requests == []


def test_an_engines_cors_headers_are_dropped_and_ours_are_added(ready: Plane, upstream: RawUpstream) -> None:
    def answer(peer: Peer, _request: Received) -> None:
        peer.send(
            b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nKeep-Alive: timeout=5\r\nX-Engine: yes\r\n"
            b"Content-Length: 2\r\n\r\n{}"
        )

    upstream.handler = answer
    _, headers, _ = ready.request("POST", CHAT, body_of(), {"Origin": "https://chat.example"})
    assert headers["access-control-allow-origin"] == "https://chat.example"
    assert headers["x-engine"] == "yes"
    assert "keep-alive" not in headers
    _, headers, _ = ready.request("POST", CHAT, body_of())
    assert "access-control-allow-origin" not in headers


def test_a_preflight_is_answered_without_a_request_to_anybody(ready: Plane, upstream: RawUpstream) -> None:
    status, headers, _ = ready.request("OPTIONS", CHAT, None, {"Origin": "https://chat.example"})
    assert (status, headers["access-control-allow-origin"]) == (204, "https://chat.example")
    assert upstream.requests == []


def test_an_audio_form_names_its_model_in_a_field(ready: Plane, upstream: RawUpstream) -> None:
    ready.serve_model("whisper", upstream.port, type="audio")
    form = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="model.wav"\r\n'
        b'Content-Type: audio/wav\r\n\r\nname="model"\r\n\r\nwrong\x00\xff\r\n'
        b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--B--\r\n'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=B"}
    assert ready.request("POST", "/v1/audio/transcriptions", form, headers)[0] == 200
    assert upstream.requests[0].body == form
