"""One call brings a model up; whatever goes wrong, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.command_line import Engine, EngineOptions, fingerprint
from services.launcherd.io import launch
from services.launcherd.io.engine import EngineProcess, free_port, start_engine
from services.launcherd.io.engine_records import EngineRecord, EngineRecords
from services.launcherd.io.launch import PORT_ATTEMPTS, launch_engine
from services.launcherd.model_info import ModelFile
from shared.errors import EngineExited, EnginePortTaken, LoadFailed, ModelFileMissing, OptionRefused, StateNotWritable
from tests.engines.scripted_engine import Script
from tests.launcherd.conftest import until

pytestmark = pytest.mark.usefixtures("no_engine_left")

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Launch = Callable[..., Coroutine[Any, Any, tuple[EngineProcess, EngineRecord]]]


@pytest.fixture
def records(tmp_path: Path) -> EngineRecords:
    return EngineRecords(tmp_path / "engines")


@pytest.fixture
def start(
    tmp_path: Path, tiny: dict[str, ModelFile], small_options: EngineOptions, records: EngineRecords, embedded: Engine
) -> Launch:
    def start_one(
        engine: Engine | None = None, model: ModelFile | None = None
    ) -> Coroutine[Any, Any, tuple[EngineProcess, EngineRecord]]:
        return launch_engine(
            engine or embedded,
            model or tiny["tiny-llm"],
            small_options,
            engine_id="one",
            records=records,
            log_path=tmp_path / "one.log",
            environ=os.environ,
            ready_timeout_seconds=20,
        )

    return start_one


@pytest.fixture
def taken_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes the next so many chosen ports taken ones, as if somebody had been faster."""
    with ExitStack() as stack:

        def take(count: int) -> None:
            listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            ports = [listener.getsockname()[1] for listener in listeners]
            monkeypatch.setattr(launch, "free_port", lambda: ports.pop() if ports else free_port())

        yield take


def test_a_launched_engine_is_ready_and_recorded(
    run: Run, start: Launch, records: EngineRecords, embedded: Engine, tiny: dict[str, ModelFile],
    small_options: EngineOptions,
) -> None:  # fmt: skip
    async def go() -> None:
        engine, record = await start()
        assert await engine.probe(2)
        assert records.load() == ((record,), ())
        assert record.identity == engine.identity
        assert (record.parallel, record.context_tokens) == (2, 1024)
        assert record.options_fingerprint == fingerprint(embedded, tiny["tiny-llm"], small_options)
        await engine.stop()

    run(go())


def test_another_port_is_tried_when_one_was_taken(run: Run, start: Launch, taken_ports: Callable[[int], None]) -> None:
    """TRAPS 28: port races on start: retry on another port."""

    async def go() -> None:
        taken_ports(2)
        engine, record = await start()
        assert await engine.probe(2)
        assert record.port == engine.address.port
        await engine.stop()

    run(go())


def test_it_gives_up_when_every_port_is_taken(
    run: Run, start: Launch, records: EngineRecords, taken_ports: Callable[[int], None]
) -> None:
    async def go() -> None:
        taken_ports(PORT_ATTEMPTS)
        with pytest.raises(EnginePortTaken):
            await start()
        assert records.load() == ((), ())

    run(go())


def test_a_failed_load_leaves_no_process_and_no_record(
    run: Run, start: Launch, records: EngineRecords, scripted: Callable[[Script], Engine]
) -> None:
    async def go() -> None:
        with pytest.raises(EngineExited):
            await start(scripted(Script(exit_status=1)))
        with pytest.raises(LoadFailed):
            await start(scripted(Script(status=500, ignore_sigterm=True)))
        assert records.load() == ((), ())

    run(go())


def test_a_missing_file_starts_nothing(
    run: Run, start: Launch, records: EngineRecords, tiny: dict[str, ModelFile], tmp_path: Path
) -> None:
    async def go() -> None:
        gone = replace(tiny["tiny-llm"], path="/gone.gguf", parts=("/gone.gguf",))
        with pytest.raises(ModelFileMissing):
            await start(model=gone)
        assert records.load() == ((), ())
        assert not (tmp_path / "one.log").exists()

    run(go())


