"""From model and options to argv and environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.launcherd.command_line import (
    Engine,
    EngineCommand,
    EngineOptions,
    build_command,
    default_context_tokens,
    fingerprint,
    resolve_options,
)
from services.launcherd.model_info import ModelFile
from shared.errors import OptionRefused
from shared.messages.models import ModelType
from shared.recipes import BUILTIN_RECIPES

ENGINE = Engine(kind="llama-server", program=("/opt/llama-server",), version="1")
MODEL = ModelFile(
    name="some-model",
    type="llm",
    path="/models/some-model.gguf",
    parts=("/models/some-model.gguf",),
    architecture="llama",
    trained_context_tokens=131_072,
    parameters=1,
    file_size_bytes=1,
    kv_bytes_per_token=1,
    compute_bytes=1,
    quantization="F32",
    chat_template=True,
)
EMBEDDING = replace(MODEL, type="embedding", trained_context_tokens=512)
RERANKING = replace(EMBEDDING, type="reranking")


def command(
    model: ModelFile = MODEL,
    options: EngineOptions | None = None,
    engine: Engine = ENGINE,
    environ: dict[str, str] | None = None,
) -> EngineCommand:
    resolved = resolve_options(options or EngineOptions(), model, cores=8)
    return build_command(
        engine, model, resolved, port=4321, api_key="secret", environ=environ or {}, mark="/state/engines/a.json"
    )


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_an_llm_is_served_on_loopback_with_its_resolved_options() -> None:
    argv = command().argv
    assert argv[0] == "/opt/llama-server"
    assert flag(argv, "--model") == "/models/some-model.gguf"
    assert (flag(argv, "--host"), flag(argv, "--port")) == ("127.0.0.1", "4321")
    assert (flag(argv, "--ctx-size"), flag(argv, "--parallel")) == ("16384", "4")
    assert (flag(argv, "--threads"), flag(argv, "--threads-batch")) == ("7", "7")
    assert flag(argv, "--alias") == "some-model"
    assert flag(argv, "--cache-ram") == "0"
    assert "--n-gpu-layers" not in argv
    assert not {"--embeddings", "--reranking", "--pooling"} & set(argv)


def test_the_key_is_in_the_environment_only() -> None:
    """TRAPS 6: a daemon's arguments show no secret; an engine's neither."""
    built = command()
    assert "secret" not in " ".join(built.argv)
    assert built.env["LLAMA_API_KEY"] == "secret"
    assert built.env["MESHD_ENGINE"] == "/state/engines/a.json"


def test_the_environment_cannot_configure_the_engine_and_keeps_what_it_needs() -> None:
    built = command(
        environ={
            "PATH": "/bin",
            "CUDA_VISIBLE_DEVICES": "1",
            "LLAMA_ARG_HOST": "0.0.0.0",
            "LLAMA_API_KEY": "other",
            "MESH_HOME": "/x",
            "HF_TOKEN": "t",
            "SUPERVISOR_SERVER_URL": "unix://",
        }
    )
    assert set(built.env) == {"PATH", "CUDA_VISIBLE_DEVICES", "LLAMA_API_KEY", "MESHD_ENGINE"}
    assert built.env["LLAMA_API_KEY"] == "secret"


def test_embedding_and_reranking_models_get_their_flags_and_whole_inputs() -> None:
    """DESIGN §7: the type chooses engine flags."""
    embedding = command(EMBEDDING, EngineOptions(pooling="cls")).argv
    assert "--embeddings" in embedding
    assert flag(embedding, "--pooling") == "cls"
    assert flag(embedding, "--ctx-size") == "2048"
    assert (flag(embedding, "--batch-size"), flag(embedding, "--ubatch-size")) == ("512", "512")
    reranking = command(RERANKING, EngineOptions(pooling="cls")).argv
    assert "--reranking" in reranking
    assert not {"--embeddings", "--pooling", "--jinja"} & set(reranking)
    assert "--pooling" not in command(EMBEDDING).argv


def test_given_options_win_over_defaults_and_extra_arguments_come_last() -> None:
    options = EngineOptions(
        context_tokens=100, parallel=1, threads=3, gpu_layers=0, cache_ram_mib=256, extra_args=("--mlock",)
    )
    argv = command(options=options).argv
    assert (flag(argv, "--ctx-size"), flag(argv, "--threads"), flag(argv, "--n-gpu-layers")) == ("100", "3", "0")
    assert flag(argv, "--cache-ram") == "256"
    assert argv[-1] == "--mlock"


def test_flags_that_a_build_does_not_have_are_left_out() -> None:
    old = replace(ENGINE, flags=frozenset({"--port", "--no-webui"}))
    argv = command(engine=old).argv
    assert "--no-webui" in argv
    assert not {"--cache-ram", "--slots", "--metrics", "--alias", "--jinja"} & set(argv)
    new = replace(ENGINE, flags=frozenset({"--port", "--no-ui"}))
    assert "--no-ui" in command(engine=new).argv


@pytest.mark.parametrize(
    ("model", "parallel", "expected"),
    [
        (MODEL, 4, 16_384),
        (MODEL, 1, 16_384),
        (replace(MODEL, trained_context_tokens=2048), 4, 8192),
        (replace(MODEL, trained_context_tokens=0), 4, 16_384),
        (EMBEDDING, 4, 2048),
        (replace(RERANKING, trained_context_tokens=40_000), 2, 16_384),
    ],
)
def test_default_context(model: ModelFile, parallel: int, expected: int) -> None:
    assert default_context_tokens(model, parallel) == expected


@pytest.mark.parametrize(
    "extra",
    ["--host", "--port", "--api-key", "-m", "--model=/etc/passwd", "--ctx-size", "--rpc", "--tools", "--log-file"],
)
def test_options_that_are_ours_cannot_be_given(extra: str) -> None:
    """TRAPS 25: what may reach an engine's command line is limited."""
    with pytest.raises(OptionRefused):
        resolve_options(EngineOptions(extra_args=("--mlock", extra, "x")), MODEL, cores=2)


@pytest.mark.parametrize(
    "options", [EngineOptions(parallel=0), EngineOptions(context_tokens=-1), EngineOptions(extra_args=("a\0b",))]
)
def test_meaningless_options_are_refused(options: EngineOptions) -> None:
    with pytest.raises(OptionRefused):
        resolve_options(options, MODEL, cores=2)


def test_a_name_with_a_comma_is_one_alias() -> None:
    assert flag(command(replace(MODEL, name="a,b")).argv, "--alias") == "a_b"


def test_one_core_still_gets_a_thread() -> None:
    assert resolve_options(EngineOptions(), MODEL, cores=1).threads == 1


def test_a_type_without_an_engine_is_refused() -> None:
    with pytest.raises(OptionRefused, match="audio"):
        command(replace(MODEL, type="audio"))


def test_the_fingerprint_tells_whether_a_reload_would_change_anything() -> None:
    """TRAPS 24: a load with equal resolved options keeps the engine."""
    options = resolve_options(EngineOptions(), MODEL, cores=8)
    same = resolve_options(EngineOptions(parallel=4, context_tokens=16_384, threads=7), MODEL, cores=8)
    known = fingerprint(ENGINE, MODEL, options)
    assert fingerprint(ENGINE, MODEL, same) == known
    changed = [
        fingerprint(ENGINE, MODEL, replace(options, parallel=2)),
        fingerprint(ENGINE, MODEL, replace(options, extra_args=("--mlock",))),
        fingerprint(ENGINE, replace(MODEL, file_size_bytes=2), options),
        fingerprint(replace(ENGINE, version="2"), MODEL, options),
    ]
    assert len({known, *changed}) == 5


def test_another_recipe_is_called_as_it_says() -> None:
    """docs/spec/recipes.md 8: llamacpp's command line is made by meshd, the others' is their `arguments`."""
    model = replace(MODEL, name="my-whisper", type="audio", path="/models/ggml-base.bin", trained_context_tokens=0)
    recipe = BUILTIN_RECIPES["whispercpp"]
    built = build_command(
        Engine(kind="whispercpp", program=("/opt/whisper-server",), version="1"),
        model,
        resolve_options(EngineOptions(recipe="whispercpp", parallel=1, threads=3, extra_args=("--mlock",)), model, 8),
        port=4321,
        api_key="secret",
        environ={"PATH": "/bin", "MESH_HOME": "/x"},
        mark="/state/engines/a.json",
        recipe=recipe,
    )
    assert built.argv == (
        "/opt/whisper-server", "--model", "/models/ggml-base.bin", "--host", "127.0.0.1", "--port", "4321",
        "--threads", "3", "--inference-path", "/v1/audio/transcriptions",
    )  # fmt: skip
    assert dict(built.env) == {"PATH": "/bin", "MESHD_ENGINE": "/state/engines/a.json"}
    assert built.first_request is not None
    assert b"RIFF" in built.first_request.body


def test_placeholders_by_type_and_checkpoint() -> None:
    """docs/spec/recipes.md 7: braces around the name of a placeholder are replaced, once."""
    recipe = BUILTIN_RECIPES["flm"]
    engine = Engine(kind="flm", program=("flm",), version="1")

    def argv(type: ModelType, checkpoint: str = "") -> tuple[str, ...]:
        model = replace(MODEL, name="{port}", type=type, trained_context_tokens=0)
        options = resolve_options(EngineOptions(recipe="flm", parallel=1, context_tokens=900), model, 2)
        given: dict[str, Any] = {"port": 1, "api_key": "k", "environ": {}, "mark": "m", "checkpoint": checkpoint}
        return build_command(engine, model, options, recipe=recipe, **given).argv

    end = ("--host", "127.0.0.1", "--port", "1", "--quiet")
    assert argv("llm", "gemma3:4b") == ("flm", "serve", "gemma3:4b", "--ctx-len", "900", *end)
    assert argv("llm") == ("flm", "serve", "{port}", "--ctx-len", "900", *end)
    assert argv("embedding") == ("flm", "serve", "--embed", "1", *end)
    assert argv("audio") == ("flm", "serve", "--asr", "1", *end)


def test_the_build_is_part_of_the_fingerprint() -> None:
    """docs/spec/options.md 4: equal resolved options, the build among them."""
    options = resolve_options(EngineOptions(backend="path"), MODEL, cores=8)
    assert fingerprint(ENGINE, MODEL, options) != fingerprint(ENGINE, MODEL, replace(options, backend="cpu"))


def test_a_projector_is_handed_to_builds_that_take_one() -> None:
    """docs/spec/recipes.md 16: `mmproj-NAME.gguf` beside a model is its projector."""
    options = resolve_options(EngineOptions(), MODEL, cores=8)
    given: dict[str, Any] = {"port": 1, "api_key": "k", "environ": {}, "mark": "m", "projector": "/m/mmproj-x.gguf"}
    assert flag(build_command(ENGINE, MODEL, options, **given).argv, "--mmproj") == "/m/mmproj-x.gguf"
    old = replace(ENGINE, flags=frozenset({"--port"}))
    assert "--mmproj" not in build_command(old, MODEL, options, **given).argv
    assert "--mmproj" not in command().argv
