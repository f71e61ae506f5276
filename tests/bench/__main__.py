"""The command line of `bin/bench`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import click

from tests.bench import node, proxy, slots, tunnel
from tests.bench.children import BenchError
from tests.bench.figures import Figure, as_json, lines
from tests.bench.lineup import SYSTEMS

DESCRIPTIONS = {
    "proxy": "everything below that begins with proxy; about 4 minutes",
    "proxy.latency": "what each proxy adds to one request at a time, against a stand-in engine",
    "proxy.requests": "requests per second with 16 at a time",
    "proxy.streams": "32-token streams per second with 16 at a time, and stalls",
    "proxy.bodies": "bodies, fields and headers that arrive at the engine, compared with what was sent",
    "proxy.engine": "one token at a time, and 64 streams, with a real engine",
    "node": "everything below that begins with node; about a minute",
    "node.start": "from supervisord's start to the first answer",
    "node.idle": "memory and processor time of an idle node",
    "node.restart": "the longest wait of a request while proxyd restarts under load",
    "slots": "everything below that begins with slots; about a minute",
    "slots.wait": "how fast all else answers while a load waits behind a generation of 60 s",
    "tunnel": "everything below that begins with tunnel; about a minute",
    "tunnel.transports": "bulk and round trips between nodes, against plain TCP and TLS without us",
    "tunnel.chat": "what a second node adds to a chat",
}
BUSY_LOAD = 0.3
PARTS = {"proxy": proxy.PARTS, "node": node.PARTS, "slots": slots.PARTS, "tunnel": tunnel.PARTS}


def parts_of(names: Sequence[str]) -> dict[str, list[str]]:
    """The parts to run, by bench: `["proxy.latency"]` is `{"proxy": ["latency"]}`; no names are all.

    Raises: click.BadParameter for a name there is none of.
    """
    chosen: dict[str, list[str]] = {bench: [] for bench in PARTS}
    for name in names or tuple(PARTS):
        if name not in DESCRIPTIONS:
            raise click.BadParameter(f"no bench is called {name!r}; there are: {', '.join(DESCRIPTIONS)}")
        bench, _, part = name.partition(".")
        chosen[bench] += [part] if part else list(PARTS[bench])
    return {bench: [part for part in PARTS[bench] if part in parts] for bench, parts in chosen.items()}


def systems_of(text: str | None) -> list[str]:
    """The systems to compare, `direct` always among them. Raises: click.BadParameter."""
    names = [name.strip() for name in text.split(",")] if text else list(SYSTEMS)
    for name in names:
        if name not in SYSTEMS:
            raise click.BadParameter(f"no system is called {name!r}; there are: {', '.join(SYSTEMS)}")
    return [name for name in SYSTEMS if name == "direct" or name in names]


def machine() -> Figure:
    """How busy the machine was before the run: the load of the last minute per core."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] / cores
    why = "busy: trust ratios and differences, not rates" if load > BUSY_LOAD else ""
    return Figure(name="machine.load", unit="/core", value=load, why=f"{cores} cores; {why}".rstrip("; "))


def _say(text: str) -> None:
    """Progress, on standard error, over itself on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "want_json", is_flag=True, help="Print a JSON list instead of lines.")
@click.option("--systems", metavar="A,B", help=f"Compare only these: {', '.join(SYSTEMS)}.")
@click.option("--rounds", type=click.IntRange(1, 100), help="Rounds of every measurement: fewer are faster, noisier.")
def main(names: tuple[str, ...], want_json: bool, systems: str | None, rounds: int | None) -> None:
    """Measures this node's software, and the proxies people compare it with. Without a NAME: everything.

    `bin/bench list` names what there is. A missed target is a measurement, not a failure: the exit status is 0.
    Other proxies are installed into ~/.cache/meshd/bench at first use (MESHD_BENCH_CACHE moves it).
    """
    if names == ("list",):
        width = max(len(name) for name in DESCRIPTIONS)
        for name, description in DESCRIPTIONS.items():
            click.echo(f"{name:<{width}}  {description}")
        return
    parts, compared = parts_of(names), systems_of(systems)
    signal.signal(signal.SIGTERM, _on_terminate)
    figures: list[Figure] = [machine()]
    try:
        if parts["proxy"]:
            figures += proxy.run(proxy.Plan(parts=parts["proxy"], systems=compared, rounds=rounds), _say)
        if parts["node"]:
            figures += node.run(parts["node"], _say)
        if parts["slots"]:
            figures += slots.run(parts["slots"], _say)
        if parts["tunnel"]:
            figures += tunnel.run(parts["tunnel"], rounds, _say)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise click.ClickException("interrupted") from None
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    click.echo(as_json(figures) if want_json else "\n".join(lines(figures)))


if __name__ == "__main__":
    main(prog_name="bin/bench")