def test_a_cancelled_load_leaves_no_process_and_no_record(
    run: Run, start: Launch, records: EngineRecords, scripted: Callable[[Script], Engine], tmp_path: Path
) -> None:
    async def go() -> None:
        starts = tmp_path / "starts"
        engine = scripted(Script(load_seconds=60, ignore_sigterm=True, starts_file=str(starts)))
        task = asyncio.get_running_loop().create_task(start(engine))
        await until(starts.exists)
        (record,), _ = records.load()
        assert record.identity is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: records.load() == ((), ()))

    run(go())


def test_the_record_is_there_before_the_process(
    run: Run, start: Launch, records: EngineRecords, scripted: Callable[[Script], Engine], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """TRAPS 32: kill -9 during a load leaves something to sweep by."""
    seen: list[EngineRecord] = []
    real = start_engine

    async def look(*arguments: Any) -> EngineProcess:
        seen.extend(records.load()[0])
        return await real(*arguments)

    monkeypatch.setattr(launch, "start_engine", look)

    async def go() -> None:
        engine, record = await start(scripted(Script()))
        assert seen == [replace(record, identity=None)]
        await engine.stop()

    run(go())


def test_a_record_that_cannot_be_written_is_a_failed_load(
    run: Run, start: Launch, records: EngineRecords, tmp_path: Path
) -> None:
    (tmp_path / "engines").touch()

    async def go() -> None:
        with pytest.raises(StateNotWritable, match=r"record.*free space"):
            await start()

    run(go())


def test_a_crash_that_happens_twice_then_not(
    run: Run, start: Launch, scripted: Callable[[Script], Engine], tmp_path: Path
) -> None:
    """What evict-all-and-retry sees: the same call fails, then works. TRAPS 22."""
    script = Script(exit_status=-signal.SIGKILL, exit_starts=2, starts_file=str(tmp_path / "starts"))

    async def go() -> None:
        engine = scripted(script)
        for _ in range(2):
            with pytest.raises(EngineExited):
                await start(engine)
        process, _ = await start(engine)
        await process.stop()

    run(go())


def test_the_embedded_engine_reads_the_projector(
    run: Run, tmp_path: Path, tiny: dict[str, ModelFile], small_options: EngineOptions, records: EngineRecords,
    embedded: Engine,
) -> None:  # fmt: skip
    """docs/spec/recipes.md 16. A file that is none is a failed load, not a model that cannot see."""
    broken = tmp_path / "mmproj-tiny-llm.gguf"
    broken.write_bytes(b"no projector")
    with pytest.raises(LoadFailed):
        run(
            launch_engine(
                embedded,
                tiny["tiny-llm"],
                small_options,
                engine_id="one",
                records=records,
                log_path=tmp_path / "one.log",
                environ=os.environ,
                ready_timeout_seconds=20,
                projector=str(broken),
            )
        )
    assert "mmproj" in (tmp_path / "one.log").read_text()


def test_arguments_that_the_embedded_engine_cannot_use_are_a_refused_option(
    run: Run, tmp_path: Path, tiny: dict[str, ModelFile], small_options: EngineOptions, records: EngineRecords,
    embedded: Engine,
) -> None:  # fmt: skip
    """docs/spec/slots.md 11: nothing is unloaded for a typing error. Told by the exit status, not by its words."""
    for arguments in (("--no-such-flag",), ("--chat-template-file", str(tmp_path / "none"))):
        with pytest.raises(OptionRefused, match=r"no-such-flag|No such file"):
            run(
                launch_engine(
                    embedded,
                    tiny["tiny-llm"],
                    replace(small_options, extra_args=arguments),
                    engine_id="one",
                    records=records,
                    log_path=tmp_path / "one.log",
                    environ=os.environ,
                    ready_timeout_seconds=20,
                )
            )
