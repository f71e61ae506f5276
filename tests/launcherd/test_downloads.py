"""Downloads as a state machine. Rules: docs/spec/downloads.md."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.launcherd.download_events import (
    AskerGone,
    CancelAsked,
    DownloadEffect,
    DownloadEnded,
    DownloadFailed,
    DownloadPlanned,
    DownloadProgressed,
    DownloadReply,
    DownloadsRestored,
    DownloadStimulus,
    DownloadSucceeded,
    DownloadToken,
    InstallModel,
    JobId,
    ModelInstalled,
    PublishDownload,
    PullAsked,
    RememberPending,
    StartDownload,
    StopDownload,
    Wanted,
)
from services.launcherd.downloads import DEATHS_LIMIT, PUBLISH_SECONDS, RATE_WINDOW_SECONDS, RETRY_SECONDS, Downloads
from shared.ids import ModelName
from shared.io.drive import Tick
from shared.messages.daemon import Done, Refused
from shared.messages.downloads import DownloadChanged

E = TypeVar("E")


def wanted(name: str, checkpoint: str = "") -> Wanted:
    return Wanted(name=ModelName(name), checkpoint=checkpoint or f"org/{name}:Q4_0")


class Machine:
    """The machine with a clock and a memory of what it said."""

    def __init__(self) -> None:
        self.core = Downloads()
        self.now = 100.0
        self.effects: list[DownloadEffect] = []
        self._tokens = 0

    def tell(self, stimulus: DownloadStimulus | Tick) -> list[DownloadEffect]:
        effects = self.core.handle(stimulus, now=self.now)
        self.core.check_invariants()
        self.effects += effects
        return effects

    def pull(self, name: str, *, wait: bool = True, checkpoint: str = "") -> DownloadToken:
        self._tokens += 1
        token = DownloadToken(self._tokens)
        self.tell(PullAsked(token=token, wanted=wanted(name, checkpoint), wait=wait))
        return token

    def cancel(self, name: str) -> DownloadToken:
        self._tokens += 1
        token = DownloadToken(self._tokens)
        self.tell(CancelAsked(token=token, name=ModelName(name)))
        return token

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def job(self) -> JobId:
        return self.all(StartDownload)[-1].job

    def plan(self, total: int = 1_000, done: int = 0, job: JobId | None = None) -> None:
        planned = DownloadPlanned(
            job=job or self.job, file_count=1, bytes_total=total, bytes_done=done, checkpoint="org/resolved:Q4_0"
        )
        self.tell(planned)

    def progress(self, done: int, index: int = 1) -> None:
        self.tell(DownloadProgressed(job=self.job, file=f"file{index}", file_index=index, bytes_done=done))

    def fail(self, code: str = "network", *, transient: bool = True, retry_after: float = 0.0) -> None:
        job = self.job
        failed = DownloadFailed(
            job=job, code=code, detail="it broke", transient=transient, retry_after_seconds=retry_after
        )
        self.tell(failed)
        self.tell(DownloadEnded(job=job))

    def succeed(self) -> None:
        job = self.job
        self.tell(DownloadSucceeded(job=job))
        self.tell(DownloadEnded(job=job))
        name = self.all(InstallModel)[-1].wanted.name
        self.tell(ModelInstalled(name=name))

    def replies(self, token: DownloadToken) -> list[Done | Refused]:
        return [reply.message for reply in self.all(DownloadReply) if reply.token == token]

    def published(self, name: str) -> list[DownloadChanged]:
        return [item.message for item in self.all(PublishDownload) if item.message.model == name]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    def pending(self) -> list[str]:
        return [item.name for item in self.all(RememberPending)[-1].pending]


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_one_at_a_time_and_the_others_say_what_they_wait_for(machine: Machine) -> None:
    """One download runs at a time; the others wait in order and say for which." """
    machine.pull("a")
    machine.pull("b")
    assert [start.wanted.name for start in machine.all(StartDownload)] == ["a"]
    assert machine.published("b")[-1].state == "queued"
    assert "download of a" in machine.published("b")[-1].reason
    machine.plan()
    machine.succeed()
    assert [start.wanted.name for start in machine.all(StartDownload)] == ["a", "b"]


def test_the_same_model_twice_is_one_download(machine: Machine) -> None:
    """The same model asked for twice is one download with two who wait." """
    first, second = machine.pull("a"), machine.pull("a")
    machine.plan()
    machine.succeed()
    assert len(machine.all(StartDownload)) == 1
    for token in (first, second):
        [reply] = machine.replies(token)
        assert isinstance(reply, Done)
        assert reply.subject == "a"


