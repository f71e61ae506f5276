"""``llamacpp_args``: options of llama.cpp that a person adds, split like a shell does; some are meshd's own.

llama.cpp takes ``_`` for ``-`` in long options, and every option under several names: all of them count.

Source: docs/spec/options.md; TRAPS 25.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from types import MappingProxyType

from shared.errors import ConfigError

_OWNED = {
    "meshd says which model the engine runs": """
        -m --model -mu --model-url -hf -hfr --hf-repo -hff --hf-file -hft --hf-token -dr --docker-repo
        --models-dir --models-preset --models-max --models-autoload --no-models-autoload
        --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default
        --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default
        --vision-gemma-4b-default --vision-gemma-12b-default
    """,
    "it would fetch files behind meshd's back": """
        -hfd -hfrd --hf-repo-draft --spec-draft-hf -mmu --mmproj-url
    """,
    "meshd chooses where the engine listens": "--host --port --reuse-port --api-prefix",
    "meshd makes the engine's key": "--api-key --api-key-file --ssl-key-file --ssl-cert-file",
    "it has a setting of its own, ctx_size": "-c --ctx-size",
    "it has a setting of its own, parallel": "-np --parallel",
    "meshd names the model": "-a --alias",
    "only tunnels of the mesh may reach other machines' memory": "--rpc",
    "it would open the engine to more than inference": """
        --path --media-path --tools --tools-runtime --agent -ag --no-agent -no-ag --mcp-servers-config
        --mcp-servers-json --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy
    """,
    "meshd keeps the engine's log": "--log-file --log-disable --log-prompts-dir",
    "meshd unloads idle models itself": "--sleep-idle-seconds",
    "the engine would say something and end": """
        -h --help --usage --version --list-devices -cl --cache-list --completion-bash
    """,
}
OWNED_FLAGS = MappingProxyType({flag: why for why, flags in _OWNED.items() for flag in flags.split()})
"""Options that may not be given, with the reason."""


def split_args(text: str, *, source: str) -> tuple[str, ...]:
    """One line to arguments, with a shell's quotes and nothing else of it. Raises: ConfigError naming ``source``."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        why = "a quotation mark is not closed" if "quotation" in str(error) else "it ends with a backslash"
        raise ConfigError(f"{source} = {text!r}: {why}") from None


def refusal(arguments: Sequence[str]) -> str:
    """Why these arguments cannot be used, or empty."""
    owned = {argument: why for argument in arguments if (why := OWNED_FLAGS.get(flag_of(argument)))}
    if owned:
        words = "; ".join(f"{argument}: {why}" for argument, why in owned.items())
        return f"not to be given to llama.cpp by hand: {words}"
    if any("\0" in argument for argument in arguments):
        return "an argument for llama.cpp has a NUL character in it"
    return ""


def flag_of(argument: str) -> str:
    """The option as llama.cpp looks it up: without ``=value``, long ones with ``-`` for ``_``."""
    flag = argument.partition("=")[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag
