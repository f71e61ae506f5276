"""Records let the next launcherd adopt what is healthy and sweep the rest, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.command_line import ENGINE_MARK
from services.launcherd.io.engine import EngineProcess, start_engine
from services.launcherd.io.engine_records import EngineRecord, EngineRecords, with_identity
from services.launcherd.io.process import ProcessIdentity, identify, is_alive
from tests.engines.scripted_engine import Script
from tests.launcherd.conftest import until
from tests.launcherd.io.conftest import MakeCommand

pytestmark = pytest.mark.usefixtures("no_engine_left")

Run = Callable[[Coroutine[Any, Any, Any]], Any]

RECORD = EngineRecord(
    engine_id="test",
    identity=ProcessIdentity(4_000_000, 12345, "boot"),
    model_name="m",
    model_type="llm",
    model_parts=("/m.gguf",),
    host="127.0.0.1",
    port=1234,
    api_key="secret",
    parallel=4,
    context_tokens=100,
    argv=("llama-server", "-m", "/m.gguf"),
    options_fingerprint="abc",
    log_path="/tmp/m.log",
)


@pytest.fixture
def records(tmp_path: Path) -> EngineRecords:
    return EngineRecords(tmp_path / "engines")


async def started(
    make_command: MakeCommand, records: EngineRecords, tmp_path: Path, script: Script | None = None
) -> tuple[EngineProcess, EngineRecord]:
    """A ready engine with its record on disk."""
    command = make_command(script=script)
    engine = await start_engine(command, tmp_path / "engine.log")
    await engine.wait_ready(20)
    record = replace(
        RECORD,
        identity=engine.identity,
        port=command.port,
        api_key=command.api_key,
        argv=command.argv,
        log_path=str(tmp_path / "engine.log"),
    )
    records.save(record)
    return engine, record


def test_a_record_comes_back_as_it_was_saved(records: EngineRecords) -> None:
    before = replace(RECORD, engine_id="before", identity=None)
    records.save(RECORD)
    records.save(before)
    assert records.load() == ((before, RECORD), ())
    records.save(replace(RECORD, port=99))
    assert records.load()[0][1].port == 99
    records.remove("test")
    records.remove("test")
    assert records.load() == ((before,), ())


def test_records_are_private(records: EngineRecords) -> None:
    """TRAPS 6: the engine's key is in it."""
    records.save(RECORD)
    path = records.path("test")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert "secret" not in repr(RECORD)


def test_without_a_folder_there_are_no_records(records: EngineRecords) -> None:
    assert records.load() == ((), ())
    assert records.sweep_strays() == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[1]",
        lambda text: text.replace('"engine_id": "test"', '"engine_id": "other"'),
        lambda text: text.replace("1234,", "0,"),
        lambda text: text.replace("4000000", "1"),
        lambda text: text.replace("4000000", "true"),
        lambda text: text.replace('"llm"', '"video"'),
        lambda text: text.replace('"secret"', "null"),
        lambda text: text.replace('"port"', '"harbour"'),
        lambda text: "[" * 100_000,
    ],
)
def test_broken_records_are_removed_with_a_reason(records: EngineRecords, spoil: Callable[[str], str]) -> None:
    records.save(RECORD)
    path = records.path("test")
    path.write_text(spoil(path.read_text()))
    loaded, (dropped,) = records.load()
    assert loaded == ()
    assert dropped.path == str(path)
    assert "broken engine record" in dropped.reason
    assert not path.exists()


def test_a_half_written_record_does_not_replace_the_old_one(records: EngineRecords) -> None:
    records.save(RECORD)
    leftover = records.path("test").with_suffix(".tmp")
    leftover.write_text("{")
    assert records.load() == ((RECORD,), ())
    assert not leftover.exists()


@pytest.mark.parametrize("script", [None, Script()])
def test_a_healthy_engine_is_adopted_and_watched(
    run: Run, make_command: MakeCommand, records: EngineRecords, tmp_path: Path, script: Script | None
) -> None:
    """DESIGN §2: a restarted launcherd adopts what is healthy."""

    async def go() -> None:
        engine, record = await started(make_command, records, tmp_path, script)
        engine.release()
        (loaded,), _ = records.load()
        adopted = await records.adopt(loaded)
        assert adopted is not None
        assert adopted.identity == engine.identity
        assert await adopted.probe(2)
        assert adopted.log_tail(1) == engine.log_tail(1)
        os.kill(adopted.pid, signal.SIGKILL)
        async with asyncio.timeout(1):
            await adopted.wait_exited()
        assert await records.adopt(record) is None

    run(go())


