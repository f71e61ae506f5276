"""The loop that runs a core: order, one timer, a bounded story, and background work that fails loudly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shared.io.drive import QUEUE_LIMIT, STORY_LIMIT, Drive, Tasks, Tick, brief
from shared.messages.leases import LeaseGranted
from shared.messages.mesh import SignRecord
from tests.waiting import run_async, until


@dataclass(frozen=True)
class Said:
    word: str


@dataclass(frozen=True)
class Echo:
    word: str
    number: int


@dataclass
class EchoCore:
    """Answers each word with two effects; ``deadlines`` are ticked off in order."""

    deadlines: list[float] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)
    after_tick: Callable[[EchoCore], None] = lambda core: None

    def handle(self, stimulus: Said | Tick, *, now: float) -> list[Echo]:
        if isinstance(stimulus, Tick):
            self.ticks.append(now)
            if self.deadlines and now >= self.deadlines[0]:
                self.deadlines.pop(0)
            self.after_tick(self)
            return []
        if stimulus.word == "broken":
            raise ValueError("a broken invariant")
        return [Echo(stimulus.word, 1), Echo(stimulus.word, 2)] if stimulus.word else []

    def next_deadline(self) -> float | None:
        return self.deadlines[0] if self.deadlines else None


def test_effects_come_in_the_order_of_stimuli() -> None:
    async def scene() -> None:
        done: list[Echo] = []
        drive: Drive[Said, Echo] = Drive(EchoCore(), done.append)
        for word in "abc":
            drive.post(Said(word))
        assert done == [], "nothing is handled inside post()"
        task = asyncio.ensure_future(drive.run())
        await until(lambda: len(done) == 6, 5, "all effects")
        assert done == [Echo(word, number) for word in "abc" for number in (1, 2)]
        task.cancel()

    run_async(scene())


def test_a_stimulus_posted_by_an_effect_waits_its_turn() -> None:
    async def scene() -> None:
        done: list[Echo] = []

        def perform(effect: Echo) -> None:
            done.append(effect)
            if effect == Echo("a", 1):
                drive.post(Said("late"))

        drive: Drive[Said, Echo] = Drive(EchoCore(), perform)
        drive.post(Said("a"))
        drive.post(Said("b"))
        task = asyncio.ensure_future(drive.run())
        await until(lambda: len(done) == 6, 5, "all effects")
        assert [effect.word for effect in done] == ["a", "a", "b", "b", "late", "late"]
        task.cancel()

    run_async(scene())


def test_a_deadline_ticks_the_core_and_is_armed_anew() -> None:
    async def scene() -> None:
        start = asyncio.get_running_loop().time()
        core = EchoCore(deadlines=[start + 0.03, start + 0.06])
        drive: Drive[Said, Echo] = Drive(core, lambda effect: None)
        task = asyncio.ensure_future(drive.run())
        await until(lambda: not core.deadlines, 5, "both deadlines have come")
        assert core.ticks[-1] >= start + 0.06
        assert len(core.ticks) <= 4, "one timer, not a poll"
        task.cancel()

    run_async(scene())


def test_a_stimulus_that_brings_a_nearer_deadline_rearms_the_timer() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()

        @dataclass
        class Alarm(EchoCore):
            def handle(self, stimulus: Said | Tick, *, now: float) -> list[Echo]:
                if isinstance(stimulus, Said):
                    self.deadlines = [now + 0.02] if stimulus.word == "soon" else []
                return super().handle(stimulus, now=now)

        core = Alarm(deadlines=[loop.time() + 3600])
        drive: Drive[Said, Echo] = Drive(core, lambda effect: None)
        task = asyncio.ensure_future(drive.run())
        await asyncio.sleep(0)
        drive.post(Said("soon"))
        await until(lambda: core.ticks, 5, "the nearer deadline")
        drive.post(Said("soon"))
        drive.post(Said("never"))
        await until(lambda: not core.deadlines, 5, "the deadline is withdrawn")
        ticked = len(core.ticks)
        before = loop.time()
        await until(lambda: loop.time() > before + 0.06, 5, "the withdrawn deadline is past")
        assert len(core.ticks) == ticked
        task.cancel()

    run_async(scene())


def test_a_stimulus_is_no_tick() -> None:
    async def scene() -> None:
        core = EchoCore(deadlines=[asyncio.get_running_loop().time() + 3600])
        done: list[Echo] = []
        drive: Drive[Said, Echo] = Drive(core, done.append)
        task = asyncio.ensure_future(drive.run())
        await asyncio.sleep(0)
        drive.post(Said("a"))
        await until(lambda: done, 5, "the word is handled")
        assert core.ticks == []
        task.cancel()

    run_async(scene())


def test_a_core_that_is_always_late_does_not_block_the_loop() -> None:
    async def scene() -> None:
        def late_again(core: EchoCore) -> None:
            assert len(core.ticks) < 10_000, "nothing else has run for 10,000 ticks"
            core.deadlines.append(0.0)

        core = EchoCore(deadlines=[0.0], after_tick=late_again)
        drive: Drive[Said, Echo] = Drive(core, lambda effect: None)
        task = asyncio.ensure_future(drive.run())
        await until(lambda: len(core.ticks) > 10, 5, "ticks")
        if task.done():
            task.result()
        task.cancel()

    run_async(scene(), 5)


def test_what_the_core_raises_ends_the_run() -> None:
    async def scene() -> None:
        drive: Drive[Said, Echo] = Drive(EchoCore(), lambda effect: None)
        drive.post(Said("broken"))
        await drive.run()

    with pytest.raises(ValueError, match="a broken invariant"):
        run_async(scene())


def test_a_queue_that_only_grows_is_a_broken_invariant() -> None:
    async def scene() -> None:
        drive: Drive[Said, Echo] = Drive(EchoCore(), lambda effect: None)
        for _ in range(QUEUE_LIMIT):
            drive.post(Said(""))
        with pytest.raises(RuntimeError, match="does not keep up"):
            drive.post(Said(""))

    run_async(scene())


def test_the_story_has_stimuli_with_their_effects_and_is_bounded() -> None:
    async def scene() -> None:
        core = EchoCore()
        drive: Drive[Said, Echo] = Drive(core, lambda effect: None)
        for number in range(STORY_LIMIT + 50):
            drive.post(Said(f"w{number}"))
        core.deadlines = [0.0]
        task = asyncio.ensure_future(drive.run())
        await until(lambda: core.ticks, 5, "everything is handled")
        now = asyncio.get_running_loop().time()
        whole = drive.story(10**6, now)
        assert len(whole) == STORY_LIMIT
        last = drive.story(2, now + 1)
        assert [entry.stimulus for entry in last] == [f"Said(word=w{STORY_LIMIT + at})" for at in (48, 49)]
        assert last[-1].effects == ("Echo(word=w549, number=1)", "Echo(word=w549, number=2)")
        assert 1 <= last[-1].age_seconds < 10
        assert not any("Tick" in entry.stimulus for entry in whole), "ticks without effects are no news"
        task.cancel()

    run_async(scene())


def granted() -> LeaseGranted:
    return LeaseGranted(model="m", slot_id="s", base_url="http://x", api_key="hunter2", credits=1, parallel=1)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Reply:
    token: int
    message: object


@pytest.mark.parametrize(
    "value",
    [
        granted(),
        Reply(7, granted()),
        Reply(7, (granted(),)),
        Reply(7, {"api_key": "hunter2"}),
        Reply(7, {"a": granted()}),
    ],
    ids=["top", "nested", "in a tuple", "in a dict", "as a value"],
)
def test_secrets_never_show_in_the_story(value: object) -> None:
    text = brief(value, limit=1000)
    assert "hunter2" not in text
    assert "api_key=…" in text


def test_a_rendering_is_one_bounded_line() -> None:
    assert brief(Reply(7, None)) == "Reply(token=7, message=None)"
    assert len(brief(Said("x" * 10_000))) == 300
    assert brief(SignRecord(payload=bytes(1000))) == "SignRecord(payload=<1000 bytes>)"
    assert brief(Reply(1, tuple(range(5)))) == "Reply(token=1, message=<5>)"
    assert brief(Reply(1, (1, "a"))) == "Reply(token=1, message=(1, a))"


def test_a_rendering_of_much_costs_little() -> None:
    many = Reply(1, tuple(Said("x" * 1000) for _ in range(100_000)))
    start = time.perf_counter()
    brief(Reply(1, many))
    assert time.perf_counter() - start < 0.1


async def fails_after(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    raise LookupError(f"failed after {turns}")


@pytest.mark.parametrize("turns", [0, 5], ids=["before anybody watches", "while watched"])
def test_a_failing_task_ends_the_watch(turns: int) -> None:
    async def scene() -> None:
        tasks = Tasks()
        tasks.start(asyncio.Event().wait(), "long")
        task = tasks.start(fails_after(turns), "fails")
        if turns == 0:
            await until(task.done, 5, "it has failed")
        try:
            await tasks.watch()
        finally:
            await tasks.cancel()

    with pytest.raises(LookupError, match=f"failed after {turns}"):
        run_async(scene(), 5)


def test_tasks_that_end_or_are_cancelled_do_not_end_the_watch() -> None:
    async def scene() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        tasks = Tasks()
        ended = tasks.start(asyncio.sleep(0), "short")
        cancelled = tasks.start(asyncio.Event().wait(), "cancelled")
        cancelled.cancel()
        watching = asyncio.ensure_future(tasks.watch())
        await until(lambda: ended.done() and cancelled.done(), 5, "both are over")
        await asyncio.sleep(0)
        assert not watching.done()
        assert complaints == []
        watching.cancel()

    run_async(scene())


def test_cancel_waits_until_everything_has_ended() -> None:
    async def scene() -> list[str]:
        seen: list[str] = []

        async def careful() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                seen.append("cleaned up")

        tasks = Tasks()
        tasks.start(careful(), "careful")
        await asyncio.sleep(0)
        await tasks.cancel()
        return seen

    assert run_async(scene()) == ["cleaned up"]
