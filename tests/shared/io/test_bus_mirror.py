"""Mirrors of the bus: whatever PUB/SUB loses, the copy becomes right again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgpack
import pytest
import zmq
import zmq.asyncio

from shared import codec
from shared.errors import StillStarting
from shared.ids import BootId
from shared.io import bus
from shared.messages.daemon import Snapshot
from shared.paths import NodePaths
from tests.shared.io.bus_scene import NAME, PROBE, Bare, Daemon, State, copy_of, daemon, word
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


def test_a_late_joiner_gets_everything(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one:
            for number in range(50):
                one.say(f"w{number}")
            async with copy_of(node_paths) as copy:
                await until(lambda: len(copy.words) == 50, 5, "the snapshot")
                one.say("fresh")
                await until(lambda: copy.words[-1] == "fresh", 5, "the publication after it")
                assert copy.words == [message.model for message in one.state.facts]
                assert copy.boots == [one.server.boot_id]

    run_async(scene())


def test_a_mirror_that_came_first_gets_everything(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with copy_of(node_paths) as copy:
            await asyncio.sleep(0)
            async with daemon(node_paths) as one:
                for number in range(50):
                    one.say(f"w{number}")
                    await asyncio.sleep(0)
                await until(lambda: copy.words == [f"w{number}" for number in range(50)], 5, "all, once, in order")

    run_async(scene())


@pytest.mark.usefixtures("no_heartbeat")
def test_a_gap_is_healed_by_a_snapshot(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one, copy_of(node_paths) as copy:
            one.say("one")
            await until(lambda: copy.words == ["one"] and copy.mirror.heard_at, 5, "the copy is live")
            await settled(one, copy.mirror)
            before = copy.mirror.resyncs
            one.network.losing = True
            one.say("lost")
            one.network.losing = False
            one.say("three")
            await until(lambda: copy.words == ["one", "lost", "three"], 5, "the next number has told")
            assert copy.mirror.resyncs > before
            assert copy.boots == [one.server.boot_id]

    run_async(scene())


def test_a_lost_last_message_is_healed_by_the_heartbeat(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one, copy_of(node_paths) as copy:
            one.say("one")
            await settled(one, copy.mirror)
            one.network.losing = True
            one.say("lost")
            one.network.losing = False
            await until(lambda: copy.words == ["one", "lost"], 5, "the heartbeat has told")

    run_async(scene())


def test_without_loss_nothing_is_asked_twice(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with daemon(node_paths) as one, copy_of(node_paths) as copy:
            await settled(one, copy.mirror)
            before = copy.mirror.resyncs
            for number in range(200):
                one.say(f"w{number}")
                await asyncio.sleep(0)
            await until(lambda: len(copy.words) == 200, 5, "all words")
            assert copy.mirror.resyncs == before

    run_async(scene())


def test_a_restarted_publisher_is_noticed_by_its_new_boot(node_paths: NodePaths) -> None:
    async def scene() -> None:
        async with copy_of(node_paths) as copy:
            async with daemon(node_paths) as first:
                for text in ("old", "older", "oldest"):
                    first.say(text)
                await until(lambda: len(copy.words) == 3, 5, "the first life")
            async with daemon(node_paths) as second:
                second.say("new")
                await until(lambda: copy.words == ["new"], 5, "the second life replaces the first")
                assert copy.boots == [first.server.boot_id, second.server.boot_id]

    run_async(scene())


async def settled(one: Daemon, mirror: object) -> None:
    """Waits until publications reach the mirror: its subscription is in place and its copy is current."""

    def live() -> bool:
        heard = mirror._seq == one.server._seq and not mirror._stale.is_set()
        return heard and mirror.boot_id == one.server.boot_id

    await until(live, 5, "the copy is current")
    for number in range(1000):
        before = mirror.resyncs
        one.server.publish(word(f"{PROBE}{number}"))
        await until(live, 5, "the probe has arrived")
        if mirror.resyncs == before:
            return
    raise AssertionError("the subscription never got in place")


class HandMadeDaemon:
    """Both sockets of a daemon in the test's hands, so that it decides what arrives first."""

    def __init__(self, paths: NodePaths) -> None:
        context = zmq.asyncio.Context(zmq.Context.instance())
        self.publisher = context.socket(zmq.XPUB)
        self.publisher.bind(paths.publisher(NAME))
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(paths.requests(NAME))
        self.boot = BootId("b1")

    async def wait_for_subscriber(self) -> None:
        """XPUB tells when a subscription is in place."""
        assert await self.publisher.recv() == b"\x01"

    async def asked(self) -> tuple[bytes, str]:
        identity, _, payload = await self.router.recv_multipart()
        return identity, msgpack.unpackb(payload)[0]

    async def answer(self, to: tuple[bytes, str], seq: int, words: list[str]) -> None:
        items = tuple(codec.encode(word(text)) for text in words)
        fields = codec.to_fields(Snapshot(boot_id=self.boot, seq=seq, items=items))
        await self.router.send_multipart([to[0], b"", codec.pack([to[1], *fields])])

    async def publish(self, seq: int, text: str) -> None:
        await self.publisher.send_multipart([b"x", codec.pack([self.boot, seq, *codec.to_fields(word(text))])])

    def close(self) -> None:
        self.publisher.close(linger=0)
        self.router.close(linger=0)


