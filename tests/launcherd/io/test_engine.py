"""Real engine processes: started, ready, hung, crashed, stopped; by facts, never by words."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.launcherd.command_line import EngineCommand
from services.launcherd.io import engine as engine_module
from services.launcherd.io.engine import EngineProcess, Progress, free_port, port_in_use, start_engine
from services.launcherd.io.engine_http import EngineAddress, call_engine
from services.launcherd.io.process import ExitStatus, identify, is_alive, send_signal
from shared.errors import (
    EngineExited,
    EngineMissing,
    EnginePortTaken,
    LoadFailed,
    LoadTimedOut,
    ModelFileMissing,
    StateNotWritable,
)
from tests.engines.scripted_engine import Script
from tests.launcherd.conftest import until
from tests.launcherd.io.conftest import MakeCommand

pytestmark = pytest.mark.usefixtures("no_engine_left")

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@asynccontextmanager
async def running(command: EngineCommand, tmp_path: Path) -> AsyncIterator[EngineProcess]:
    engine = await start_engine(command, tmp_path / "engine.log")
    try:
        yield engine
    finally:
        await engine.stop(grace_seconds=0.5)


@asynccontextmanager
async def stream(engine: EngineProcess) -> AsyncIterator[asyncio.StreamReader]:
    """An endless generation that has begun to send."""
    body = json.dumps({"prompt": "able", "stream": True, "max_tokens": 1_000_000}).encode()
    reader, writer = await asyncio.open_connection(engine.address.host, engine.address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {engine.address.api_key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b"data: ")
    try:
        yield reader
    finally:
        writer.close()


@pytest.mark.parametrize("model", ["tiny-llm", "tiny-parts", "tiny-embedding", "tiny-reranking"])
def test_a_model_of_each_type_becomes_ready(run: Run, make_command: MakeCommand, tmp_path: Path, model: str) -> None:
    """Readiness by `/health` plus a one-token generation, or one request of the model's own kind."""

    async def go() -> None:
        seen: list[Progress] = []
        async with running(make_command(model), tmp_path) as engine:
            await engine.wait_ready(20, seen.append)
            assert engine.is_alive()
            assert await engine.probe(2)
            assert await engine.accepts_key(2)
        assert seen[-1].phase == "answering"
        assert engine.exit_status == ExitStatus(0)
        assert not engine.is_alive()
        assert not port_in_use("127.0.0.1", engine.address.port)

    run(go())


def test_temperature_zero_says_the_same_each_time_and_each_model_its_own(
    run: Run, make_command: MakeCommand, tmp_path: Path
) -> None:
    async def say(model: str) -> str:
        async with running(make_command(model), tmp_path) as engine:
            await engine.wait_ready(20)
            body = {"messages": [{"role": "user", "content": "able"}], "max_tokens": 8, "temperature": 0}
            _, reply = await call_engine(engine.address, "/v1/chat/completions", body)
            text: str = json.loads(reply)["choices"][0]["message"]["content"]
            return text

    async def go() -> None:
        first, again, other = await say("tiny-llm"), await say("tiny-llm"), await say("tiny-other")
        assert first == again
        assert first != other
        assert len(first.split()) == 8

    run(go())


