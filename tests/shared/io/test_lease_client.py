"""The credit book on a real bus: recalls, reports, launcherd coming back."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from shared.ids import ModelName, SlotId
from shared.messages.leases import CreditsRecalled
from tests.proxyd.plane import Plane, running_plane
from tests.proxyd.raw_upstream import Peer, RawUpstream, Received
from tests.waiting import wait_until

SLOT = SlotId("slot-m")


def recall(plane: Plane, *, active: bool) -> None:
    message = CreditsRecalled(slot_id=SLOT, holder=plane.leases.holder, reason="waiting", active=active)
    plane.call(plane.leases.on_message, message)


def test_after_the_first_grant_requests_need_no_message(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    for _ in range(50):
        assert plane.chat()[0] == 200
    assert len(plane.launcherd.acquires) == 1
    assert len(plane.launcherd.reports) < 25


def test_use_is_reported_while_a_request_runs_and_after(plane: Plane, upstream: RawUpstream) -> None:
    gate = threading.Event()

    def hold(peer: Peer, _request: Received) -> None:
        gate.wait(10)
        peer.json({})

    upstream.handler = hold
    plane.serve_model("m", upstream.port)
    worker = threading.Thread(target=plane.chat)
    worker.start()
    wait_until(lambda: plane.launcherd.in_use() == 1, 3, "launcherd hears that the model is busy")
    gate.set()
    wait_until(lambda: plane.launcherd.in_use() == 0, 3, "launcherd hears that it is idle")
    worker.join()
    use = plane.launcherd.reports[-1].uses[0]
    assert (use.slot_id, use.started_total, use.credits) == (SLOT, 1, 4)


def test_a_recall_gives_back_what_is_unused(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    assert plane.chat()[0] == 200
    assert plane.launcherd.given[SLOT] == 4
    recall(plane, active=True)
    wait_until(lambda: plane.launcherd.given[SLOT] == 0, 1, "all are returned")
    recall(plane, active=False)
    assert plane.chat()[0] == 200
    assert len(plane.launcherd.acquires) == 2


def test_another_holders_recall_is_none_of_ours(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    assert plane.chat()[0] == 200
    from shared.ids import HolderId

    message = CreditsRecalled(slot_id=SLOT, holder=HolderId("tunneld"), reason="waiting")
    plane.call(plane.leases.on_message, message)
    assert plane.call(plane.leases.held)[0].credits == 4


def test_a_new_launcherd_is_told_what_is_held(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    assert plane.chat()[0] == 200
    before = len(plane.launcherd.reports)
    plane.call(plane.leases.on_new_boot)
    wait_until(lambda: len(plane.launcherd.reports) > before, 0.5, "a report at once")
    assert plane.launcherd.reports[-1].uses[0].credits == 4


def test_an_ended_slot_is_asked_for_anew(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    assert plane.chat()[0] == 200
    plane.slot("m", "unloaded")
    plane.launcherd.given.clear()
    plane.serve_model("m", upstream.port, key="second-key")
    assert plane.chat()[0] == 200
    assert upstream.requests[-1].header(b"authorization") == b"Bearer second-key"


def test_revoked_credits_are_not_used(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    assert plane.chat()[0] == 200
    plane.launcherd.revoked = (SLOT,)
    wait_until(lambda: not plane.call(plane.leases.held), 4, "the credits are forgotten")
    plane.launcherd.revoked = ()
    plane.launcherd.given.clear()
    assert plane.chat()[0] == 200
    assert len(plane.launcherd.acquires) == 2


def test_a_burst_on_a_cold_model_is_served_without_a_message_each(mesh_home: Path, upstream: RawUpstream) -> None:
    with running_plane(mesh_home, parallel=2) as plane:
        plane.declare("m")
        request = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"model":"m"}'
        connections = [socket.create_connection(("127.0.0.1", plane.port), timeout=10) for _ in range(12)]
        for connection in connections:
            connection.sendall(request)
        wait_until(lambda: len(plane.launcherd.waiting) == 12, 5, "all wait")
        plane.serve_model("m", upstream.port)
        for connection in connections:
            assert b"200 OK" in connection.recv(4096)
            connection.close()
        wait_until(lambda: len(plane.launcherd.withdrawn) >= 10, 2, "what became superfluous is withdrawn")
        assert plane.launcherd.waiting == []
        assert plane.launcherd.given[SLOT] == 2


def test_the_story_tells_what_happened_without_the_engines_key(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    assert plane.chat()[0] == 200
    recall(plane, active=True)
    story = plane.call(plane.leases.story, 10)
    text = " ".join([*(entry.stimulus for entry in story), *(effect for entry in story for effect in entry.effects)])
    assert "AcquireGranted" in text
    assert "Recalled" in text
    assert "engine-key" not in text


def test_a_lease_is_released_once(plane: Plane, upstream: RawUpstream) -> None:
    plane.serve_model("m", upstream.port)
    assert plane.chat()[0] == 200

    def twice() -> int:
        lease = plane.leases.try_acquire(ModelName("m"))
        assert lease is not None
        plane.leases.release(lease)
        plane.leases.release(lease)
        return plane.leases.held()[0].in_use

    assert plane.call(twice) == 0
