"""One request's life: engines that fail at every point, clients that leave at every point (TRAPS 26, 34, 35)."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import RequestRefused
from shared.ids import ModelName
from tests.proxyd.plane import Plane, running_plane
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received, refused_port
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
SECOND = 1.0


def send_chat(plane: Plane, path: str = CHAT, **fields: object) -> socket.socket:
    """A request whose answer is not waited for."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    connection = socket.create_connection(("127.0.0.1", plane.port), timeout=10)
    connection.sendall(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
    )
    return connection


def events(text: bytes) -> list[bytes]:
    return [part for part in text.split(b"\n\n") if part]


@pytest.fixture
def ready(plane: Plane, upstream: RawUpstream) -> Plane:
    plane.serve_model("m", upstream.port)
    return plane


def free_again(plane: Plane) -> None:
    """No lease is held by a request any more, within a second."""

    def is_free() -> bool:
        held = plane.call(plane.leases.held)
        return bool(held) and not sum(slot.in_use for slot in held)

    wait_until(is_free, SECOND, "the lease is released")


# -- clients that leave (TRAPS 26) --------------------------------------------------------------------------


def test_a_client_gone_during_prefill_cancels_the_engine_within_a_second(ready: Plane, upstream: RawUpstream) -> None:
    upstream.handler = lambda peer, _request: peer.wait_gone()
    connection = send_chat(ready)
    wait_until(lambda: upstream.requests, 5, "the engine has the request")
    connection.close()
    assert upstream.peers[0].gone.wait(SECOND)
    free_again(ready)
    wait_until(lambda: ready.metrics.records, 1, "the record is filed")
    assert ready.metrics.records[0].outcome == "client_gone"


