"""Every order to the crew ends in exactly one of its stimuli."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.launcherd.command_line import Engine, EngineOptions
from services.launcherd.io import engine_crew
from services.launcherd.io.engine_crew import EngineCrew, remove_logs, unused_logs
from services.launcherd.io.process import family, identify, send_signal
from services.launcherd.model_info import ModelFile
from services.launcherd.slot_events import (
    EngineExited,
    EngineFailed,
    EngineHealthy,
    EngineHung,
    EngineLoading,
    EngineReady,
    EngineStopped,
    KnownModel,
    StartEngine,
    Stimulus,
)
from shared.ids import SlotId
from shared.io.drive import Tasks
from shared.recipes import BUILTIN_RECIPES
from tests.engines.scripted_engine import Script
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_engine_left")

Run = Callable[[Coroutine[Any, Any, Any]], Any]
SLOT = SlotId("test-1")


class Crew:
    """A crew and what it reported."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Stimulus] = []
        self.crew = EngineCrew(folder, self.told.append, Tasks())

    def start(self, order: StartEngine, engine: Engine, seconds: float) -> None:
        recipe = BUILTIN_RECIPES["llamacpp"]
        self.crew.start(order, lambda options: engine, recipe, least_readiness_seconds=seconds)

    async def wait_for(self, kind: type[Stimulus], seconds: float = 10.0) -> Any:
        await until(lambda: any(isinstance(item, kind) for item in self.told), seconds, kind.__name__)
        return next(item for item in self.told if isinstance(item, kind))

    def endings(self) -> list[str]:
        return [type(item).__name__ for item in self.told if not isinstance(item, EngineLoading)]


@pytest.fixture
def order(tiny: dict[str, ModelFile], small_options: EngineOptions) -> StartEngine:
    return StartEngine(slot_id=SLOT, model=KnownModel(file=tiny["tiny-llm"]), options=small_options)


def test_start_probe_exit(run: Run, tmp_path: Path, order: StartEngine, scripted: Callable[[Script], Engine]) -> None:
    async def work() -> None:
        crew = Crew(tmp_path / "engines")
        crew.start(order, scripted(Script()), 30.0)
        ready: EngineReady = await crew.wait_for(EngineReady)
        assert ready.endpoint.base_url == f"http://127.0.0.1:{ready.endpoint.port}"
        assert Path(ready.endpoint.log_path) == crew.crew.log_path(SLOT)
        crew.crew.probe(SLOT, 2.0)
        await crew.wait_for(EngineHealthy)
        os.kill(ready.endpoint.pid, signal.SIGKILL)
        exited: EngineExited = await crew.wait_for(EngineExited, 1.0)
        assert exited.how == "was ended by SIGKILL"
        assert crew.endings() == ["EngineReady", "EngineHealthy", "EngineExited"]
        assert not crew.crew.records.path(SLOT).exists()

    run(work())


def test_a_failed_start_says_why(
    run: Run, tmp_path: Path, order: StartEngine, scripted: Callable[[Script], Engine]
) -> None:
    async def work() -> None:
        crew = Crew(tmp_path / "engines")
        crew.start(order, scripted(Script(exit_status=3, stderr="no memory")), 30.0)
        failed: EngineFailed = await crew.wait_for(EngineFailed)
        assert failed.code == "engine_exited"
        assert "no memory" in failed.detail

    run(work())


def test_stop_while_loading_and_stop_twice(
    run: Run, tmp_path: Path, order: StartEngine, scripted: Callable[[Script], Engine]
) -> None:
    """TRAPS 31."""

    async def work() -> None:
        crew = Crew(tmp_path / "engines")
        crew.start(order, scripted(Script(load_seconds=60)), 60.0)
        await crew.wait_for(EngineLoading)
        crew.crew.stop(SLOT)
        crew.crew.stop(SLOT)
        await until(lambda: crew.endings() == ["EngineStopped"] * 2, 10, "both stops are answered")

    run(work())