def test_the_same_name_from_another_place_is_refused_meanwhile(machine: Machine) -> None:
    machine.pull("a")
    [reply] = machine.replies(machine.pull("a", checkpoint="other/repo:Q8_0"))
    assert isinstance(reply, Refused)
    assert reply.code == "name_taken"


def test_the_reply_comes_when_the_inventory_knows_the_model(machine: Machine) -> None:
    token = machine.pull("a")
    machine.plan()
    machine.tell(DownloadSucceeded(job=machine.job))
    machine.tell(DownloadEnded(job=machine.job))
    assert machine.replies(token) == []
    [install] = machine.all(InstallModel)
    assert install.wanted.checkpoint == "org/resolved:Q4_0"
    machine.tell(ModelInstalled(name=ModelName("a")))
    assert isinstance(machine.replies(token)[0], Done)
    assert machine.published("a")[-1].state == "done"
    assert machine.pending() == []
    assert list(machine.core.snapshot()) == []


def test_a_file_that_turns_out_useless_is_a_failure(machine: Machine) -> None:
    token = machine.pull("a")
    machine.plan()
    machine.tell(DownloadSucceeded(job=machine.job))
    machine.tell(DownloadEnded(job=machine.job))
    machine.tell(ModelInstalled(name=ModelName("a"), reason="its header names no architecture"))
    [reply] = machine.replies(token)
    assert isinstance(reply, Refused)
    assert reply.code == "not_usable"


def test_without_waiting_the_reply_comes_at_once(machine: Machine) -> None:
    token = machine.pull("a", wait=False)
    assert isinstance(machine.replies(token)[0], Done)


def test_progress_is_told_four_times_a_second_and_a_new_file_at_once(machine: Machine) -> None:
    """Progress is published at most four times a second, a change of state or file at once." """
    machine.pull("a")
    machine.plan(total=10_000)
    machine.progress(1)
    before = len(machine.published("a"))
    for done in range(2, 102):
        machine.now += 0.01
        machine.progress(done)
    assert 3 <= len(machine.published("a")) - before <= 5
    before = len(machine.published("a"))
    machine.progress(200, index=2)
    assert len(machine.published("a")) == before + 1
    machine.progress(300, index=2)
    assert len(machine.published("a")) == before + 1
    deadline = machine.core.next_deadline()
    assert deadline is not None
    machine.now = deadline
    machine.tell(Tick())
    assert machine.published("a")[-1].bytes_done == 300
    assert machine.core.next_deadline() == pytest.approx(machine.now - PUBLISH_SECONDS + RATE_WINDOW_SECONDS)


def test_the_rate_is_that_of_the_last_seconds(machine: Machine) -> None:
    machine.pull("a")
    machine.plan(total=10_000_000, done=5_000_000)
    for step in range(1, 21):
        machine.now += 1.0
        machine.progress(5_000_000 + step * 1_000)
    assert machine.published("a")[-1].bytes_per_second == pytest.approx(1_000)
    machine.pass_time(RATE_WINDOW_SECONDS)
    assert machine.published("a")[-1].bytes_per_second == 0


def test_a_transient_failure_is_tried_again_after_a_growing_pause(machine: Machine) -> None:
    """A transient failure is tried again after 1, 2, 5 … 60 s; any progress begins the row anew." """
    token = machine.pull("a")
    for pause in RETRY_SECONDS:
        starts = len(machine.all(StartDownload))
        machine.fail()
        assert machine.published("a")[-1].state == "queued"
        assert f"again in {pause:.0f} s" in machine.published("a")[-1].reason
        machine.pass_time(pause - 0.01)
        assert len(machine.all(StartDownload)) == starts
        machine.pass_time(0.02)
        assert len(machine.all(StartDownload)) == starts + 1
    machine.fail()
    [reply] = machine.replies(token)
    assert isinstance(reply, Refused)
    assert reply.code == "network"
    assert "pull it again" in reply.detail
    assert machine.published("a")[-1].state == "failed"
    assert machine.published("a")[-1].code == "network"


def test_progress_begins_the_row_of_pauses_anew_but_only_new_bytes_are_progress(machine: Machine) -> None:
    machine.pull("a")
    for expected in (1.0, 1.0, 1.0):
        machine.plan(done=next(machine.core.snapshot()).bytes_done)
        machine.progress(next(machine.core.snapshot()).bytes_done + 10)
        machine.fail()
        assert f"again in {expected:.0f} s" in machine.published("a")[-1].reason
        machine.pass_time(expected)
    for expected in RETRY_SECONDS[1:3]:  # The server forgets what it sent and breaks off at the same byte.
        machine.plan(done=0)
        machine.progress(20)
        machine.progress(30)
        machine.fail()
        assert f"again in {expected:.0f} s" in machine.published("a")[-1].reason
        machine.pass_time(expected)