def test_a_client_gone_while_streaming_cancels_the_engine_within_a_second(ready: Plane, upstream: RawUpstream) -> None:
    def stream_for_ever(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        peer.wait_gone()

    upstream.handler = stream_for_ever
    connection = send_chat(ready, stream=True)
    assert b"one" in _read_until(connection, b"one")
    connection.close()
    assert upstream.peers[0].gone.wait(SECOND)
    free_again(ready)


def test_a_client_gone_with_unread_bytes_is_noticed_too(ready: Plane, upstream: RawUpstream) -> None:
    """Then the kernel sends a reset instead of an end."""

    def stream_for_ever(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        peer.wait_gone()

    upstream.handler = stream_for_ever
    connection = send_chat(ready, stream=True)
    wait_until(lambda: ready.log.active() and ready.log.active()[0].response_bytes, 5, "bytes were forwarded")
    connection.close()
    assert upstream.peers[0].gone.wait(SECOND)
    free_again(ready)


def test_a_client_gone_from_the_queue_frees_its_place_within_a_second(plane: Plane) -> None:
    plane.declare("m")
    connection = send_chat(plane)
    wait_until(lambda: plane.launcherd.waiting, 5, "the request waits in launcherd's queue")
    connection.close()
    wait_until(lambda: plane.launcherd.withdrawn, SECOND, "it is withdrawn")
    assert plane.launcherd.waiting == []
    wait_until(lambda: plane.metrics.records, 1, "the record is filed")
    assert plane.metrics.records[0].outcome == "client_gone"
    assert plane.app.active_count == 0


def test_a_client_gone_while_its_model_is_being_placed(plane: Plane) -> None:
    plane.place_hangs = True
    plane.declare("m")
    connection = send_chat(plane)
    wait_until(lambda: plane.placements, 5, "electiond was asked")
    connection.close()
    wait_until(lambda: plane.metrics.records, SECOND, "the request ended")
    assert plane.launcherd.acquires == []


def test_a_client_gone_in_the_middle_of_its_body(ready: Plane, upstream: RawUpstream) -> None:
    connection = socket.create_connection(("127.0.0.1", ready.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    wait_until(lambda: ready.app.active_count, 5, "the request began")
    connection.close()
    wait_until(lambda: not ready.app.active_count, SECOND, "the request ended")
    assert upstream.requests == []


# -- engines that fail before a byte ------------------------------------------------------------------------


def test_a_stale_keep_alive_connection_costs_nothing(ready: Plane, upstream: RawUpstream) -> None:
    """The engine closes an idle connection just as it is used again."""

    def answer_once(peer: Peer, _request: Received) -> None:
        if len(upstream.peers) == 1 and len(upstream.requests) == 2:
            peer.connection.shutdown(socket.SHUT_RDWR)
            return
        peer.json({"ok": True})

    upstream.handler = answer_once
    assert ready.chat()[0] == 200
    status, headers, _ = ready.chat()
    assert (status, headers["x-mesh-attempts"]) == (200, "1")
    assert len(upstream.peers) == 2
    assert ready.launcherd.suspicions == []


def test_an_engine_that_refuses_is_suspected_and_the_request_tried_again(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", refused_port())

    def heal() -> None:
        """launcherd learns of it, and grants on the restarted engine."""
        plane.launcherd.engines[ModelName("m")] = (f"http://127.0.0.1:{upstream.port}", "engine-key")

    threading.Thread(target=lambda: (wait_until(lambda: plane.launcherd.suspicions, 5, "suspected"), heal())).start()
    plane.launcherd.parallel = 1
    status, headers, _ = plane.chat()
    assert status == 200
    assert int(headers["x-mesh-attempts"]) >= 2
    assert "refused the connection" in plane.launcherd.suspicions[0].detail


def test_an_engine_that_dies_before_its_first_byte_is_retried(ready: Plane, upstream: RawUpstream) -> None:
    def die_first(peer: Peer, _request: Received) -> None:
        if len(upstream.requests) == 1:
            peer.connection.shutdown(socket.SHUT_RDWR)
            return
        peer.json({"ok": True})

    upstream.handler = die_first
    status, headers, _ = ready.chat()
    assert (status, headers["x-mesh-attempts"]) == (200, "2")
    assert len(ready.launcherd.suspicions) == 1
    free_again(ready)


def test_a_stream_that_dies_before_its_first_event_is_retried(ready: Plane, upstream: RawUpstream) -> None:
    def die_first(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        if len(upstream.requests) == 1:
            peer.connection.shutdown(socket.SHUT_RDWR)
            return
        peer.event("one")
        peer.end_stream()

    upstream.handler = die_first
    status, _, answer = ready.chat(stream=True)
    assert status == 200
    assert b"one" in answer
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"error" not in answer


def test_a_small_answer_cut_in_the_middle_is_retried(ready: Plane, upstream: RawUpstream) -> None:
    def cut_first(peer: Peer, _request: Received) -> None:
        if len(upstream.requests) == 1:
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
            peer.connection.shutdown(socket.SHUT_RDWR)
            return
        peer.json({"ok": True})

    upstream.handler = cut_first
    status, headers, answer = ready.chat()
    assert (status, headers["x-mesh-attempts"], json.loads(answer)) == (200, "2", {"ok": True})


def test_after_three_attempts_the_client_learns_why(ready: Plane, upstream: RawUpstream) -> None:
    upstream.handler = lambda peer, _request: peer.connection.shutdown(socket.SHUT_RDWR)
    status, headers, answer = ready.chat()
    assert (status, headers["x-mesh-attempts"]) == (503, "3")
    assert headers["retry-after"]
    error = json.loads(answer)["error"]
    assert error["code"] == "engine_failed"
    assert "closed the connection before it answered" in error["message"]
    assert ready.metrics.records[0].outcome == "engine_failed"
    free_again(ready)


def test_what_is_not_http_counts_as_a_failed_attempt(ready: Plane, upstream: RawUpstream) -> None:
    upstream.handler = lambda peer, _request: peer.send(b"SSH-2.0-OpenSSH\r\n")
    status, _, answer = ready.chat()
    assert status == 503
    assert "not HTTP" in json.loads(answer)["error"]["message"]


# -- engines that fail after bytes (TRAPS 34) ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "bad_framing", "partial_event"])
def test_a_stream_cut_after_bytes_ends_with_one_error_event_and_no_done(
    ready: Plane, upstream: RawUpstream, how: str
) -> None:
    def cut(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        if how == "bad_framing":
            peer.send(b"zz\r\n")
            return
        if how == "partial_event":
            peer.chunk(b'data: {"choices": [{"del')
        peer.connection.shutdown(socket.SHUT_RDWR)

    upstream.handler = cut
    # http.client checks the chunk framing: a missing end would raise.
    status, _, answer = ready.chat(stream=True)
    assert status == 200
    *_, last = events(answer)
    assert last.startswith(b"data: ")
    error = json.loads(last[6:])["error"]
    assert error["code"] == "engine_failed"
    assert "incomplete" in error["message"]
    assert answer.count(b'"error"') == 1
    assert b"[DONE]" not in answer
    assert len(upstream.requests) == 1, "no silent second generation after bytes were sent"
    assert ready.metrics.records[0].outcome == "engine_failed"


def test_an_anthropic_stream_ends_with_its_own_kind_of_error(ready: Plane, upstream: RawUpstream) -> None:
    def cut(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.chunk(b'event: message_start\ndata: {"type":"message_start"}\n\n')
        peer.connection.shutdown(socket.SHUT_RDWR)

    upstream.handler = cut
    _, _, answer = ready.request("POST", "/v1/messages", {"model": "m", "stream": True, "messages": []})
    name, data = events(answer)[-1].split(b"\n")
    assert name == b"event: error"
    assert json.loads(data[6:])["type"] == "error"


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
def test_a_large_answer_cut_in_the_middle_never_looks_complete(
    ready: Plane, upstream: RawUpstream, framing: bytes
) -> None:
    part = b"a" * 200_000

    def cut(peer: Peer, _request: Received) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%b\r\n\r\n" % framing)
        peer.send(b"%x\r\n%b\r\n" % (len(part), part) if b"chunked" in framing else part)
        # Let it be forwarded first.
        wait_until(lambda: ready.log.active()[0].response_bytes, 5, "bytes were forwarded")
        peer.connection.shutdown(socket.SHUT_RDWR)

    upstream.handler = cut
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ready.chat()


def test_an_engines_own_error_passes_through_untouched(ready: Plane, upstream: RawUpstream) -> None:
    problem = {"error": {"code": 400, "message": "context too small", "type": "exceed_context_size_error", "n_ctx": 5}}
    upstream.handler = lambda peer, _request: peer.json(problem, "400 Bad Request")
    status, _, answer = ready.chat(stream=True)
    assert (status, json.loads(answer)) == (400, problem)
    assert ready.metrics.records[0].outcome == "error"


# -- silence ------------------------------------------------------------------------------------------------


def test_two_seconds_of_silence_ask_for_a_probe_and_are_no_error(ready: Plane, upstream: RawUpstream) -> None:
    """"after 2 s of silence where bytes were due it is probed"; TRAPS 30: inference has no timeout."""

    def pause(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        wait_until(lambda: ready.launcherd.suspicions, 5, "a probe was asked for")
        peer.event("two")
        peer.end_stream()

    upstream.handler = pause
    started = time.monotonic()
    _, _, answer = ready.chat(stream=True)
    assert answer.endswith(b"data: [DONE]\n\n")
    assert time.monotonic() - started >= 2.0
    assert len(ready.launcherd.suspicions) == 1
    assert "no byte for" in ready.launcherd.suspicions[0].detail


# -- waiting ------------------------------------------------------------------------------------------------


def wait_for_waiting(plane: Plane) -> None:
    wait_until(lambda: plane.launcherd.waiting, 5, "the request waits in launcherd's queue")


def in_background(work: Callable[[], object]) -> list[object]:
    """Runs it in a thread; the list gets its result."""
    result: list[object] = []
    threading.Thread(target=lambda: result.append(work()), daemon=True).start()
    return result


def test_a_model_that_is_not_loaded_is_placed_and_waited_for(plane: Plane, upstream: RawUpstream) -> None:
    plane.declare("m")
    result = in_background(plane.chat)
    wait_for_waiting(plane)
    assert plane.placements == ["m"]
    assert "m is unloaded" in plane.log.active()[0].reason
    plane.slot("m", "loading", "loading m for 1 s")
    wait_until(lambda: "loading m for 1 s" in plane.log.active()[0].reason, 5, "the reason is kept current")
    plane.serve_model("m", upstream.port)
    wait_until(lambda: result, 5, "it is answered")
    status, headers, _ = result[0]  # type: ignore[misc]
    assert status == 200
    assert float(headers["x-mesh-queue-ms"]) > 0
    assert plane.metrics.records[0].queue_seconds > 0


def test_a_model_that_is_already_starting_is_not_placed_again(plane: Plane, upstream: RawUpstream) -> None:
    plane.declare("m")
    plane.slot("m", "loading")
    result = in_background(plane.chat)
    wait_for_waiting(plane)
    plane.serve_model("m", upstream.port)
    wait_until(lambda: result, 5, "it is answered")
    assert plane.placements == []


def test_without_electiond_this_node_loads_the_model_itself(plane: Plane, upstream: RawUpstream) -> None:
    plane.place_hangs = True
    plane.declare("m")
    result = in_background(plane.chat)
    wait_until(lambda: plane.launcherd.waiting, 3, "launcherd is asked although electiond is silent")
    plane.serve_model("m", upstream.port)
    wait_until(lambda: result, 5, "it is answered")


@pytest.mark.parametrize(
    ("code", "status"), [("needs_capacity", 503), ("idle", 503), ("model_not_found", 404)]
)
def test_what_electiond_refuses_fails_at_once(plane: Plane, code: str, status: int) -> None:
    plane.declare("m")
    plane.place_error = RequestRefused(code, "needs 40 GB, the mesh has 8 GB")
    got, headers, answer = plane.chat()
    assert got == status
    error = json.loads(answer)["error"]
    assert error["code"] == code
    assert "needs 40 GB" in error["message"]
    assert ("retry-after" in headers) == (status == 503)
    assert plane.launcherd.acquires == []


@pytest.mark.parametrize(
    ("code", "status"), [("load_failed", 503), ("model_too_large", 503), ("overloaded", 429), ("model_not_found", 404)]
)
def test_what_launcherd_refuses_fails_at_once(plane: Plane, code: str, status: int) -> None:
    plane.declare("m")
    plane.launcherd.refusals[ModelName("m")] = RequestRefused(code, "the engine's last words", 7.0)
    got, headers, answer = plane.chat(stream=True)
    assert got == status
    assert "the engine's last words" in json.loads(answer)["error"]["message"]
    if status in (429, 503):
        assert headers["retry-after"] == "7"


def test_a_full_queue_is_429_with_retry_after(mesh_home: Path) -> None:
    with running_plane(mesh_home, queue_limit=2) as plane:
        plane.declare("m")
        waiting = [send_chat(plane) for _ in range(2)]
        wait_until(lambda: len(plane.launcherd.waiting) == 2, 5, "two wait")
        status, headers, answer = plane.chat()
        assert (status, headers["retry-after"]) == (429, "1")
        assert json.loads(answer)["error"]["type"] == "rate_limit_error"
        for connection in waiting:
            connection.close()


def test_requests_beyond_parallel_run_in_order(mesh_home: Path, upstream: RawUpstream) -> None:
    with running_plane(mesh_home, parallel=2) as plane:
        running = []
        gate = threading.Semaphore(0)

        def answer(peer: Peer, request: Received) -> None:
            running.append(json.loads(request.body)["n"])
            gate.acquire()
            peer.json({"ok": True})

        upstream.handler = answer
        plane.serve_model("m", upstream.port)
        plane.launcherd.parallel = 2
        connections = []
        for number in range(5):
            connections.append(send_chat(plane, n=number))
            wait_until(lambda number=number: plane.app.active_count == number + 1, 5, "it is in")  # type: ignore[misc]
            wait_until(lambda number=number: len(running) == min(2, number + 1), 5, "two run")  # type: ignore[misc]
        for done in range(1, 4):
            gate.release()
            wait_until(lambda done=done: len(running) == 2 + done, 5, "the next one runs")  # type: ignore[misc]
        assert sorted(running[:2]) == [0, 1]
        assert running[2:] == [2, 3, 4]
        for _ in range(3):
            gate.release()
        for connection in connections:
            assert b"200 OK" in connection.recv(1000)
            connection.close()
        assert plane.metrics.running == 0 or wait_until(lambda: plane.metrics.running == 0, 1, "all ended")


def test_a_waiting_stream_is_told_why_and_then_served(mesh_home: Path, upstream: RawUpstream) -> None:
    """"headers held up to 10 s, then streaming requests get 200 and SSE comments"."""

    def stream(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        peer.end_stream()

    upstream.handler = stream
    with running_plane(mesh_home, silent_wait_seconds=0.3) as plane:
        plane.declare("m")
        connection = send_chat(plane, stream=True)
        early = _read_until(connection, b": waiting: ")
        assert early.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-type: text/event-stream" in early
        plane.slot("m", "loading", "half of it is read")
        _read_until(connection, b": waiting: half of it is read")
        plane.serve_model("m", upstream.port)
        rest = _read_until(connection, b"0\r\n\r\n")
        assert b"one" in rest
        assert b"data: [DONE]" in rest
        connection.close()


@pytest.mark.parametrize("late", ["refused", "engine_error", "timeout"])
def test_an_error_after_the_comments_began_is_one_event(mesh_home: Path, upstream: RawUpstream, late: str) -> None:
    """TRAPS 34: "Errors after the stream began: one framed data: {"error":…} and no [DONE]"."""
    upstream.handler = lambda peer, _request: peer.json({"error": {"message": "no such grammar"}}, "400 Bad Request")
    wait_seconds = 0.6 if late == "timeout" else 600.0
    with running_plane(mesh_home, silent_wait_seconds=0.1, request_wait_seconds=wait_seconds) as plane:
        plane.declare("m")
        connection = send_chat(plane, stream=True)
        seen = _read_until(connection, b": waiting: ")
        if late == "refused":
            plane.call(plane.launcherd.waiting[0][1].set_exception, RequestRefused("load_failed", "out of memory"))
        elif late == "engine_error":
            plane.serve_model("m", upstream.port)
        seen += _read_until(connection, b"0\r\n\r\n")
        [data] = [line for line in seen.split(b"\n") if line.startswith(b"data: ")]
        error = json.loads(data[6:])["error"]
        expected = {"refused": "out of memory", "engine_error": "no such grammar", "timeout": "not ready within 0.6 s"}
        assert expected[late] in error["message"]
        assert b"[DONE]" not in seen
        connection.close()


def test_others_wait_without_bytes_and_get_a_real_status(mesh_home: Path) -> None:
    """"others wait without bytes; 503 + Retry-After + reason at request_wait_seconds"."""
    with running_plane(mesh_home, silent_wait_seconds=0.1, request_wait_seconds=0.5) as plane:
        plane.declare("m")
        plane.slot("m", "loading", "reading the file")
        status, headers, answer = plane.chat()
        assert status == 503
        assert headers["retry-after"]
        assert "reading the file" in json.loads(answer)["error"]["message"]
        wait_until(lambda: plane.launcherd.withdrawn, SECOND, "it left the queue")


def _read_until(connection: socket.socket, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        data = connection.recv(65536)
        assert data, f"the connection ended before {text!r}: {seen!r}"
        seen += data
    return seen
