"""Requests whose model runs on other nodes (DESIGN §8; docs/spec/routing.md, whose rules the tests quote)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from shared.ids import ModelName, PeerId
from shared.messages.daemon import Refused
from shared.messages.mesh import Announcement, MemberChanged
from shared.messages.models import ModelPlaced, Route, RouteHost, RoutesChanged
from tests.proxyd.far_node import FarNodes, far_nodes
from tests.proxyd.plane import SELF, Plane
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received, raw_upstream
from tests.proxyd.wire import in_background, read_until, send_chat
from tests.waiting import wait_until

B, C = PeerId("12B"), PeerId("12C")


@pytest.fixture
def far(plane: Plane) -> Iterator[FarNodes]:
    for peer, name in ((B, "barn"), (C, "cellar")):
        said = Announcement(
            peer_id=peer, incarnation=1, seq=1, mesh_id="m", version="1", name=name, role="host", state="active"  # type: ignore[arg-type]
        )
        plane.call(plane.view.apply, MemberChanged(announcement=said, state="alive", reason="answers"))
    with far_nodes(plane.paths.data_socket) as nodes:
        yield nodes


@pytest.fixture
def other() -> Iterator[RawUpstream]:
    with raw_upstream() as running:
        yield running


def route(plane: Plane, *hosts: PeerId, load: float = 0.0, model: str = "m") -> None:
    if model not in plane.catalog:
        plane.declare(model, status="ready")
    found = tuple(RouteHost(peer_id=peer, parallel=4, load=load) for peer in hosts)
    routes = (Route(model=ModelName(model), type="llm", hosts=found),)
    plane.call(plane.view.apply, RoutesChanged(routes=routes))


def test_a_model_that_only_another_node_serves_is_answered_from_there(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    far.engines[B] = upstream.port
    route(plane, B)
    status, headers, body = plane.chat()
    assert (status, json.loads(body)) == (200, {"ok": True})
    assert headers["x-mesh-node"] == "barn"
    assert (far.opened[0].peer_id, far.opened[0].model) == (B, "m")
    assert headers["x-request-id"] == far.opened[0].request_id
    assert plane.launcherd.acquires == []
    assert plane.metrics.records[0].node == "barn"


def test_headers_and_body_arrive_there_byte_for_byte_and_the_clients_key_stays_here(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    far.engines[B] = upstream.port
    route(plane, B)
    body = b'{"model": "m",  "messages": [], "odd": 1e400}'
    plane.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer mine", "X-Odd": "yes"})
    seen = upstream.requests[0]
    assert seen.body == body
    assert seen.header(b"x-odd") == b"yes"
    assert seen.header(b"authorization") is None


def test_a_stream_passes_as_it_comes(plane: Plane, far: FarNodes, upstream: RawUpstream) -> None:
    def slowly(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        wait_until(lambda: got, 5, "the first event is through")
        peer.event("two")
        peer.end_stream()

    got: list[bytes] = []
    upstream.handler = slowly
    far.engines[B] = upstream.port
    route(plane, B)
    connection = send_chat(plane, stream=True)
    got.append(read_until(connection, b"one"))
    assert b"[DONE]" in read_until(connection, b"[DONE]")
    connection.close()


def test_a_host_that_cannot_be_reached_is_passed_over(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    """Another host is asked until the first byte of an answer was sent."""
    far.engines[C] = upstream.port
    route(plane, B, C)
    for _ in range(4):
        status, headers, _ = plane.chat()
        assert (status, headers["x-mesh-node"]) == (200, "cellar")
    assert sum(opened.peer_id == B for opened in far.opened) <= 1, "it cools down for all requests"


def test_an_engine_that_dies_before_its_first_byte_costs_only_another_attempt(
    plane: Plane, far: FarNodes, upstream: RawUpstream, other: RawUpstream
) -> None:
    upstream.handler = lambda peer, _request: peer.close()
    far.engines.update({B: upstream.port, C: other.port})
    route(plane, B, C)
    answers = [plane.chat(user=str(number)) for number in range(6)]
    assert {status for status, _, _ in answers} == {200}
    assert {headers["x-mesh-node"] for _, headers, _ in answers} == {"cellar"}


def test_an_answer_cut_after_its_first_byte_is_never_called_complete(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    def half(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("half")
        peer.close()

    upstream.handler = half
    far.engines[B] = upstream.port
    route(plane, B)
    connection = send_chat(plane, stream=True)
    text = read_until(connection, b"error")
    assert b"the engine on barn closed the connection in the middle" in text
    assert b"[DONE]" not in text
    connection.close()


def test_a_refusal_of_every_host_reaches_the_client(plane: Plane, far: FarNodes) -> None:
    full = Refused(code="overloaded", detail="256 requests wait", retry_after_seconds=3.0)
    far.refusals.update({B: full, C: full})
    route(plane, B, C)
    status, headers, body = plane.chat()
    assert (status, headers["retry-after"]) == (429, "3")
    assert "256 requests wait" in json.loads(body)["error"]["message"]
    assert {opened.peer_id for opened in far.opened} == {B, C}


def test_a_full_host_is_passed_over_for_a_free_one(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    far.refusals[B] = Refused(code="overloaded", detail="full", retry_after_seconds=3.0)
    far.engines[C] = upstream.port
    route(plane, B, C)
    answers = [plane.chat(user=str(number)) for number in range(6)]
    assert {(status, headers["x-mesh-node"]) for status, headers, _ in answers} == {(200, "cellar")}


def test_a_conversation_keeps_its_host(plane: Plane, far: FarNodes, upstream: RawUpstream, other: RawUpstream) -> None:
    far.engines.update({B: upstream.port, C: other.port})
    route(plane, B, C)
    nodes = {
        user: {plane.chat(user=user)[1]["x-mesh-node"] for _ in range(3)} for user in map(str, range(12))
    }
    assert all(len(of_one) == 1 for of_one in nodes.values())
    assert set().union(*nodes.values()) == {"barn", "cellar"}


def test_the_own_engine_is_preferred_for_requests_without_a_conversation(
    plane: Plane, far: FarNodes, upstream: RawUpstream, other: RawUpstream
) -> None:
    far.engines[B] = other.port
    plane.serve_model("m", upstream.port)
    route(plane, B, SELF)
    status, headers, _ = plane.request("POST", "/v1/completions", {"model": "m", "prompt": ""})
    assert (status, headers["x-mesh-node"]) == (200, "testnode")


def test_a_model_placed_on_another_node_is_loaded_there_by_the_request(
    plane: Plane, far: FarNodes, upstream: RawUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def elsewhere(model: ModelName) -> ModelPlaced:
        return ModelPlaced(model=model, peer_id=B, reason="on its disk and it fits")

    monkeypatch.setattr(plane.app._plane, "place", elsewhere)
    plane.declare("m")
    far.held.add(B)
    far.engines[B] = upstream.port
    result = in_background(plane.chat)
    wait_until(lambda: far.opened, 5, "the far node is asked")
    assert plane.log.active()[0].reason
    far.held.discard(B)
    wait_until(lambda: result, 5, "it is answered")
    assert result[0][1]["x-mesh-node"] == "barn"  # type: ignore[index]


def test_a_client_that_leaves_while_it_waits_is_noticed_there(plane: Plane, far: FarNodes) -> None:
    far.held.add(B)
    route(plane, B)
    connection = send_chat(plane)
    wait_until(lambda: far.opened, 5, "the far node is asked")
    connection.close()
    wait_until(lambda: far.left == [B], 5, "the place is given up")


def test_a_client_that_leaves_during_the_answer_cuts_it(plane: Plane, far: FarNodes, upstream: RawUpstream) -> None:
    def endless(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        peer.wait_gone()

    upstream.handler = endless
    far.engines[B] = upstream.port
    route(plane, B)
    connection = send_chat(plane, stream=True)
    read_until(connection, b"one")
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_until(lambda: upstream.peers[0].gone.is_set(), 5, "the engine's connection is closed")
    wait_until(lambda: not plane.app._plane.remote_in_use[B], 5, "it no longer counts as load")


def test_without_tunneld_the_request_waits_and_is_answered_when_it_is_back(
    plane: Plane, upstream: RawUpstream
) -> None:
    route(plane, B)
    result = in_background(plane.chat)
    wait_until(lambda: "tunneld is away" in (plane.log.active() or [_NONE])[0].reason, 5, "the reason is told")
    with far_nodes(plane.paths.data_socket) as far:
        far.engines[B] = upstream.port
        wait_until(lambda: result, 5, "it is answered")
    assert result[0][0] == 200  # type: ignore[index]


class _None:
    reason = ""


_NONE = _None()
