"""The command lines and routes of the engines besides llama-server, as far as a stand-in needs them.

Source: the programs' own help: whisper.cpp's whisper-server, stable-diffusion.cpp's sd-server, FastFlowLM's flm,
ryzenai-server.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of the engines besides llama-server. `options` is what it takes, `health` the route that says it is ready."""

    options: str
    health: str
    inference: frozenset[str]
    switches: str = ""
    names: str = ""
    """`short=long` of options that matter here."""


PROGRAMS = {
    "whisper-server": Program(
        options="-t --threads -p --processors -m --model -l --language --host --port --inference-path --request-path",
        switches="-nt --no-timestamps --convert -nf --no-fallback -ng --no-gpu",
        health="/health",
        inference=frozenset({"/inference"}),
        names="-m=--model",
    ),
    "sd-server": Program(
        options="-l --listen-ip --listen-port -m --model --diffusion-model --vae -t --threads",
        switches="-v --verbose --color",
        health="/v1/models",
        inference=frozenset({"/v1/images/generations", "/v1/images/edits"}),
        names="-l=--listen-ip -m=--model --listen-port=--port --listen-ip=--host",
    ),
    "flm": Program(
        options="-c --ctx-len --host -p --port --asr --embed --cors --socket --q-len",
        switches="-q --quiet",
        health="/api/tags",
        inference=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/audio/transcriptions"}),
        names="-p=--port",
    ),
    "ryzenai-server": Program(
        options="-m --model --host -p --port -c --ctx-size -t --threads",
        switches="-v --verbose",
        health="/health",
        inference=frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"}),
        names="-m=--model -p=--port",
    ),
}


def strict_options(program: Program, argv: list[str]) -> dict[str, str]:
    """As the real program: an option that it does not know ends it."""
    known, switches = program.options.split(), program.switches.split()
    names = dict(pair.split("=") for pair in program.names.split())
    options, rest, line = {}, list(argv), []
    while rest:
        argument = rest.pop(0)
        if argument in switches:
            continue
        if argument in known and rest:
            options[names.get(argument, argument)] = rest.pop(0)
        elif argument.startswith("-"):
            sys.exit(f"error: unknown argument: {argument}")
        else:
            line.append(argument)
    wanted = ["serve", *line[1:2]] if program is PROGRAMS["flm"] else []
    if line != wanted:
        sys.exit(f"error: unexpected {line}")
    return {**options, "flm tag": "".join(wanted[1:])}
