"""Requests whose model runs on other nodes (DESIGN §8; docs/spec/routing.md, whose rules the tests quote)."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from services.proxyd.io import waiting
from services.proxyd.mesh_view import Ready
from shared.errors import RequestRefused
from shared.ids import ModelName, PeerId
from shared.messages.daemon import Refused
from shared.messages.mesh import Announcement, MemberChanged
from shared.messages.models import CatalogChanged, Route, RouteHost, RoutesChanged
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


@pytest.mark.parametrize("prefix", ["/api/v1", "/v0", "/api/v0"])
def test_lemonades_prefixes_end_here(plane: Plane, far: FarNodes, upstream: RawUpstream, prefix: str) -> None:
    """docs/spec/lemonade.md 1: the engine always sees the `/v1` path; the far tunneld knows no other."""
    far.engines[B] = upstream.port
    route(plane, B)
    assert plane.request("POST", f"{prefix}/chat/completions", {"model": "m", "messages": []})[0] == 200
    assert upstream.requests[0].line == b"POST /v1/chat/completions HTTP/1.1"


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


def test_while_the_own_engine_loads_another_nodes_engine_answers(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    """"bootstrap proxy: a joining node tunnels to hosts while its own engine loads" (DESIGN §8)."""
    far.engines[B] = upstream.port
    plane.declare("m")
    plane.slot("m", "loading")
    route(plane, B)
    status, headers, _ = plane.chat()
    assert (status, headers["x-mesh-node"]) == (200, "barn")
    assert plane.placements == []
    assert plane.launcherd.acquires == []


def test_a_model_placed_on_another_node_is_loaded_there_by_the_request(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    plane.place_on = [B]
    plane.declare("m")
    far.held.add(B)
    far.engines[B] = upstream.port
    result = in_background(plane.chat)
    wait_until(lambda: far.opened, 5, "the far node is asked")
    assert plane.log.active()[0].reason
    far.held.discard(B)
    wait_until(lambda: result, 5, "it is answered")
    assert result[0][1]["x-mesh-node"] == "barn"


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
    wait_until(lambda: not plane.app._plane.tunnels.in_use, 5, "it no longer counts as load")


def test_without_tunneld_the_request_waits_and_is_answered_when_it_is_back(
    plane: Plane, upstream: RawUpstream
) -> None:
    route(plane, B)
    result = in_background(plane.chat)
    wait_until(lambda: any("tunneld is away" in record.reason for record in plane.log.active()), 5, "it is told")
    with far_nodes(plane.paths.data_socket) as far:
        far.engines[B] = upstream.port
        wait_until(lambda: result, 5, "it is answered")
    assert result[0][0] == 200


# -- which host -------------------------------------------------------------------------------------------------------


def test_what_this_node_has_on_a_host_counts_at_once(
    plane: Plane, far: FarNodes, upstream: RawUpstream, other: RawUpstream
) -> None:
    """Bounded load: a conversation's host that is full is passed over, before its own word on that comes by gossip."""
    gone: list[Peer] = []

    def hold(peer: Peer, _request: Received) -> None:
        gone.append(peer)
        peer.wait_gone()

    upstream.handler = hold
    far.engines.update({B: upstream.port, C: other.port})
    route(plane, B, C)
    on_b = next(
        user
        for user in map(str, range(100))
        if plane.call(chosen, plane, user) == B
    )
    connections = [send_chat(plane, user=on_b) for _ in range(4)]
    wait_until(lambda: len(gone) == 4, 5, "four run on its host, which has four places")
    connections.append(send_chat(plane, user=on_b))
    wait_until(lambda: other.requests, 5, "the fifth goes to the other host")
    for connection in connections:
        connection.close()


def chosen(plane: Plane, session: str) -> PeerId | None:
    wanted = plane.view.resolve("m", "llm")
    assert isinstance(wanted, Ready)
    host = plane.app._plane.choose(wanted, session)
    return host.peer_id if host is not None else None


def test_the_own_launcherds_refusal_is_passed_over_for_another_host(
    plane: Plane, far: FarNodes, other: RawUpstream
) -> None:
    far.engines[B] = other.port
    plane.declare("m")
    plane.slot("m", "ready")
    route(plane, B, SELF)
    plane.launcherd.refusals[ModelName("m")] = RequestRefused("overloaded", "256 wait")
    answers = [plane.chat(user=str(number)) for number in range(6)]
    assert {(status, headers["x-mesh-node"]) for status, headers, _ in answers} == {(200, "barn")}
    assert plane.launcherd.acquires, "its own was asked at least once"


def test_a_refusal_is_told_although_another_host_is_out_of_reach(plane: Plane, far: FarNodes) -> None:
    far.refusals[B] = Refused(code="overloaded", detail="256 requests wait", retry_after_seconds=3.0)
    route(plane, B, C)
    status, headers, _ = plane.chat()
    assert (status, headers["retry-after"]) == (429, "3")