def test_a_snapshot_overtaken_by_publications_takes_nothing_back(node_paths: NodePaths) -> None:
    async def scene() -> None:
        hand = HandMadeDaemon(node_paths)
        async with copy_of(node_paths) as copy:
            await hand.answer(await hand.asked(), 0, [])
            await hand.wait_for_subscriber()
            await until(lambda: copy.snapshots == 1, 5, "the first snapshot")
            seq = 1
            await hand.publish(seq, "one")
            await until(lambda: copy.words == ["one"], 5, "the first word")
            # Live now. A broken frame makes the mirror ask, and while the answer is on its way a word comes in.
            await hand.publisher.send_multipart([b"x", b"\xc1"])
            question = await hand.asked()
            await hand.publish(seq + 1, "two")
            await until(lambda: copy.words == ["one", "two"], 5, "the word has overtaken the snapshot")
            before = copy.snapshots
            await hand.answer(question, seq, ["one"])
            await hand.publish(seq, "one")  # and a late publication that the copy already has is not applied twice
            await hand.publish(seq + 2, "three")
            await until(lambda: "three" in copy.words, 5, "the next word")
            assert copy.words == ["one", "two", "three"]
            assert copy.snapshots == before
        hand.close()

    run_async(scene())


def test_a_refused_snapshot_is_not_asked_for_in_a_tight_loop(
    node_paths: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus, "REFUSED_SECONDS", 0.3)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        hand = HandMadeDaemon(node_paths)
        refusal = {"code": "schema", "detail": "message too large", "retry_after_seconds": None}
        async with copy_of(node_paths) as copy:
            times = []
            for _ in range(2):
                identity, request_id = await hand.asked()
                times.append(loop.time())
                await hand.router.send_multipart([identity, b"", msgpack.packb([request_id, "Refused", refusal])])
            assert times[1] - times[0] > 0.2
            await hand.answer(await hand.asked(), 0, ["healed"])
            await until(lambda: copy.words == ["healed"], 5, "it asks again all the same")
        hand.close()

    run_async(scene())


def test_a_daemon_that_is_just_starting_leaves_its_earlier_words_in_place(node_paths: NodePaths, bare: Bare) -> None:
    class Starting(State):
        ready = False

        def snapshot(self) -> list[codec.Message]:
            if not self.ready:
                raise StillStarting("ask again in a moment")
            return super().snapshot()

    async def scene() -> None:
        async with copy_of(node_paths) as copy:
            async with daemon(node_paths) as first:
                first.say("old")
                await until(lambda: copy.words == ["old"], 5, "the first life")
            second = Daemon(node_paths, Starting())
            assert (await bare.ask("GetSnapshot"))[2]["code"] == "starting"
            await until(lambda: second.server._replies, 5, "asked")
            assert copy.words == ["old"]
            assert copy.boots == [first.server.boot_id]
            second.state.ready = True  # type: ignore[attr-defined]
            second.say("new")
            await until(lambda: copy.words == ["new"], 5, "the second life has spoken")
            await second.end()

    run_async(scene())