@pytest.mark.parametrize(
    "change",
    [
        lambda record: replace(record, api_key="other"),
        lambda record: replace(record, port=1),
        lambda record: replace(record, identity=None),
        lambda record: replace(record, identity=replace(record.identity, start_time=1)),
        lambda record: replace(record, identity=replace(record.identity, boot_id="last boot")),
    ],
)
def test_what_does_not_match_is_not_adopted(
    run: Run,
    make_command: MakeCommand,
    records: EngineRecords,
    tmp_path: Path,
    change: Callable[[EngineRecord], EngineRecord],
) -> None:
    async def go() -> None:
        engine, record = await started(make_command, records, tmp_path, Script())
        assert await records.adopt(change(record), timeout_seconds=2) is None
        assert engine.is_alive()
        await engine.stop()

    run(go())


def test_a_server_that_answers_everybody_is_a_stranger(
    run: Run, make_command: MakeCommand, records: EngineRecords, tmp_path: Path
) -> None:
    """It did not get our key, whatever its pid."""

    async def go() -> None:
        command = make_command(script=Script())
        keyless = replace(command, env={**command.env, "LLAMA_API_KEY": ""})
        engine = await start_engine(keyless, tmp_path / "engine.log")
        await engine.wait_ready(20)
        record = replace(RECORD, identity=engine.identity, port=command.port)
        assert await records.adopt(record, timeout_seconds=2) is None
        await engine.stop()

    run(go())


def test_a_hung_engine_is_not_adopted_but_swept(
    run: Run, make_command: MakeCommand, records: EngineRecords, tmp_path: Path
) -> None:
    async def go() -> None:
        engine, record = await started(make_command, records, tmp_path)
        engine.release()
        os.kill(engine.pid, signal.SIGSTOP)
        assert await records.adopt(record, timeout_seconds=0.2) is None
        assert await records.sweep(record)
        assert not is_alive(engine.identity)
        assert records.load() == ((), ())

    run(go())


def test_one_that_refuses_to_stop_is_swept_all_the_same(
    run: Run, make_command: MakeCommand, records: EngineRecords, tmp_path: Path
) -> None:
    async def go() -> None:
        engine, record = await started(make_command, records, tmp_path, Script(ignore_sigterm=True))
        engine.release()
        assert await records.sweep(record, grace_seconds=0.1)
        assert not is_alive(engine.identity)

    run(go())


def test_sweeping_what_is_gone_or_reused_touches_nothing_else(run: Run, records: EngineRecords) -> None:
    """TRAPS 31: a reused pid."""
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        identity = identify(stranger.pid)
        assert identity is not None
        record = replace(RECORD, identity=replace(identity, start_time=identity.start_time - 1))
        records.save(record)
        assert run(records.sweep(record)) is False
        assert run(records.sweep(record)) is False
        assert records.load() == ((), ())
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_started_but_not_yet_recorded_is_found_by_its_mark(
    run: Run, make_command: MakeCommand, records: EngineRecords, tmp_path: Path
) -> None:
    """TRAPS 32: kill -9 of launcherd during a load: no orphan."""

    async def go() -> None:
        engine, record = await started(make_command, records, tmp_path)
        engine.release()
        intent = replace(record, identity=None)
        records.save(intent)
        assert await records.adopt(intent) is None
        assert await records.sweep(intent)
        assert not is_alive(engine.identity)

    run(go())


@pytest.mark.parametrize("damage", ["broken", "removed"])
def test_an_engine_whose_record_is_lost_is_killed(
    run: Run, make_command: MakeCommand, records: EngineRecords, tmp_path: Path, damage: str
) -> None:
    async def go() -> None:
        engine, record = await started(make_command, records, tmp_path, Script())
        engine.release()
        assert records.sweep_strays() == 0
        assert is_alive(engine.identity)
        if damage == "broken":
            records.path(record.engine_id).write_text("{")
            assert len(records.load()[1]) == 1
        else:
            records.remove(record.engine_id)
            assert records.sweep_strays() == 1
        await until(lambda: not is_alive(engine.identity))

    run(go())


def test_sweeping_takes_the_engine_behind_a_wrapper_along(run: Run, records: EngineRecords, tmp_path: Path) -> None:
    """Also one that left the wrapper's session."""
    environ = {**os.environ, ENGINE_MARK: str(records.path("test"))}
    program = "import os, time\nif os.fork() == 0: os.setsid()\nos.write(1, b'up\\n')\ntime.sleep(60)"
    wrapper = subprocess.Popen(
        [sys.executable, "-c", program], env=environ, start_new_session=True, stdout=subprocess.PIPE
    )
    assert wrapper.stdout is not None
    assert wrapper.stdout.readline() + wrapper.stdout.readline() == b"up\nup\n"
    identity = identify(wrapper.pid)
    assert identity is not None
    record = with_identity(RECORD, identity)
    records.save(record)
    assert run(records.sweep(record))
    wrapper.wait()
    wrapper.stdout.close()


def test_saving_to_a_full_or_missing_place_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        EngineRecords(tmp_path / "file").save(RECORD)


def test_the_file_is_plain_json(records: EngineRecords) -> None:
    records.save(RECORD)
    assert json.loads(records.path("test").read_text())["model_name"] == "m"