def test_where_a_placed_model_cannot_be_loaded_electiond_names_another_node(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    plane.place_on = [B, C]
    far.refusals[B] = Refused(code="load_failed", detail="out of memory")
    far.engines[C] = upstream.port
    plane.declare("m")
    status, headers, _ = plane.chat()
    assert (status, headers["x-mesh-node"]) == (200, "cellar")
    assert plane.avoided == [(), (B,)]


def test_the_last_word_of_the_node_that_could_not_load_it_reaches_the_client(plane: Plane, far: FarNodes) -> None:
    plane.place_on = [B]
    far.refusals[B] = Refused(code="load_failed", detail="out of memory")
    plane.declare("m")
    status, _, body = plane.chat()
    assert status == 503
    assert "barn: out of memory" in json.loads(body)["error"]["message"]


def test_a_model_goes_by_the_name_that_its_host_has_for_it(plane: Plane, far: FarNodes, upstream: RawUpstream) -> None:
    far.engines[B] = upstream.port
    plane.declare("m@12345678", status="ready")
    hosts = (RouteHost(peer_id=B, parallel=4, name_there=ModelName("m")),)
    routes = (Route(model=ModelName("m@12345678"), type="llm", hosts=hosts),)
    plane.call(plane.view.apply, RoutesChanged(routes=routes))
    status, _, _ = plane.chat("m@12345678")
    assert (status, far.opened[0].model) == (200, "m")
    assert plane.metrics.records[0].model == "m@12345678"


def test_a_silent_host_gets_no_new_requests_while_another_is_there(
    plane: Plane, far: FarNodes, upstream: RawUpstream, other: RawUpstream
) -> None:
    """"after 2 s of silence where bytes were due … new requests go elsewhere" (DESIGN §7)."""

    def fall_silent(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        peer.event("one")
        peer.wait_gone()

    upstream.handler = fall_silent
    far.engines.update({B: upstream.port, C: other.port})
    route(plane, B, C)
    on_b = next(user for user in map(str, range(100)) if plane.call(chosen, plane, user) == B)
    connection = send_chat(plane, user=on_b, stream=True)
    read_until(connection, b"one")
    wait_until(lambda: plane.call(chosen, plane, on_b) == C, 5, "its conversation goes elsewhere")
    connection.close()
    wait_until(lambda: plane.call(chosen, plane, on_b) == B, 5, "and comes back")


# -- nobody can answer ------------------------------------------------------------------------------------------------


def test_a_model_whose_hosts_went_away_is_503_and_says_who_had_it(plane: Plane, far: FarNodes) -> None:
    """A client-only node that is cut off: 404 would say that there is no such model."""
    route(plane, B)
    plane.call(plane.app.note_hosts)
    plane.catalog.clear()
    plane.call(plane.view.apply, CatalogChanged(models=()))
    plane.call(plane.view.apply, RoutesChanged(routes=()))
    plane.call(plane.app.note_hosts)
    status, headers, body = plane.chat()
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (503, "hosts_gone")
    assert "barn served it until 0 s ago" in error["message"]
    assert headers["retry-after"]
    assert plane.chat("never-heard-of")[0] == 404


def test_hosts_out_of_reach_for_long_are_503(
    plane: Plane, far: FarNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "UNREACHABLE_SECONDS", 0.2)
    route(plane, B)
    status, _, body = plane.chat()
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (503, "hosts_unreachable")
    assert "barn, which serves m, cannot be reached: no link with 12B: it left" in error["message"]


def test_a_placement_waits_for_a_tunneld_that_restarts(plane: Plane, upstream: RawUpstream) -> None:
    plane.place_on = [B]
    plane.declare("m")
    result = in_background(plane.chat)
    wait_until(lambda: any("tunneld is away" in record.reason for record in plane.log.active()), 5, "it is told")
    with far_nodes(plane.paths.data_socket) as far:
        far.engines[B] = upstream.port
        wait_until(lambda: result, 5, "it is answered")
    assert result[0][0] == 200


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_a_stream_is_byte_for_byte_what_the_engine_sent(plane: Plane, far: FarNodes, upstream: RawUpstream) -> None:
    parts = [b"data: {\"n\": %d, \"text\": \"%b\"}\n\n" % (n, bytes(range(128, 191)) * (n % 7)) for n in range(200)]

    def stream(peer: Peer, _request: Received) -> None:
        peer.begin_stream()
        for part in parts:
            peer.chunk(part)
        peer.end_stream()

    upstream.handler = stream
    far.engines[B] = upstream.port
    route(plane, B)
    status, _, body = plane.chat(stream=True)
    assert (status, body) == (200, b"".join(parts) + b"data: [DONE]\n\n")


def test_an_answer_that_only_ends_is_never_taken_for_whole(
    plane: Plane, far: FarNodes, upstream: RawUpstream
) -> None:
    """Neither length nor chunks: whether the tunnel broke cannot be told from its end."""

    def undelimited(peer: Peer, _request: Received) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{\"half\": ")
        peer.close()

    upstream.handler = undelimited
    far.engines[B] = upstream.port
    route(plane, B)
    status, headers, _ = plane.chat()
    assert (status, headers["x-mesh-attempts"]) == (503, "3")


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000", b"Transfer-Encoding: chunked"])
def test_a_large_answer_cut_in_the_tunnel_never_looks_complete(
    plane: Plane, far: FarNodes, upstream: RawUpstream, framing: bytes
) -> None:
    part = b"a" * 200_000

    def cut(peer: Peer, _request: Received) -> None:
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%b\r\n\r\n" % framing)
        peer.send(b"%x\r\n%b\r\n" % (len(part), part) if b"chunked" in framing else part)
        wait_until(lambda: plane.log.active()[0].response_bytes, 5, "bytes were forwarded")
        peer.close()

    upstream.handler = cut
    far.engines[B] = upstream.port
    route(plane, B)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        plane.chat()


@pytest.mark.parametrize("answer", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b""])
def test_what_is_no_answer_of_tunneld_is_waited_out(
    plane: Plane, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "UNREACHABLE_SECONDS", 0.0)
    route(plane, B)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(plane.paths.data_socket))
        listener.listen()
        result = in_background(plane.chat)
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1000)
            connection.sendall(answer)
        wait_until(lambda: result, 5, "it is refused")
    assert (result[0][0], json.loads(result[0][2])["error"]["code"]) == (503, "hosts_unreachable")
    assert not plane.app._plane.tunnels.in_use