def test_the_key_is_needed_and_is_not_on_the_command_line(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        command = make_command()
        async with running(command, tmp_path) as engine:
            await engine.wait_ready(20)
            stranger = replace(engine.address, api_key="wrong")
            status, _ = await call_engine(stranger, "/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert status == 401
            assert command.api_key not in psutil.Process(engine.pid).cmdline()
            assert command.api_key not in (tmp_path / "engine.log").read_text()

    run(go())


@pytest.mark.parametrize("script", [None, Script(tokens=1_000_000, token_seconds=0.001)])
def test_it_stops_at_once_in_the_middle_of_a_generation(
    run: Run, make_command: MakeCommand, tmp_path: Path, script: Script | None
) -> None:
    """Stops within 2 s of SIGTERM even while generating."""

    async def go() -> None:
        async with running(make_command(script=script), tmp_path) as engine:
            await engine.wait_ready(20)
            async with stream(engine) as reader:
                started = asyncio.get_running_loop().time()
                assert await engine.stop(grace_seconds=2) == ExitStatus(0)
                assert asyncio.get_running_loop().time() - started < 2
                await reader.read()

    run(go())


def test_one_that_refuses_to_stop_is_killed(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_command(script=Script(ignore_sigterm=True)), tmp_path) as engine:
            await engine.wait_ready(20)
            assert await engine.stop(grace_seconds=0.1) == ExitStatus(-signal.SIGKILL)

    run(go())


def test_a_stopped_process_can_be_stopped(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        async with running(make_command(), tmp_path) as engine:
            await engine.wait_ready(20)
            os.kill(engine.pid, signal.SIGSTOP)
            assert await engine.stop(grace_seconds=2) == ExitStatus(0)

    run(go())


def test_stopping_twice_and_at_the_same_time_is_harmless(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    """TRAPS 31: stopping twice."""

    async def go() -> None:
        async with running(make_command(script=Script()), tmp_path) as engine:
            await engine.wait_ready(20)
            results = await asyncio.gather(engine.stop(), engine.stop())
            assert list(results) == [ExitStatus(0), ExitStatus(0)]
            assert await engine.stop() == ExitStatus(0)

    run(go())


def test_a_wrapper_script_and_the_engine_behind_it_end_together(
    run: Run, make_command: MakeCommand, tmp_path: Path
) -> None:
    """Nothing is ever orphaned: a killed wrapper takes its engine along."""
    command = make_command(script=Script())
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\n"{command.argv[0]}" "$@"\n')
    wrapper.chmod(0o755)
    wrapped = replace(command, argv=(str(wrapper), *command.argv[1:]))

    async def go() -> None:
        async with running(wrapped, tmp_path) as engine:
            await engine.wait_ready(20)
            _, reply = await call_engine(engine.address, "/scripted")
            inner = identify(json.loads(reply)["pid"])
            assert inner is not None
            assert inner.pid != engine.pid
            assert send_signal(engine.identity, signal.SIGKILL)
            assert await engine.wait_exited() == ExitStatus(-signal.SIGKILL)
            await until(lambda: not is_alive(inner))

    run(go())


def test_an_exit_is_noticed_within_a_second(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    """DESIGN §7: an engine that exits is noticed within 1 s. TRAPS 21."""

    async def go() -> None:
        async with running(make_command(), tmp_path) as engine:
            await engine.wait_ready(20)
            os.kill(engine.pid, signal.SIGKILL)
            async with asyncio.timeout(1):
                assert await engine.wait_exited() == ExitStatus(-signal.SIGKILL)
            assert not engine.is_alive()
            assert not await engine.probe(1)

    run(go())


@pytest.mark.parametrize("script", [None, Script(hang="generate"), Script(hang="accept")])
def test_a_hung_engine_fails_its_probe(
    run: Run, make_command: MakeCommand, tmp_path: Path, script: Script | None
) -> None:
    async def go() -> None:
        async with running(make_command(script=script), tmp_path) as engine:
            await until(lambda: port_in_use("127.0.0.1", engine.address.port))
            if script is None:
                await engine.wait_ready(20)
                assert await engine.probe(2)
                os.kill(engine.pid, signal.SIGSTOP)
                await until(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED)
            assert not await engine.probe(0.1)
            assert engine.is_alive()

    run(go())


def test_slow_loading_is_waited_for_and_told(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        seen: list[Progress] = []
        script = Script(start_seconds=0.05, load_seconds=0.2, stderr="reading weights")
        async with running(make_command(script=script), tmp_path) as engine:
            await engine.wait_ready(20, seen.append)
        phases = [progress.phase for progress in seen]
        assert phases == sorted(phases, key=["starting", "loading", "answering"].index)
        assert set(phases) == {"starting", "loading", "answering"}
        assert seen[-1].last_line == "reading weights"
        assert seen[-1].seconds >= 0.2

    run(go())


async def failure(command: EngineCommand, tmp_path: Path, seconds: float = 20) -> LoadFailed:
    """The error with which a load fails."""
    async with running(command, tmp_path) as engine:
        with pytest.raises(LoadFailed) as caught:
            await engine.wait_ready(seconds)
        return caught.value


def test_a_load_that_takes_too_long_says_how_far_it_came(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        script = Script(load_seconds=60, stderr="reading weights")
        error = await failure(make_command(script=script), tmp_path, seconds=0.5)
        assert isinstance(error, LoadTimedOut)
        assert "reading weights" in error.detail

    run(go())


def test_health_without_a_first_answer_is_not_ready(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        hung = await failure(make_command(script=Script(hang="generate")), tmp_path, seconds=0.5)
        assert isinstance(hung, LoadTimedOut)
        broken = await failure(make_command(script=Script(status=500)), tmp_path)
        assert type(broken) is LoadFailed
        assert "500" in broken.detail

    run(go())


@pytest.mark.parametrize("status", [1, -signal.SIGSEGV, -signal.SIGKILL])
@pytest.mark.parametrize("loading", [False, True])
def test_a_crash_at_the_start_is_told_with_status_and_last_words(
    run: Run, make_command: MakeCommand, tmp_path: Path, status: int, loading: bool
) -> None:
    async def go() -> None:
        script = Script(exit_status=status, exit_loading=loading, load_seconds=0.1, stderr="bad tensor")
        error = await failure(make_command(script=script), tmp_path)
        assert isinstance(error, EngineExited)
        assert error.status == status
        assert "bad tensor" in error.detail

    run(go())


def test_a_crash_during_the_first_answer_is_an_exit(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        error = await failure(make_command(script=Script(crash_after_tokens=0)), tmp_path)
        assert isinstance(error, EngineExited)
        assert error.status == -signal.SIGKILL

    run(go())


def test_a_connection_that_breaks_just_before_the_exit_is_an_exit(
    run: Run, make_command: MakeCommand, tmp_path: Path
) -> None:
    async def go() -> None:
        dying = Script(cut_after_tokens=0, crash_after_cut_seconds=0.2)
        assert isinstance(await failure(make_command(script=dying), tmp_path), EngineExited)
        living = await failure(make_command(script=Script(cut_after_tokens=0)), tmp_path)
        assert type(living) is LoadFailed
        assert "broke off" in living.detail

    run(go())


def test_words_in_the_log_decide_nothing(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    """TRAPS 23: decided by type, not by words in a message."""

    async def go() -> None:
        lies = "No such file or directory; address already in use; out of memory; timed out"
        error = await failure(make_command(script=Script(exit_status=1, stderr=lies)), tmp_path)
        assert type(error) is EngineExited
        assert "out of memory" in error.detail

    run(go())


def test_a_missing_file_is_its_own_error_before_and_after_the_start(
    run: Run, make_command: MakeCommand, tmp_path: Path
) -> None:
    """TRAPS 23: missing file: clear error, decided by type."""
    command = make_command(script=Script(exit_status=1, exit_loading=True, load_seconds=0.2))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(Path(command.model.path).read_bytes())
    command = replace(command, model=replace(command.model, path=str(copy), parts=(str(copy),)))

    async def go() -> None:
        async with running(command, tmp_path) as engine:
            copy.unlink()
            with pytest.raises(ModelFileMissing):
                await engine.wait_ready(20)
        with pytest.raises(ModelFileMissing):
            await start_engine(command, tmp_path / "engine.log")

    run(go())


@pytest.mark.parametrize("script", [None, Script()])
def test_a_taken_port_is_its_own_error(
    run: Run, make_command: MakeCommand, tmp_path: Path, script: Script | None
) -> None:
    """TRAPS 28: port races on start: retry on another port."""

    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = make_command(script=script, port=listener.getsockname()[1])
            assert isinstance(await failure(command, tmp_path), EnginePortTaken)

    run(go())


@pytest.mark.parametrize("key", ["other", ""])
def test_a_stranger_that_answers_on_our_port_is_not_our_engine(
    run: Run, make_command: MakeCommand, tmp_path: Path, key: str
) -> None:
    """Whether it asks for a key of its own or answers everybody."""
    first = make_command(script=Script())
    first = replace(first, api_key=key, env={**first.env, "LLAMA_API_KEY": key})

    async def go() -> None:
        async with running(first, tmp_path / "a") as stranger:
            await stranger.wait_ready(20)
            slow = make_command("tiny-other", script=Script(start_seconds=60), port=stranger.address.port)
            assert isinstance(await failure(slow, tmp_path / "b"), EnginePortTaken)

    run(go())


def test_a_broken_model_file_ends_the_real_engine_with_its_words(
    run: Run, make_command: MakeCommand, tmp_path: Path
) -> None:
    command = make_command()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(Path(command.model.path).read_bytes()[:5000])
    argv = tuple(str(broken) if argument == command.model.path else argument for argument in command.argv)

    async def go() -> None:
        error = await failure(replace(command, argv=argv), tmp_path)
        assert isinstance(error, EngineExited)
        assert error.status == 1
        assert "broken.gguf" in error.detail

    run(go())


@pytest.mark.parametrize("program", ["/nowhere/llama-server", "not-executable"])
def test_a_program_that_cannot_run_is_a_missing_engine(
    run: Run, make_command: MakeCommand, tmp_path: Path, program: str
) -> None:
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    command = replace(make_command(), argv=(str(tmp_path / program), "x"))

    async def go() -> None:
        with pytest.raises(EngineMissing):
            await start_engine(command, tmp_path / "engine.log")

    run(go())


def test_a_log_that_cannot_be_written_is_a_failed_load(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def go() -> None:
        with pytest.raises(StateNotWritable, match="log") as caught:
            await start_engine(make_command(), tmp_path / "file" / "engine.log")
        assert not isinstance(caught.value, EngineMissing)

    run(go())


def test_cancelling_a_start_leaves_no_process(
    run: Run, make_command: MakeCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    real = engine_module._spawn

    def spawn(*arguments: Any) -> int:
        pids.append(real(*arguments))
        return pids[0]

    monkeypatch.setattr(engine_module, "_spawn", spawn)

    async def go() -> None:
        task = asyncio.get_running_loop().create_task(start_engine(make_command(), tmp_path / "engine.log"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Whoever stops an engine hears that it is gone only then: not a moment later.
        assert pids
        assert all(identify(pid, zombie=True) is None for pid in pids)

    run(go())


def test_an_engine_outlives_the_process_that_started_it(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    """DESIGN §2: engines outlive launcherd: own session, no pipe to it, no death signal."""
    command = make_command()
    program = (
        "import asyncio, ctypes, os, pickle, signal, sys\n"
        "from pathlib import Path\n"
        "from services.launcherd.io.engine import start_engine\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
        "async def go():\n"
        "    command = pickle.load(sys.stdin.buffer)\n"
        "    engine = await start_engine(command, Path(sys.argv[1]))\n"
        "    await engine.wait_ready(20)\n"
        "    print(engine.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(go())\n"
    )

    async def go() -> None:
        import pickle

        starter = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(tmp_path / "engine.log"),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await starter.communicate(pickle.dumps(command))
        assert starter.returncode == -signal.SIGKILL
        identity = identify(int(output))
        assert identity is not None
        address = EngineAddress(host=command.host, port=command.port, api_key=command.api_key)
        engine = EngineProcess(
            identity, address, model_parts=command.model.parts, log_path=tmp_path / "engine.log"
        )
        assert await engine.probe(2)
        assert await engine.accepts_key(2)
        # No child of ours: its end is noticed all the same, without a status.
        assert await engine.stop() == ExitStatus(None)

    run(go())


def test_a_released_engine_runs_on(run: Run, make_command: MakeCommand, tmp_path: Path) -> None:
    async def go() -> None:
        engine = await start_engine(make_command(script=Script()), tmp_path / "engine.log")
        await engine.wait_ready(20)
        engine.release()
        engine.release()
        assert is_alive(engine.identity)
        again = EngineProcess(engine.identity, engine.address, model_parts=(), log_path=engine.log_path)
        assert await again.probe(2)
        assert await again.stop() == ExitStatus(0)

    run(go())


def test_free_ports_are_free() -> None:
    port = free_port()
    assert not port_in_use("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert port_in_use("127.0.0.1", port)
