"""A real launcherd whose models are run by other engines than llama.cpp, and restarts of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.ids import ModelName
from shared.messages.daemon import Done
from shared.messages.downloads import PullModel
from shared.messages.models import LoadModel, ModelLoaded, UnloadModel
from tests.engines.scripted_engine import Script, write_engine
from tests.launcherd.launcher_node import LauncherNode
from tests.waiting import wait_until


@pytest.fixture
def whisper(node: LauncherNode, tmp_path: Path) -> LauncherNode:
    """A node with whisper-server on its PATH and a model for it."""
    programs = tmp_path / "programs"
    programs.mkdir()
    write_engine(programs / "whisper-server", Script())
    (tmp_path / "ggml-base.bin").write_bytes(b"weights")
    node.configure()
    node.start(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    registered = PullModel(model="hears", checkpoint=str(tmp_path / "ggml-base.bin"), recipe="whispercpp")
    assert isinstance(node.ask(registered), Done)
    return node


def test_a_restarted_launcherd_keeps_another_recipes_engine(whisper: LauncherNode) -> None:
    """docs/spec/recipes.md 14: an engine whose recipe has no key is adopted if it is the recorded process and listens
    on the recorded port itself."""
    whisper.load("hears")
    before = whisper.engines()
    assert len(before) == 1
    assert whisper.daemon is not None
    whisper.daemon.kill()
    # The same PATH is not needed to keep what runs.
    whisper.start()
    again = whisper.ask(LoadModel(model=ModelName("hears")))
    assert isinstance(again, ModelLoaded)
    assert again.already
    assert whisper.engines() == before
    whisper.ask(UnloadModel(model=ModelName("hears")))
    wait_until(lambda: not whisper.engines(), 10, "its end")


def test_equal_options_keep_the_engine_over_a_restart_of_launcherd(node: LauncherNode) -> None:
    """docs/spec/options.md 4: with equal resolved options, the build among them, the engine keeps running; also when
    the restarted launcherd is asked before it has looked for builds."""
    node.use_script(Script())
    node.start()
    node.load("tiny-llm", backend="path")
    before = node.engines()
    node.restart_after_kill()
    assert node.load("tiny-llm").already
    assert node.engines() == before


def test_other_builds_and_arguments(node: LauncherNode) -> None:
    """docs/spec/options.md 5: an unknown build is refused with those there are; 2: arguments of a request replace the
    configured ones."""
    node.use_script(Script())
    record = node.home / "starts"
    other = write_engine(node.home / "other-llama", Script(starts_file=str(record)))
    node.configure(engine={"backends.other": str(other), "extra_args": ["--mlock"]})
    node.start()
    slot = node.load("tiny-llm", backend="other", extra_args=())
    assert record.read_text().split() == [str(pid) for pid in node.engines()]
    refused = node.refusal(LoadModel(model=ModelName("tiny-llm"), backend="vulkan"))
    assert (refused.code, "known: embedded, path, other" in refused.detail) == ("backend_unknown", True)
    refused = node.refusal(LoadModel(model=ModelName("tiny-llm"), extra_args=("--api_key=x",)))
    assert (refused.code, "meshd makes the engine's key" in refused.detail) == ("option_refused", True)
    assert node.load("tiny-llm", backend="other", extra_args=()).slot_id == slot.slot_id
    node.ask(UnloadModel(model=ModelName("tiny-llm")))
    other.unlink()
    refused = node.refusal(LoadModel(model=ModelName("tiny-llm"), backend="other"))
    assert refused.code == "engine_missing"


def test_a_build_that_does_not_run_yet_is_tried_again_when_it_is_asked_for(node: LauncherNode, tmp_path: Path) -> None:
    """docs/spec/options.md 5: one whose program is missing is refused with `engine_missing`; it is looked for anew."""
    ready = tmp_path / "driver"
    program = write_engine(tmp_path / "llama-server", Script())
    real = program.rename(tmp_path / "real")
    program.write_text(f'#!/bin/sh\n[ -e "{ready}" ] && exec "{real}" "$@"\nexit 1\n')
    program.chmod(0o755)
    node.configure(engine={"path": str(program)})
    node.start()
    refused = node.refusal(LoadModel(model=ModelName("tiny-llm"), backend="path"))
    assert (refused.code, "does not run" in refused.detail) == ("engine_missing", True)
    ready.write_text("")
    assert not node.load("tiny-llm", backend="path").already
    assert node.load("tiny-llm").already, "it runs what names none, too"