def test_a_server_that_names_a_time_is_asked_then(machine: Machine) -> None:
    machine.pull("a")
    machine.fail(retry_after=30.0)
    assert "again in 30 s" in machine.published("a")[-1].reason
    machine.pass_time(29)
    assert len(machine.all(StartDownload)) == 1
    machine.pass_time(1)
    assert len(machine.all(StartDownload)) == 2


def test_others_have_their_turn_during_a_pause(machine: Machine) -> None:
    machine.pull("a")
    machine.pull("b")
    machine.fail()
    assert machine.all(StartDownload)[-1].wanted.name == "b"
    machine.pass_time(5)
    assert len(machine.all(StartDownload)) == 2
    machine.succeed()
    assert machine.all(StartDownload)[-1].wanted.name == "a"


def test_a_final_failure_is_final(machine: Machine) -> None:
    """Failures that another try can't cure end the download at once." """
    token = machine.pull("a")
    machine.fail("not_authorised", transient=False)
    [reply] = machine.replies(token)
    assert isinstance(reply, Refused)
    assert reply.code == "not_authorised"
    assert machine.pending() == []


def test_a_garbled_file_is_fetched_once_more(machine: Machine) -> None:
    """A file with the wrong checksum is fetched once more from its beginning, then given up." """
    token = machine.pull("a")
    machine.fail("checksum", transient=False)
    assert machine.replies(token) == []
    machine.pass_time(1)
    machine.fail("checksum", transient=False)
    [reply] = machine.replies(token)
    assert isinstance(reply, Refused)
    assert reply.code == "checksum"


def test_a_full_disk_after_a_garbled_file_is_final(machine: Machine) -> None:
    token = machine.pull("a")
    machine.fail("checksum", transient=False)
    machine.pass_time(1)
    machine.fail("disk_full", transient=False)
    assert len(machine.replies(token)) == 1


def test_a_process_that_dies_without_a_word_is_started_again_a_few_times(machine: Machine) -> None:
    token = machine.pull("a")
    for _ in range(DEATHS_LIMIT):
        assert machine.replies(token) == []
        machine.tell(DownloadEnded(job=machine.job, how="was ended by SIGKILL"))
        machine.pass_time(60)
    [reply] = machine.replies(token)
    assert isinstance(reply, Refused)
    assert "SIGKILL" in reply.detail


def test_cancelling_the_one_under_way(machine: Machine) -> None:
    """Cancelling stops the download; those who wait for it are told; what is there stays." """
    waiting = machine.pull("a")
    machine.plan()
    token = machine.cancel("a")
    assert [stop.job for stop in machine.all(StopDownload)] == [machine.job]
    assert machine.replies(token) == []
    again = machine.pull("a")
    machine.tell(DownloadEnded(job=machine.job))
    assert isinstance(machine.replies(token)[0], Done)
    [refused] = machine.replies(waiting)
    assert isinstance(refused, Refused)
    assert refused.code == "cancelled"
    assert machine.replies(again) == []
    assert len(machine.all(StartDownload)) == 2


def test_cancelling_what_waits_or_is_not_there_or_is_finished(machine: Machine) -> None:
    machine.pull("a")
    waiting = machine.pull("b")
    assert isinstance(machine.replies(machine.cancel("b"))[0], Done)
    assert isinstance(machine.replies(waiting)[0], Refused)
    [nothing] = machine.replies(machine.cancel("b"))
    assert isinstance(nothing, Refused)
    assert nothing.code == "not_downloading"
    machine.tell(DownloadSucceeded(job=machine.job))
    machine.tell(DownloadEnded(job=machine.job))
    [late] = machine.replies(machine.cancel("a"))
    assert isinstance(late, Refused)
    assert late.code == "finished"


def test_a_cancel_that_comes_with_the_end_is_refused_and_the_model_is_there(machine: Machine) -> None:
    waiting = machine.pull("a")
    token = machine.cancel("a")
    late = machine.pull("a")
    machine.succeed()
    [refused] = machine.replies(token)
    assert isinstance(refused, Refused)
    assert refused.code == "finished"
    assert isinstance(machine.replies(waiting)[0], Done)
    assert isinstance(machine.replies(late)[0], Done)


def test_an_asker_that_goes_away_changes_nothing(machine: Machine) -> None:
    """Who asked may go away: the download goes on." """
    token = machine.pull("a")
    machine.tell(AskerGone(token=token))
    machine.succeed()
    assert machine.replies(token) == []
    assert machine.published("a")[-1].state == "done"


