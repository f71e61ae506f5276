"""Requests whose model is not ready: placed, waited for, told why, refused (DESIGN §8; TRAPS 34, 35)."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from shared.errors import RequestRefused
from shared.ids import ModelName
from tests.proxyd.plane import Plane, running_plane
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received
from tests.proxyd.wire import in_background, read_until, send_chat
from tests.waiting import wait_until

SECOND = 1.0


def wait_for_waiting(plane: Plane) -> None:
    wait_until(lambda: plane.launcherd.waiting, 5, "the request waits in launcherd's queue")


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


def test_who_waits_for_a_model_that_its_owner_unloads_does_not_load_it_again(plane: Plane) -> None:
    plane.declare("m")
    plane.slot("m", "loading")
    result = in_background(plane.chat)
    wait_for_waiting(plane)
    words = "m was unloaded while the request waited for it"
    plane.call(lambda: plane.launcherd.waiting.pop()[1].set_exception(RequestRefused("unloaded", words)))
    wait_until(lambda: result, 5, "it is answered")
    status, _, answer = result[0]  # type: ignore[misc]
    assert (status, json.loads(answer)["error"]["code"]) == (503, "unloaded")
    assert words in json.loads(answer)["error"]["message"]
    assert plane.placements == [], "nobody is asked where else it could be loaded"


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
        early = read_until(connection, b": waiting: ")
        assert early.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-type: text/event-stream" in early
        plane.slot("m", "loading", "half of it is read")
        read_until(connection, b": waiting: half of it is read")
        plane.serve_model("m", upstream.port)
        rest = read_until(connection, b"0\r\n\r\n")
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
        seen = read_until(connection, b": waiting: ")
        if late == "refused":
            plane.call(plane.launcherd.waiting[0][1].set_exception, RequestRefused("load_failed", "out of memory"))
        elif late == "engine_error":
            plane.serve_model("m", upstream.port)
        seen += read_until(connection, b"0\r\n\r\n")
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
