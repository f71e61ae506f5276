"""One request's life: engines that fail at every point, clients that leave at every point (TRAPS 26, 34, 35)."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time

import pytest

from shared.ids import ModelName
from tests.proxyd.plane import Plane
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received, refused_port
from tests.proxyd.wire import events, read_until, send_chat
from tests.waiting import wait_until

SECOND = 1.0


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
    assert b"one" in read_until(connection, b"one")
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