def test_stop_reports_no_exit(
    run: Run, tmp_path: Path, order: StartEngine, scripted: Callable[[Script], Engine]
) -> None:
    async def work() -> None:
        crew = Crew(tmp_path / "engines")
        crew.start(order, scripted(Script()), 30.0)
        await crew.wait_for(EngineReady)
        crew.crew.stop(SLOT)
        await crew.wait_for(EngineStopped)
        assert crew.endings() == ["EngineReady", "EngineStopped"]

    run(work())


def test_a_silent_engine_is_hung_unless_it_computes(
    run: Run, tmp_path: Path, order: StartEngine, embedded: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRAPS 30: stall detection must not kill a long prompt on a slow CPU."""

    async def work() -> None:
        crew = Crew(tmp_path / "engines")
        crew.start(order, embedded, 30.0)
        ready: EngineReady = await crew.wait_for(EngineReady)
        os.kill(ready.endpoint.pid, signal.SIGSTOP)
        computed = iter([0.0, 1.0, 1.0, 1.0])
        monkeypatch.setattr(engine_crew, "_cpu_seconds", lambda pid: next(computed))
        crew.crew.probe(SLOT, 0.2)
        hung: EngineHung = await crew.wait_for(EngineHung)
        assert hung.detail == "no answer for 0.4 s"
        assert next(computed, None) is None  # It was asked a second time because it had computed during the first.
        crew.crew.stop(SLOT)
        await crew.wait_for(EngineStopped)

    run(work())


def test_the_work_of_an_engine_behind_a_wrapper_counts(run: Run) -> None:
    """TRAPS 30: a configured engine may be a script that starts the real one."""
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    wrapper = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    leader = identify(wrapper.pid)
    assert leader is not None
    try:
        run(until(lambda: engine_crew._cpu_seconds(leader) >= 0.3, 10, "the child's work is seen"))
        assert psutil.Process(wrapper.pid).cpu_times().user < 0.25
    finally:
        for member in (*family(leader), leader):
            send_signal(member, signal.SIGKILL)
        wrapper.wait()


def test_the_node_goes_down_with_all_engines_at_once(
    run: Run, tmp_path: Path, order: StartEngine, scripted: Callable[[Script], Engine]
) -> None:
    async def work() -> None:
        crew = Crew(tmp_path / "engines")
        engine = scripted(Script())
        crew.start(order, engine, 30.0)
        await crew.wait_for(EngineReady)
        other = StartEngine(slot_id=SlotId("test-2"), model=order.model, options=order.options)
        crew.start(other, scripted(Script(load_seconds=60)), 60.0)
        await asyncio.wait_for(crew.crew.stop_all(), 9)
        assert not list((tmp_path / "engines").glob("*.json"))

    run(work())


def test_an_adopted_engine_is_watched(
    run: Run, tmp_path: Path, order: StartEngine, scripted: Callable[[Script], Engine]
) -> None:
    async def work() -> None:
        first = Crew(tmp_path / "engines")
        first.start(order, scripted(Script()), 30.0)
        ready: EngineReady = await first.wait_for(EngineReady)
        second = Crew(tmp_path / "engines")
        (record,), _ = second.crew.records.load()
        endpoint = await second.crew.adopt(record, BUILTIN_RECIPES)
        assert endpoint is not None
        assert endpoint.pid == ready.endpoint.pid
        second.crew.watch(SLOT)
        os.kill(endpoint.pid, signal.SIGKILL)
        await second.wait_for(EngineExited, 2.0)

    run(work())


def test_old_logs_are_removed(tmp_path: Path) -> None:
    for name in ("kept.log", "kept.log.1", "old.log", "old.log.1", "record.json"):
        (tmp_path / name).touch()
    remove_logs(unused_logs(tmp_path, ["/elsewhere/kept.log"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.log", "kept.log.1", "record.json"]