def test_what_was_not_finished_is_gone_on_with(machine: Machine) -> None:
    """Downloads that are not ended are remembered, and the next launcherd goes on with them." """
    machine.pull("a")
    machine.pull("b")
    assert machine.pending() == ["a", "b"]
    second = Machine()
    second.tell(DownloadsRestored(pending=machine.all(RememberPending)[-1].pending))
    assert [start.wanted.name for start in second.all(StartDownload)] == ["a"]
    assert [item.model for item in second.core.snapshot()] == ["a", "b"]


def test_news_of_an_earlier_run_mean_nothing(machine: Machine) -> None:
    machine.pull("a")
    old = machine.job
    machine.fail()
    machine.pass_time(1)
    machine.tell(DownloadSucceeded(job=old))
    machine.tell(DownloadEnded(job=old))
    assert machine.all(InstallModel) == []
    assert machine.core.underway("a") is not None
    assert machine.core.underway("b") is None


NAMES = st.sampled_from(["a", "b", "c"])


class Interleavings(RuleBasedStateMachine):
    """Whatever comes in whatever order: one process at a time, and every token is answered exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.open: set[DownloadToken] = set()
        self.gone: set[DownloadToken] = set()
        self.running: StartDownload | None = None
        self.installing: list[ModelName] = []
        self.seen = 0

    @invariant()
    def promises(self) -> None:
        for effect in self.machine.effects[self.seen :]:
            match effect:
                case StartDownload():
                    assert self.running is None, "two downloads at once"
                    self.running = effect
                case StopDownload(job=job):
                    assert self.running is not None
                    assert self.running.job == job
                case InstallModel(wanted=item):
                    self.installing.append(item.name)
                case DownloadReply(token=token):
                    assert token in self.open, "answered twice, or never asked"
                    self.open.discard(token)
        self.seen = len(self.machine.effects)
        underway = {item.model for item in self.machine.core.snapshot()}
        assert set(self.machine.pending() if self.machine.all(RememberPending) else ()) == underway
        if self.running is None:
            deadline = self.machine.core.next_deadline()
            waiting = underway - set(self.installing)
            assert not waiting or deadline is not None, "it waits for nothing"

    @rule(name=NAMES, wait=st.booleans(), other=st.booleans())
    def pull(self, name: str, wait: bool, other: bool) -> None:
        self.machine._tokens += 1
        token = DownloadToken(self.machine._tokens)
        self.open.add(token)
        self.machine.tell(PullAsked(token=token, wanted=wanted(name, "x/y:Q8_0" if other else ""), wait=wait))

    @rule(name=NAMES)
    def cancel(self, name: str) -> None:
        self.machine._tokens += 1
        token = DownloadToken(self.machine._tokens)
        self.open.add(token)
        self.machine.tell(CancelAsked(token=token, name=ModelName(name)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def asker_goes(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.open)))
        self.machine.tell(AskerGone(token=token))
        # A canceller may still be answered, into the void.
        self.gone.add(token)

    @precondition(lambda self: self.running)
    @rule(done=st.integers(0, 50), index=st.integers(1, 3))
    def progress(self, done: int, index: int) -> None:
        self.machine.progress(done, index)

    @precondition(lambda self: self.running)
    @rule(outcome=st.sampled_from(["success", "transient", "final", "checksum", "death"]))
    def end(self, outcome: str) -> None:
        assert self.running is not None
        job = self.running.job
        self.running = None
        if outcome == "success":
            self.machine.tell(DownloadSucceeded(job=job))
        elif outcome != "death":
            self.machine.tell(DownloadFailed(job=job, code=outcome, detail="d", transient=outcome == "transient"))
        self.machine.tell(DownloadEnded(job=job))

    @precondition(lambda self: self.installing)
    @rule(useless=st.booleans())
    def installed(self, useless: bool) -> None:
        self.machine.tell(ModelInstalled(name=self.installing.pop(0), reason="no header" if useless else ""))

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0, 100.0]))
    def time(self, seconds: float) -> None:
        self.machine.pass_time(seconds)

    def teardown(self) -> None:
        """Everything that was asked is answered once everything has ended."""
        for _ in range(60):
            self.promises()
            if self.running is not None:
                self.end("final")
            elif self.installing:
                self.installed(False)
            else:
                self.machine.pass_time(1_000.0)
            if not list(self.machine.core.snapshot()):
                break
        self.promises()
        assert self.open <= self.gone, "somebody was never answered"


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
