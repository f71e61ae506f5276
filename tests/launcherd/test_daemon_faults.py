"""launcherd as a process while files, folders and the engine itself vanish under it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil

from shared.errors import RequestRefused
from shared.ids import ModelName
from shared.messages.models import DeviceChanged, LoadModel, UnloadModel
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script
from tests.launcherd.launcher_node import LauncherNode, pid_of
from tests.waiting import wait_until


def test_an_engine_that_vanishes_is_looked_for_again(scripted: LauncherNode) -> None:
    """Nothing is unloaded for it, and the error says what to do."""
    node = scripted
    node.start()
    loaded = node.load("tiny-llm")
    (node.home / "llama-server").unlink()
    refused = node.refusal(LoadModel(model=ModelName("tiny-embedding")))
    assert refused.code == "engine_missing"
    assert "llama-server is not there" in refused.detail
    slot = node.slot("tiny-llm")
    assert slot is not None
    assert (slot.state, slot.slot_id) == ("ready", loaded.slot_id)
    reason = wait_until(lambda: _engine_reason(node), 10, "the device without an engine")
    assert reason is not None
    assert "does not exist; install" in reason


def _engine_reason(node: LauncherNode) -> str:
    return next(item.engine_reason for item in node.snapshot() if isinstance(item, DeviceChanged))


def test_a_full_disk_unloads_nothing(scripted: LauncherNode) -> None:
    """No engine's record can be written: what, why, what to do; and it works again afterwards."""
    node = scripted
    node.start()
    loaded = node.load("tiny-llm")
    folder = node.home / "engines"
    folder.rename(node.home / "away")
    folder.touch()  # As root, permissions would not stop anybody.
    refused = node.refusal(LoadModel(model=ModelName("tiny-embedding")))
    assert refused.code == "load_failed"
    assert "record" in refused.detail
    assert "free space" in refused.detail
    slot = node.slot("tiny-llm")
    assert slot is not None
    assert (slot.state, slot.slot_id) == ("ready", loaded.slot_id)
    folder.unlink()
    (node.home / "away").rename(folder)
    node.load("tiny-embedding", context_tokens=256)


def test_a_model_file_that_vanishes_during_the_load(scripted: LauncherNode, tmp_path: Path) -> None:
    """TRAPS 23: decided by the file, not by what the engine says about it; nothing is unloaded."""
    tiny_models.write_llm(tmp_path / "a.gguf")
    tiny_models.write_llm(tmp_path / "b.gguf")
    node = scripted
    node.configure(models={"folders": [str(tmp_path)], "max_loaded_models": [2]})
    node.start()
    node.load("a")
    started = node.home / "started"
    node.use_script(Script(load_seconds=30, starts_file=str(started)))
    refusals: list[RequestRefused] = []
    client = threading.Thread(target=lambda: refusals.append(node.refusal(LoadModel(model=ModelName("b")))))
    client.start()
    wait_until(started.exists, 10, "the engine was started")
    slot = node.wait_state("b", "loading")
    pid = next(pid for pid in node.engines() if pid != pid_of(node, "a"))
    (tmp_path / "b.gguf").unlink()
    os.kill(pid, signal.SIGABRT)
    client.join(20)
    assert [refused.code for refused in refusals] == ["model_file_missing"]
    assert "b.gguf" in refusals[0].detail
    assert node.wait_state("a", "ready")
    wait_until(lambda: node.slot("b") is None, 10, f"slot {slot.slot_id} is forgotten")


def test_many_loads_leave_neither_processes_nor_descriptors_nor_files(scripted: LauncherNode) -> None:
    node = scripted
    daemon = node.start()
    process = psutil.Process(daemon.pid)

    def cycles(count: int) -> tuple[int, int]:
        for _ in range(count):
            node.load("tiny-llm")
            node.ask(UnloadModel(model=ModelName("tiny-llm")))
            node.ask(LoadModel(model=ModelName("tiny-other"), wait=False))
            node.ask(UnloadModel(model=ModelName("tiny-other")))
        return process.num_fds(), len(list((node.home / "engines").iterdir()))

    descriptors, files = cycles(3)
    more_descriptors, more_files = cycles(10)
    assert more_descriptors <= descriptors + 2
    assert more_files <= files
    assert node.engines() == []
