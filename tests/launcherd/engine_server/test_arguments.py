"""The embedded engine understands llama-server's command line."""

from __future__ import annotations

import pytest
import xllamacpp

from services.launcherd.command_line import EngineOptions, build_command, resolve_options
from services.launcherd.engine_server.arguments import (
    EnumName,
    Setting,
    UsageError,
    known_flags,
    parse_arguments,
)
from services.launcherd.io.engine_binary import embedded_engine
from services.launcherd.model_info import ModelFile
from shared.llamacpp_args import OWNED_FLAGS


def settings(*argv: str, **environ: str) -> dict[str, Setting]:
    return dict(parse_arguments(("-m", "x.gguf", *argv), environ).settings)


def test_short_and_long_flags_mean_the_same() -> None:
    short = settings("-c", "100", "-np", "2", "-t", "3", "-b", "64", "-ub", "32", "-ngl", "9", "-a", "n")
    long = settings(
        "--ctx-size", "100", "--parallel", "2", "--threads", "3", "--batch-size", "64", "--ubatch-size", "32",
        "--gpu-layers", "9", "--alias", "n",
    )  # fmt: skip
    assert short == long
    assert short["n_ctx"] == 100
    assert short["n_gpu_layers"] == 9


def test_the_key_comes_from_the_environment_and_from_the_flag() -> None:
    assert settings(LLAMA_API_KEY="a,b")["api_keys"] == ("a", "b")
    assert settings("--api-key", "c", LLAMA_API_KEY="a")["api_keys"] == ("a", "c")
    assert "api_keys" not in settings()


def test_automatic_parallel_is_four_with_a_shared_cache_as_in_llama_server() -> None:
    assert (settings()["n_parallel"], settings()["kv_unified"]) == (4, True)
    assert "kv_unified" not in settings("-np", "4")
    assert settings("--no-kv-unified")["kv_unified"] is False


def test_reranking_means_embedding_with_rank_pooling() -> None:
    found = settings("--reranking")
    assert found["embedding"] is True
    assert found["pooling_type"] == EnumName("llama_pooling_type", "LLAMA_POOLING_TYPE_RANK")


@pytest.mark.parametrize(
    ("argv", "member"),
    [
        (("-fa",), "LLAMA_FLASH_ATTN_TYPE_ENABLED"),
        (("-fa", "off"), "LLAMA_FLASH_ATTN_TYPE_DISABLED"),
        (("--flash-attn", "auto"), "LLAMA_FLASH_ATTN_TYPE_AUTO"),
        (("-fa", "--jinja"), "LLAMA_FLASH_ATTN_TYPE_ENABLED"),
    ],
)
def test_flash_attention_with_and_without_a_value(argv: tuple[str, ...], member: str) -> None:
    assert settings(*argv)["flash_attn_type"] == EnumName("llama_flash_attn_type", member)


def test_a_value_may_look_like_a_flag() -> None:
    assert settings("--alias", "--help")["model_alias"] == "--help"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--no-such-flag",), "unknown argument: --no-such-flag"),
        (("--ctx-size=5",), "unknown argument"),
        (("stray",), "unknown argument: stray"),
        (("-c",), "-c needs a value"),
        (("-c", "many"), "whole number"),
        (("--top-p", "x"), "takes a number"),
        (("--pooling", "best"), "one of none, mean"),
        (("-ngl", "some"), "whole number"),
    ],
)
def test_what_is_not_understood_is_an_error(argv: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        settings(*argv)


def test_a_model_is_required() -> None:
    with pytest.raises(UsageError, match="-m FILE"):
        parse_arguments((), {})


def test_help_and_version_need_no_model() -> None:
    assert parse_arguments(("--help", "--nonsense"), {}).action == "help"
    assert parse_arguments(("--version",), {}).action == "version"


def test_the_command_line_builder_uses_only_flags_the_embedded_engine_knows() -> None:
    for kind in ("llm", "embedding", "reranking"):
        model = ModelFile(
            name="n", type=kind, path="/x", parts=("/x",), architecture="a", trained_context_tokens=512, parameters=1,
            file_size_bytes=1, kv_bytes_per_token=1, compute_bytes=1, quantization="F32", chat_template=True,
        )  # fmt: skip
        options = resolve_options(EngineOptions(gpu_layers=0, pooling="mean"), model, cores=4)
        engine = embedded_engine()
        built = build_command(engine, model, options, port=1, api_key="k", environ={}, mark="m")
        parsed = parse_arguments(built.argv[len(engine.program) :], built.env)
        assert parsed.settings["api_keys"] == ("k",)


def test_every_setting_exists_in_the_installed_binding() -> None:
    params = xllamacpp.CommonParams()
    argv = ["-m", "x", "--api-key", "k", "-fa", "on", "-ngl", "auto"]
    for line in known_flags():
        name = line.split()[-1]
        if name in ("--api-key-file", "--chat-template-file", "--flash-attn", "--n-gpu-layers"):
            continue
        for value in ("1", "mean", "q8_0", "layer", None):
            try:
                parse_arguments(["-m", "x", name, *([value] if value else [])], {})
            except UsageError:
                continue
            argv += [name, *([value] if value else [])]
            break
        else:
            raise AssertionError(f"no value suits {name}")
    for name, setting in parse_arguments(argv, {}).settings.items():
        owner = params
        for step in name.split("."):
            owner = getattr(owner, step)
        if isinstance(setting, EnumName):
            getattr(getattr(xllamacpp, setting.enumeration), setting.member)


def test_an_owned_option_is_owned_under_every_name_of_the_embedded_engine() -> None:
    """docs/spec/options.md 7. Options that meshd owns are refused under every name llama.cpp has for them."""
    for line in known_flags():
        owned = {flag in OWNED_FLAGS for flag in line.split()}
        assert len(owned) == 1, line
