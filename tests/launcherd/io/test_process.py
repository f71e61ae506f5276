"""Processes are known by identity, and only that process is ever signalled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from services.launcherd.io import process
from services.launcherd.io.process import (
    ExitStatus,
    ExitWatch,
    ProcessIdentity,
    family,
    identify,
    is_alive,
    marked_processes,
    send_signal,
    signal_family,
)
from tests.launcherd.conftest import until

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts processes that lead their own session; none outlives the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **environ: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            argv or ("sleep", "60"), start_new_session=True, env={**os.environ, **environ}, stdout=subprocess.PIPE
        )
        started.append(child)
        return child

    yield start
    for child in started:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.communicate()


def known(pid: int) -> ProcessIdentity:
    identity = identify(pid)
    assert identity is not None
    return identity


def test_a_process_has_one_identity_while_it_lives(spawn: Spawn) -> None:
    child = spawn()
    identity = known(child.pid)
    assert is_alive(identity)
    assert not is_alive(replace(identity, start_time=identity.start_time - 1))
    assert not is_alive(replace(identity, boot_id="another boot"))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(identity), "a zombie is not alive"
    assert identify(child.pid, zombie=True) == identity
    child.wait()
    assert identify(child.pid) is None


def test_parentheses_and_spaces_in_a_name_do_not_confuse(spawn: Spawn, tmp_path: Any) -> None:
    program = tmp_path / "od) Z (d"
    program.symlink_to("/bin/sleep")
    identity = known(spawn(str(program), "60").pid)
    assert identity.start_time >= known(os.getpid()).start_time


def test_a_signal_reaches_exactly_that_process(spawn: Spawn) -> None:
    """TRAPS 31: stopping a reused pid."""
    child = spawn()
    identity = known(child.pid)
    assert not send_signal(replace(identity, start_time=identity.start_time + 1), signal.SIGKILL)
    assert child.poll() is None
    assert send_signal(identity, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not send_signal(identity, signal.SIGKILL)


def test_without_pidfd_signals_are_still_checked(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    child = spawn()
    identity = known(child.pid)
    assert not send_signal(replace(identity, start_time=1), signal.SIGKILL)
    assert child.poll() is None
    assert send_signal(identity, signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM


def test_a_family_is_the_session_even_after_its_leader(spawn: Spawn, run: Run) -> None:
    leader = spawn("sh", "-c", "sleep 60 & echo $!; exec sleep 60")
    assert leader.stdout is not None
    child = known(int(leader.stdout.readline()))
    identity = known(leader.pid)
    assert family(identity) == [child]
    assert family(replace(identity, start_time=1)) == [], "a reused pid has no family of ours"
    leader.kill()
    leader.wait()
    assert family(identity) == [child]
    assert signal_family(identity, signal.SIGKILL)
    run(until(lambda: not is_alive(child)))
    assert family(identity) == []
    assert not signal_family(identity, signal.SIGKILL)


def test_marked_processes_are_found_by_their_environment(spawn: Spawn, tmp_path: Any) -> None:
    mark = f"{tmp_path}/engines/a.json"
    child = spawn("sleep", "60", TEST_MARK=mark)
    spawn("sleep", "60", TEST_MARK="elsewhere")
    assert marked_processes("TEST_MARK", f"{tmp_path}/") == [(known(child.pid), mark)]


@pytest.mark.parametrize("pidfd", [True, False])
@pytest.mark.parametrize(("code", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
def test_the_end_of_a_child_is_noticed_with_its_status(
    run: Run, monkeypatch: pytest.MonkeyPatch, pidfd: bool, code: str, status: int
) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.setattr(process, "POLL_SECONDS", 0.01)

    async def watch() -> list[ExitStatus]:
        seen: list[ExitStatus] = []
        shell = subprocess.Popen(  # noqa: ASYNC220
            ("sh", "-c", f"read line; {code}"), stdin=subprocess.PIPE, start_new_session=True
        )
        ExitWatch(known(shell.pid), seen.append)
        await asyncio.sleep(0)
        assert seen == []
        assert shell.stdin is not None
        shell.stdin.write(b"go\n")
        shell.stdin.close()
        await until(lambda: bool(seen))
        shell.returncode = 0
        return seen

    assert run(watch()) == [ExitStatus(status)]


GRANDCHILD = "import os; pid = os.fork()\nif pid: print(pid, flush=True)\nelse: import signal; signal.pause()"


@pytest.mark.parametrize("uvloop", [True, False])
def test_the_end_of_a_process_that_is_no_child_is_noticed(spawn: Spawn, run: Run, uvloop: bool) -> None:
    """PLUMBING §3.5: a pidfd fires on exit on asyncio and uvloop; the exit status is unavailable."""
    parent = spawn(sys.executable, "-c", GRANDCHILD)
    assert parent.stdout is not None
    orphan = known(int(parent.stdout.readline()))
    parent.wait()

    async def watch() -> list[ExitStatus]:
        seen: list[ExitStatus] = []
        ExitWatch(orphan, seen.append)
        await asyncio.sleep(0)
        assert seen == []
        assert send_signal(orphan, signal.SIGKILL)
        await until(lambda: bool(seen))
        await asyncio.sleep(0)
        return seen

    if uvloop:
        import uvloop as loops

        assert loops.run(watch()) == [ExitStatus(None)]
    else:
        assert run(watch()) == [ExitStatus(None)]


def test_watching_a_process_that_is_gone_or_whose_pid_is_reused_ends_at_once(spawn: Spawn, run: Run) -> None:
    child = spawn()
    stranger = replace(known(child.pid), start_time=1)
    gone = ProcessIdentity(2**22 - 1, 1, "boot")

    async def watch() -> None:
        for identity in (stranger, gone):
            seen: list[ExitStatus] = []
            ExitWatch(identity, seen.append)
            await until(lambda seen=seen: bool(seen))  # type: ignore[misc]
            assert seen == [ExitStatus(None)]

    run(watch())
    assert child.poll() is None


def test_a_zombie_is_reported_once(spawn: Spawn, run: Run) -> None:
    child = spawn()
    identity = known(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    async def watch() -> list[ExitStatus]:
        seen: list[ExitStatus] = []
        ExitWatch(identity, seen.append)
        await until(lambda: bool(seen))
        for _ in range(5):
            await asyncio.sleep(0)
        return seen

    assert run(watch()) == [ExitStatus(-signal.SIGKILL)]


def test_the_next_owner_of_a_pid_is_not_waited_for(spawn: Spawn, run: Run) -> None:
    child = spawn()
    stranger = replace(known(child.pid), start_time=1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    async def watch() -> list[ExitStatus]:
        seen: list[ExitStatus] = []
        ExitWatch(stranger, seen.append)
        await until(lambda: bool(seen))
        return seen

    assert run(watch()) == [ExitStatus(None)]
    assert child.wait() == -signal.SIGKILL, "its own waiter still learns how it ended"


def test_a_closed_watch_says_nothing(spawn: Spawn, run: Run) -> None:
    child = spawn()

    async def watch() -> None:
        seen: list[ExitStatus] = []
        watcher = ExitWatch(known(child.pid), seen.append)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        watcher.close()
        watcher.close()
        await asyncio.sleep(0.02)
        assert seen == []

    run(watch())
    assert child.wait() == -signal.SIGKILL


def test_an_exit_status_in_words() -> None:
    assert [str(ExitStatus(status)) for status in (0, 3, -9, -77, None)] == [
        "ended with exit status 0",
        "ended with exit status 3",
        "was ended by SIGKILL",
        "was ended by signal 77",
        "ended",
    ]


def test_an_illegal_instruction_is_explained() -> None:
    assert str(ExitStatus(-signal.SIGILL)) == "was ended by SIGILL (it was built for another processor)"
    assert str(ExitStatus(-signal.SIGKILL)) == "was ended by SIGKILL"
