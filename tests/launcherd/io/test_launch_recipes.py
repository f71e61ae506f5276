"""Each recipe's engine is started by its own command line, asked in its own words, adopted and stopped.

The stand-ins take the real programs' command lines, and end for an option that those do not have. Rules quoted from
docs/spec/recipes.md.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.command_line import Engine
from services.launcherd.io.engine import EngineProcess
from services.launcherd.io.engine_http import call_engine
from services.launcherd.io.engine_records import EngineRecord, EngineRecords
from services.launcherd.io.launch import launch_engine
from services.launcherd.model_info import ModelFile
from services.launcherd.options import engine_options
from services.launcherd.recipes import FirstRequest, first_request
from services.launcherd.slot_events import KnownModel
from shared.config import NodeConfig
from shared.errors import EngineExited, LoadFailed, ModelFileMissing
from shared.messages.models import ModelType
from shared.recipes import BUILTIN_RECIPES, Recipe, changed_recipe
from tests.engines.scripted_engine import Script, write_engine

pytestmark = pytest.mark.usefixtures("no_engine_left")

Run = Callable[[Coroutine[Any, Any, Any]], Any]

CASES: list[tuple[str, ModelType]] = [
    ("oga-hybrid", "llm"),
    ("oga-npu", "llm"),
    ("oga-cpu", "llm"),
    ("ryzenai-llm", "llm"),
    ("flm", "llm"),
    ("flm", "embedding"),
    ("flm", "audio"),
    ("whispercpp", "audio"),
    ("sd-cpp", "image"),
]


def a_model(tmp_path: Path, type: ModelType, recipe: str) -> KnownModel:
    """A model that is no GGUF: a file, or a folder as ONNX models are."""
    path = tmp_path / "model"
    if type == "llm":
        path.mkdir()
        (path / "genai_config.json").write_text("{}")
    else:
        path.write_bytes(b"weights")
    file = ModelFile(
        name="my-model",
        type=type,
        path=str(path),
        parts=(str(path),),
        architecture="",
        trained_context_tokens=0,
        parameters=0,
        file_size_bytes=7,
        kv_bytes_per_token=0,
        compute_bytes=0,
        quantization="",
        chat_template=False,
    )
    return KnownModel(file=file, recipe=recipe, checkpoint="gemma3:4b" if recipe == "flm" else "")


async def launch(
    tmp_path: Path, model: KnownModel, script: Script | None = None, recipe: Recipe | None = None
) -> tuple[EngineProcess, EngineRecord]:
    recipe = recipe or BUILTIN_RECIPES[model.recipe]
    config = NodeConfig(recipes={**BUILTIN_RECIPES, recipe.name: recipe})
    program = write_engine(tmp_path / recipe.program, script)
    return await launch_engine(
        Engine(kind=recipe.name, program=(str(program),), version="scripted"),
        model.file,
        engine_options(model, config, 2),
        engine_id="one",
        records=EngineRecords(tmp_path / "engines"),
        log_path=tmp_path / "one.log",
        environ=os.environ,
        ready_timeout_seconds=20,
        recipe=recipe,
        checkpoint=model.checkpoint,
    )


@pytest.mark.parametrize(("name", "type"), CASES, ids=lambda value: str(value))
def test_each_recipe_brings_its_model_up(run: Run, tmp_path: Path, name: str, type: ModelType) -> None:
    """8. A model's recipe chooses its program and its command line.

    12. An engine counts as ready when its `health_path` answers one of its `ready_statuses` and the first request of
    the model's type came back well. Image models are not asked for an image, which may take minutes.
    """
    model = a_model(tmp_path, type, name)

    async def work() -> None:
        engine, record = await launch(tmp_path, model, Script(tokens=3))
        try:
            assert record.recipe == name
            _, told = await call_engine(engine.address, "/scripted", {})
            counters = json.loads(told)
            assert counters["finished"] == (0 if type == "image" else 1), "the first request"
            answer = await request_of(type, engine, record)
            if type == "llm":
                assert answer["choices"][0]["message"]["content"] == "w0 w1 "
            elif type == "embedding":
                assert len(answer["data"][0]["embedding"]) == 3
            elif type == "audio":
                assert answer["text"] == "w0 w1 w2"
            else:
                assert answer["data"][0]["b64_json"]
            assert await engine.probe(5)
        finally:
            await engine.stop()

    run(work())


async def request_of(type: ModelType, engine: EngineProcess, record: EngineRecord) -> Any:
    """What a user would ask, on the OpenAI path."""
    if type == "llm":
        body = {"model": "gemma3:4b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        asked = FirstRequest("/v1/chat/completions", "application/json", json.dumps(body).encode())
    elif type == "image":
        body = {"model": "my-model", "prompt": "a red square"}
        asked = FirstRequest("/v1/images/generations", "application/json", json.dumps(body).encode())
    else:
        first = first_request(BUILTIN_RECIPES[record.recipe], type, "gemma3:4b")
        assert first is not None
        asked = first
    status, reply = await call_engine(engine.address, asked.path, asked.body, asked.content_type)
    assert status == 200, reply
    return json.loads(reply)


def test_whisper_of_old_without_a_health_route_is_ready_when_it_listens(run: Run, tmp_path: Path) -> None:
    """12. …one of its `ready_statuses`: builds of whisper-server without a health route answer 404."""

    async def work() -> None:
        engine, _ = await launch(tmp_path, a_model(tmp_path, "audio", "whispercpp"), Script(health_status=404))
        await engine.stop()

    run(work())


def test_a_recipe_of_a_users_own(run: Run, tmp_path: Path) -> None:
    """5. `[recipes.NAME]` adds a recipe… 11. The key of an engine that takes one is in its environment."""
    own = changed_recipe(
        "mine",
        {
            "program": "my-llama",
            "arguments": ("--model", "{model}", "--host", "{host}", "--port", "{port}", "--alias", "{name}"),
            "endpoints": ("/v1/chat/completions",),
            "key_variable": "LLAMA_API_KEY",
        },
        source="mesh.toml",
    )

    async def work() -> None:
        model = replace(a_model(tmp_path, "llm", "mine"), recipe="mine")
        engine, record = await launch(tmp_path, model, recipe=own)
        try:
            assert record.api_key not in " ".join(record.argv)
            status, _ = await call_engine(replace(engine.address, api_key="other"), "/v1/chat/completions", {})
            assert status == 401
            again = await EngineRecords(tmp_path / "engines").adopt(record, recipes={"mine": own})
            assert again is not None
            again.release()
            assert await EngineRecords(tmp_path / "engines").adopt(record) is None, "the recipe is gone"
        finally:
            await engine.stop()

    run(work())


def test_an_engine_without_a_key_is_adopted_only_by_its_own_port(run: Run, tmp_path: Path) -> None:
    """14. An engine whose recipe has no key is adopted by a restarted launcherd only if its process is the recorded one
    and listens on the recorded port itself."""
    model = a_model(tmp_path, "audio", "whispercpp")

    async def work() -> None:
        engine, record = await launch(tmp_path, model)
        other, elsewhere = await launch(tmp_path / "other", replace(model, file=model.file))
        records = EngineRecords(tmp_path / "engines")
        try:
            adopted = await records.adopt(record)
            assert adopted is not None
            assert adopted.recipe.name == "whispercpp"
            adopted.release()
            stranger = replace(record, port=elsewhere.port)
            assert await records.adopt(stranger) is None, "another engine listens there"
        finally:
            await engine.stop()
            await other.stop()

    (tmp_path / "other").mkdir()
    run(work())


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(exit_status=3), EngineExited),
        (Script(exit_status=-9, exit_loading=True, load_seconds=0.05), EngineExited),
        (Script(status=500), LoadFailed),
    ],
    ids=["exits", "killed", "refuses"],
)
def test_a_failed_load_of_any_recipe_is_told_by_type(
    run: Run, tmp_path: Path, script: Script, error: type[LoadFailed]
) -> None:
    """TRAPS 23: what went wrong is decided by exit status and files, never by words in a message."""
    model = a_model(tmp_path, "audio", "whispercpp")
    with pytest.raises(error) as failed:
        run(launch(tmp_path, model, replace(script, stderr="error: no such file, out of memory")))
    assert type(failed.value) is error
    Path(model.file.path).unlink()
    with pytest.raises(ModelFileMissing):
        run(launch(tmp_path, model, script))


def test_an_option_the_program_does_not_have_ends_it(run: Run, tmp_path: Path) -> None:
    """The stand-in is as strict as the real program: a wrong recipe would be seen here."""
    recipe = BUILTIN_RECIPES["sd-cpp"]
    wrong = replace(recipe, arguments=(*recipe.arguments, "--ctx-size", "1"))
    with pytest.raises(EngineExited, match="unknown argument: --ctx-size"):
        run(launch(tmp_path, a_model(tmp_path, "image", "sd-cpp"), recipe=wrong))


def test_two_at_once_are_both_answered(run: Run, tmp_path: Path) -> None:
    """A form is a request like any other."""
    first = first_request(BUILTIN_RECIPES["whispercpp"], "audio", "m")
    assert first is not None

    async def work() -> None:
        engine, _ = await launch(tmp_path, a_model(tmp_path, "audio", "whispercpp"))
        try:
            calls = [call_engine(engine.address, first.path, first.body, first.content_type) for _ in range(2)]
            assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
        finally:
            await engine.stop()

    run(work())
