"""The bus with real sockets: bare REQ and SUB served, deadlines, repeated requests, mirrors that heal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgpack
import pytest
import zmq
import zmq.asyncio

from shared import codec
from shared.errors import DaemonUnreachable, LoadFailed, RequestRefused
from shared.io import bus
from shared.io.bus import REPLY_MEMORY, REPLY_MEMORY_BYTES, BusClient
from shared.messages.daemon import DaemonInfo, Done, GetDaemonInfo, GetStory
from shared.messages.mesh import SignRecord
from shared.messages.models import InventoryChanged, RescanModels, SkippedFile
from shared.paths import NodePaths
from tests.shared.io.bus_scene import NAME, Bare, copy_of, daemon
from tests.waiting import run_async, until


@pytest.fixture
def bare(node_paths: NodePaths) -> Iterator[Bare]:
    one = Bare(node_paths)
    yield one
    one.close()


@pytest.fixture
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what must heal without one."""
    monkeypatch.setattr(bus, "FIRST_HEARTBEAT_SECONDS", 3600.0)
    monkeypatch.setattr(bus, "HEARTBEAT_SECONDS", 3600.0)


# -- requests ------------------------------------------------------------------------------------------------


def test_a_bare_req_is_answered(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            one.say("qwen")
            assert await bare.ask("RescanModels", request_id="r1") == [
                "r1",
                "Done",
                {"detail": "answer 1", "subject": ""},
            ]
            tag, fields = (await bare.ask("GetDaemonInfo"))[1:]
            assert tag == "DaemonInfo"
            assert (fields["name"], fields["state"]) == (NAME, "1 words")
            assert fields["boot_id"] == one.server.boot_id
            tag, fields = (await bare.ask("GetSnapshot"))[1:]
            assert (tag, fields["boot_id"], fields["seq"]) == ("Snapshot", one.server.boot_id, 1)
            assert [msgpack.unpackb(item) for item in fields["items"]] == [
                ["CountUnserved", {"model": "qwen", "count": 1}]
            ]
            for asked, given in ((2, 2), (0, 1), (10**9, 500)):
                story = (await bare.ask("GetStory", {"limit": asked}))[2]["entries"]
                assert len(story) == given, "the limit is bounded"

    run_async(scene())


def test_what_the_handler_refuses_comes_back_as_refused(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:

            async def refuse(request: codec.Message, deadline_seconds: float) -> codec.Message:
                raise (
                    RequestRefused("overloaded", "256 requests wait", 2.0)
                    if isinstance(request, RescanModels)
                    else LoadFailed("no luck")
                )

            one.state.answer_with = refuse
            refused = {"code": "overloaded", "detail": "256 requests wait", "retry_after_seconds": 2.0}
            assert await bare.ask("RescanModels") == ["r", "Refused", refused]
            assert (await bare.ask("ReloadConfig"))[2]["code"] == "load_failed"
            client = BusClient(NAME, node_paths)
            with pytest.raises(RequestRefused) as caught:
                await client.request(RescanModels())
            assert (caught.value.code, caught.value.retry_after_seconds) == ("overloaded", 2.0)
            client.close()

    run_async(scene())


def test_a_broken_handler_ends_the_daemon(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:

            async def broken(request: codec.Message, deadline_seconds: float) -> codec.Message:
                raise KeyError("a broken invariant")

            one.state.answer_with = broken
            client = BusClient(NAME, node_paths)
            asking = asyncio.ensure_future(client.request(RescanModels()))
            try:
                await one.tasks.watch()
            finally:
                asking.cancel()
                client.close()

    with pytest.raises(KeyError, match="a broken invariant"):
        run_async(scene())


def test_the_handler_is_held_to_the_callers_deadline(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            cancelled = asyncio.Event()

            async def endless(request: codec.Message, deadline_seconds: float) -> codec.Message:
                assert deadline_seconds == 0.2
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
                return Done()

            one.state.answer_with = endless
            _, tag, fields = await bare.ask("RescanModels", deadline_seconds=0.2)
            assert (tag, fields["code"]) == ("Refused", "deadline")
            assert cancelled.is_set()

    run_async(scene())


def test_nobody_there_is_said_at_the_deadline(node_paths: NodePaths) -> None:
    async def scene() -> None:
        client = BusClient(NAME, node_paths)
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(DaemonUnreachable, match=r"gossipd did not answer within 0.3 s; see 'meshctl ps'"):
            await client.request(GetDaemonInfo(), deadline_seconds=0.3, resend_seconds=0.1)
        assert 0.25 < loop.time() - start < 2
        client.close()

    run_async(scene())


def test_a_slow_request_does_not_hold_up_others(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            release = asyncio.Event()

            async def slow(request: codec.Message, deadline_seconds: float) -> codec.Message:
                if isinstance(request, RescanModels):
                    await release.wait()
                return Done(detail=type(request).__name__)

            one.state.answer_with = slow
            client = BusClient(NAME, node_paths)
            waiting = asyncio.ensure_future(client.request(RescanModels()))
            await until(lambda: len(one.state.asked) == 1, 5, "the slow request has arrived")
            assert await client.request(SignRecord(payload=b"")) == Done(detail="SignRecord")
            assert isinstance(await client.request(GetDaemonInfo()), DaemonInfo)
            assert not waiting.done()
            release.set()
            assert await waiting == Done(detail="RescanModels")
            client.close()

    run_async(scene())


def test_a_repeated_request_is_handled_once(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            req = bare.req()
            first = await bare.ask("RescanModels", request_id="same", socket=req)
            again = await bare.ask("RescanModels", request_id="same", socket=req)
            other = await bare.ask("RescanModels", request_id="other", socket=req)
            stranger = await bare.ask("RescanModels", request_id="same", socket=bare.req())
            assert first == again == ["same", "Done", {"detail": "answer 1", "subject": ""}]
            assert other[2] == {"detail": "answer 2", "subject": ""}
            assert stranger[2] == {"detail": "answer 3", "subject": ""}, "an id belongs to its connection"
            assert len(one.state.asked) == 3

    run_async(scene())


def test_a_request_repeated_while_it_is_handled_is_not_handled_twice(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            release = asyncio.Event()

            async def slow(request: codec.Message, deadline_seconds: float) -> codec.Message:
                await release.wait()
                return Done(detail="once")

            one.state.answer_with = slow
            sent: list[int] = []
            client = BusClient(NAME, node_paths)
            send = client._socket.send_multipart

            async def counted(frames: list[bytes]) -> None:
                sent.append(len(frames))
                await send(frames)

            client._socket.send_multipart = counted  # type: ignore[method-assign, assignment]
            waiting = asyncio.ensure_future(client.request(RescanModels(), resend_seconds=0.02))
            await until(lambda: len(sent) >= 4, 5, "the client has repeated itself")
            release.set()
            assert await waiting == Done(detail="once")
            assert len(one.state.asked) == 1
            client.close()

    run_async(scene())


def test_a_waiting_client_finds_a_daemon_that_starts_later(node_paths: NodePaths) -> None:
    async def scene() -> None:
        client = BusClient(NAME, node_paths)
        waiting = asyncio.ensure_future(client.request(RescanModels(), resend_seconds=0.1))
        await asyncio.sleep(0)
        async with daemon(node_paths) as one:
            assert await waiting == Done(detail="answer 1")
            assert len(one.state.asked) == 1
        client.close()

    run_async(scene())


def test_a_waiting_client_finds_a_restarted_daemon(node_paths: NodePaths) -> None:
    async def scene() -> None:
        client = BusClient(NAME, node_paths)
        async with daemon(node_paths) as first:

            async def never(request: codec.Message, deadline_seconds: float) -> codec.Message:
                await asyncio.Event().wait()
                return Done()

            first.state.answer_with = never
            waiting = asyncio.ensure_future(client.request(RescanModels(), resend_seconds=0.1))
            await until(lambda: first.state.asked, 5, "the first life has the request")
        async with daemon(node_paths):
            assert await waiting == Done(detail="answer 1")
        client.close()

    run_async(scene())


def test_remembered_replies_are_bounded_in_number_and_bytes(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            client = BusClient(NAME, node_paths)

            async def large(request: codec.Message, deadline_seconds: float) -> codec.Message:
                return Done(detail="x" * 1_000_000)

            one.state.answer_with = large
            for _ in range(17):
                await client.request(RescanModels())
            kept = sum(len(reply or b"") for reply in one.server._replies.values())
            assert 10_000_000 < kept <= REPLY_MEMORY_BYTES
            one.state.answer_with = None
            for _ in range(REPLY_MEMORY + 10):
                await client.request(GetDaemonInfo())
            assert len(one.server._replies) == REPLY_MEMORY
            assert one.server._reply_bytes == sum(len(reply or b"") for reply in one.server._replies.values())
            client.close()

    run_async(scene())


def test_a_client_that_left_is_counted_and_costs_nothing(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            release = asyncio.Event()

            async def slow(request: codec.Message, deadline_seconds: float) -> codec.Message:
                await release.wait()
                return Done()

            one.state.answer_with = slow
            leaving = bare.dealer()
            leaving.send_multipart([b"", msgpack.packb(["r", 5.0, "RescanModels", {}])])
            await until(lambda: one.state.asked, 5, "the request has arrived")
            leaving.close()
            one.state.answer_with = None
            # libzmq notices the closed connection in its own thread: ask until it has.
            for _ in range(20):
                await bare.ask("GetDaemonInfo")
            release.set()
            await until(lambda: one.server.counters.get("replies_undeliverable"), 5, "the lost reply is counted")
            assert (await bare.ask("RescanModels"))[1] == "Done"

    run_async(scene())


# -- malformed frames ------------------------------------------------------------------------------------------

NONSENSE = {
    "no msgpack": b"\xc1",
    "empty": b"",
    "no list": msgpack.packb({}),
    "too short": msgpack.packb(["r", 1.0, "Done"]),
    "id is no text": msgpack.packb([7, 1.0, "GetDaemonInfo", {}]),
    "id too long": msgpack.packb(["r" * 65, 1.0, "GetDaemonInfo", {}]),
    "deadline is no number": msgpack.packb(["r", "soon", "GetDaemonInfo", {}]),
    "deadline of 0": msgpack.packb(["r", 0, "GetDaemonInfo", {}]),
    "deadline is nan": msgpack.packb(["r", float("nan"), "GetDaemonInfo", {}]),
    "deadline for ever": msgpack.packb(["r", float("inf"), "GetDaemonInfo", {}]),
    "fields are no map": msgpack.packb(["r", 1.0, "GetDaemonInfo", []]),
    "wrong field": msgpack.packb(["r", 1.0, "GetStory", {"limit": "many"}]),
    "a key of 4 MB": msgpack.packb(
        ["r", 1.0, "DaemonInfo", {"counters": {"k" * (codec.MAX_MESSAGE_BYTES - 100): "no number"}}]
    ),
}


def test_malformed_requests_are_refused_and_counted_and_the_server_goes_on(
    node_paths: NodePaths, bare: Bare, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            for count, (what, payload) in enumerate(NONSENSE.items(), start=1):
                req = bare.req()
                req.send(payload)
                _, tag, fields = msgpack.unpackb(await asyncio.to_thread(req.recv))
                assert (tag, fields["code"]) == ("Refused", "schema"), what
                assert one.server.counters["schema_errors"] == count, what
            assert await bare.ask("RescanModels") == ["r", "Done", {"detail": "answer 1", "subject": ""}]
            assert len(one.state.asked) == 1

    run_async(scene())


def test_an_unknown_tag_is_refused_by_its_own_code(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            reply = await bare.ask("FromTheFuture", request_id="r9")
            assert reply[:2] == ["r9", "Refused"]
            assert reply[2]["code"] == "unknown_tag"
            assert one.server.counters == {"unknown_tags": 1}

    run_async(scene())


def test_a_flood_of_nonsense_is_logged_a_few_times(
    node_paths: NodePaths, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    async def scene() -> None:
        async with daemon(node_paths) as one:
            monkeypatch.setattr(one.server._refusal, "_write", lambda event, **fields: lines.append(event))
            req = bare.req()
            for _ in range(64):
                await bare.ask("FromTheFuture", socket=req)

    run_async(scene())
    assert lines == ["request_refused"] * 7


def test_frames_that_no_req_sends_are_counted(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            dealer = bare.dealer()
            good = msgpack.packb(["r", 1.0, "GetDaemonInfo", {}])
            for frames in ([good], [b"x", good], [b"", good, b""]):
                dealer.send_multipart(frames)
            await until(lambda: one.server.counters.get("frames_refused") == 3, 5, "three are refused")
            dealer.send_multipart([b"", good])
            assert (await asyncio.to_thread(dealer.recv_multipart))[0] == b""

    run_async(scene())


def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths):
            hostile = bare.dealer()
            hostile.send_multipart([b"", bytes(codec.MAX_MESSAGE_BYTES + 1)])
            assert (await bare.ask("RescanModels"))[1] == "Done"
            hostile.setsockopt(zmq.RCVTIMEO, 50)
            with pytest.raises(zmq.Again):
                hostile.recv_multipart()

    run_async(scene())


# -- publications ------------------------------------------------------------------------------------------------


def test_a_bare_sub_hears_publications_and_heartbeats(node_paths: NodePaths, bare: Bare) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            sub = bare.sub()
            topic, value = await bare.hear(sub)
            assert (topic, value) == (b"Heartbeat", [one.server.boot_id, 0, "Heartbeat", {}])
            one.say("qwen")
            while topic == b"Heartbeat":
                topic, value = await bare.hear(sub)
            assert topic == b"CountUnserved"
            assert value == [one.server.boot_id, 1, "CountUnserved", {"model": "qwen", "count": 1}]
            topic, value = await bare.hear(sub)
            assert (topic, value[1]) == (b"Heartbeat", 1), "it repeats the number of the last publication"

    run_async(scene())


def test_what_cannot_be_sent_silences_nothing_else(node_paths: NodePaths, bare: Bare) -> None:
    """A file name that is no Unicode must not end launcherd, nor hide its other models."""
    stray = InventoryChanged(models=(), skipped=(SkippedFile(path="stray-\udcff.gguf", reason="name"),))

    async def scene() -> None:
        async with daemon(node_paths) as one, copy_of(node_paths) as copy:
            one.say("one")
            await until(lambda: copy.words == ["one"], 5, "the first word")
            one.state.facts.append(stray)
            one.server.publish(stray)
            one.say("two")
            await until(lambda: copy.words == ["one", "two"], 5, "the second word")
            async with copy_of(node_paths) as late:
                await until(lambda: late.words == ["one", "two"], 5, "a snapshot without it")
            assert one.server.counters["unsendable"] >= 2

    run_async(scene())


# -- stories ---------------------------------------------------------------------------------------------------


def test_a_story_can_be_read_with_our_client(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths):
            client = BusClient(NAME, node_paths)
            story = await client.request(GetStory(limit=3))
            assert [entry.stimulus for entry in story.entries] == ["0", "1", "2"]
            client.close()

    run_async(scene())
