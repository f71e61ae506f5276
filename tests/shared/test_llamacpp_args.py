"""What a person may hand to llama.cpp. Rules quoted from docs/spec/options.md."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.llamacpp_args import OWNED_FLAGS, flag_of, refusal, split_args

ALIASES = """
-m --model|-mu --model-url|-dr --docker-repo|-hf -hfr --hf-repo|-hff --hf-file|-hft --hf-token|--host|--port
--reuse-port|--api-prefix|--api-key|--api-key-file|--ssl-key-file|--ssl-cert-file|-c --ctx-size|-np --parallel
-a --alias|--rpc|--path|--media-path|--tools|--tools-runtime|--mcp-servers-config|--mcp-servers-json
-ag --agent -no-ag --no-agent|--models-dir
--ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy|--models-preset|--log-file
--log-disable|-h --help --usage|--version|-cl --cache-list|--list-devices|-mmu --mmproj-url
--spec-draft-hf -hfd -hfrd --hf-repo-draft
"""
"""Options of llama-server (its --help, build 1 of llama-cpp-python 0.3.36) that meshd owns, with all their names."""


def test_no_name_of_an_owned_option_slips_through() -> None:
    """7. Options that meshd owns are refused under every name llama.cpp has for them."""
    for group in ALIASES.replace("\n", "|").split("|"):
        for flag in group.split():
            assert refusal((flag, "x")), flag


@pytest.mark.parametrize(
    "argument", ["--api_key", "--api-key=k", "--api_key=k", "--ctx_size", "-m", "-m=x", "--no_agent", "--rpc=h:1"]
)
def test_spellings_that_llama_cpp_takes_for_the_same(argument: str) -> None:
    """8. `--flag=value` and `_` for `-` are seen through."""
    assert refusal(("--mlock", argument)).startswith(f"not to be given to llama.cpp by hand: {argument}: ")


def test_the_refusal_lists_each_with_its_reason() -> None:
    """9. The refusal names every such option with its reason."""
    assert refusal(("--port", "1", "--mlock", "-c", "5")) == (
        "not to be given to llama.cpp by hand: --port: meshd chooses where the engine listens; "
        "-c: it has a setting of its own, ctx_size"
    )
    assert "NUL" in refusal(("a\0",))
    assert refusal(("--mlock", "-ngl", "5", "--chat-template", "a b", "--threads", "2")) == ""


def test_lines_are_split_as_a_shell_does() -> None:
    """6. `llamacpp_args` as text are split like a shell does: quotes and backslashes, nothing is expanded."""
    line = "--chat-template 'a b' --x=\"c d\" $HOME e\\ f # g"
    assert split_args(line, source="x") == ("--chat-template", "a b", "--x=c d", "$HOME", "e f", "#", "g")
    assert split_args("", source="x") == ()


@pytest.mark.parametrize(("line", "why"), [("--x 'a", "not closed"), ('"', "not closed"), ("a\\", "backslash")])
def test_a_line_that_a_shell_would_not_finish_is_an_error_with_its_place(line: str, why: str) -> None:
    """6. …what is not closed is an error that says so."""
    with pytest.raises(ConfigError) as refused:
        split_args(line, source="MESH_LLAMACPP_ARGS")
    assert refused.value.detail.startswith("MESH_LLAMACPP_ARGS = ")
    assert why in refused.value.detail


def test_flags_as_llama_cpp_looks_them_up() -> None:
    assert [flag_of(argument) for argument in ("--a_b=c_d", "-a_b", "x_y")] == ["--a-b", "-a_b", "x_y"]
    assert all(flag == flag_of(flag) for flag in OWNED_FLAGS)
