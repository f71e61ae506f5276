"""``logs``: the daemons' log files, which are readable with the node up or down, and the engines' logs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from services.meshctl.elsewhere import NotOnAnotherNode, ask_node, on_node, other_node
from services.meshctl.node import Node
from services.meshctl.output import clean
from shared.errors import MeshError
from shared.ids import DAEMONS, ModelName, PeerId

NAMES = (*DAEMONS, "keeper", "supervisord")
BLOCK_BYTES = 64 * 1024
POLL_SECONDS = 0.2


class NoLog(MeshError):
    code = "no_log"


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]... | engine MODEL")
@click.option("--follow", "-f", is_flag=True, help="Keep printing what is added.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Lines to begin with.")
@on_node
def logs(names: tuple[str, ...], follow: bool, lines: int, where: str | None) -> None:
    """Print logs: of the daemons named, or of all, oldest line first.

    Also 'keeper' and 'supervisord', and 'engine MODEL' for the log of a model's newest engine. Of another node (--node)
    the daemons' newest lines.
    """
    node = Node()
    peer_id = other_node(node, where)
    if peer_id is not None:
        _of_another(node, peer_id, names, follow, lines)
        return
    if names and names[0] == "engine":
        if len(names) != 2:
            raise click.UsageError("give one model: meshctl logs engine MODEL")
        files = [_engine_log(node, names[1], lines)]
    else:
        for name in names:
            if name not in NAMES:
                raise click.UsageError(f"no such log {name!r}; there are {', '.join(NAMES)}, and 'engine MODEL'")
        files = [_Tail(name, node.log_folder / f"{name}.log") for name in dict.fromkeys(names or DAEMONS)]
        if not any(file.path.exists() for file in files):
            raise NoLog(f"there is no log in {node.log_folder} yet; start the node with 'meshctl up'")
    many = len(files) > 1
    first = merged([(file.name, file.last(lines)) for file in files])
    for name, line in first[-lines:] if lines else []:
        _echo(line, name if many else "")
    while follow:
        for name, line in merged([(file.name, list(file.new())) for file in files]):
            _echo(line, name if many else "")
        sys.stdout.flush()
        time.sleep(POLL_SECONDS)


def _of_another(node: Node, peer_id: PeerId, names: tuple[str, ...], follow: bool, lines: int) -> None:
    """Raises: NotOnAnotherNode, RequestRefused with the other node's words."""
    if follow or any(name not in DAEMONS for name in names):
        what = "--follow" if follow else next(name for name in names if name not in DAEMONS)
        raise NotOnAnotherNode(
            f"{what} is for this node; another node shows the newest lines of {', '.join(DAEMONS)}. "
            "Run 'meshctl logs' on that machine for the rest"
        )
    wanted = list(dict.fromkeys(names or DAEMONS))
    found = [(name, list(ask_node(node, peer_id, "logs", name, lines=lines))) for name in wanted]
    for name, line in merged(found)[-lines:] if lines else []:
        _echo(line, name if len(wanted) > 1 else "")


def merged(files: list[tuple[str, list[str]]]) -> list[tuple[str, str]]:
    """(name, line) in order of time. A line without a time stamp stays with the one before it, the bare
    ``NAME ready`` with the one after it."""
    found = []
    for name, lines in files:
        stamps: list[str] = []
        for line in lines:
            stamped = line[:4].isdigit() and line[10:11] == "T"
            stamps.append(line[:24] if stamped else stamps[-1] if stamps else "")
            if stamped and len(stamps) > 1 and lines[len(stamps) - 2] == f"{name} ready":
                stamps[-2] = line[:24]
        found += [(stamp, name, at, line) for at, (stamp, line) in enumerate(zip(stamps, lines, strict=True))]
    return [(name, line) for _, name, _, line in sorted(found)]


def _echo(line: str, name: str) -> None:
    click.echo(f"{name:9} {clean(line)}" if name else clean(line))


def _engine_log(node: Node, model: str, lines: int) -> _Tail:
    """Raises: RequestRefused when launcherd knows no such engine."""
    from shared.messages.models import EngineLog, GetEngineLog

    reply = node.ask("launcherd", GetEngineLog(model=ModelName(model), lines=max(1, lines)))
    if not isinstance(reply, EngineLog):
        raise NoLog(f"launcherd sent {type(reply).__name__} instead of the log; see 'meshctl version'")
    return _Tail("engine", Path(reply.path), given=list(reply.lines))


@dataclass
class _Tail:
    """One log file, followed through rotation."""

    name: str
    path: Path
    given: list[str] | None = None
    """Its last lines, where somebody has read them already."""
    _position: int = 0
    _inode: int = 0
    _partial: bytes = field(default=b"")

    def last(self, count: int) -> list[str]:
        """The last ``count`` lines; afterwards :meth:`new` begins behind them."""
        try:
            with open(self.path, "rb") as file:
                end = self._position = file.seek(0, os.SEEK_END)
                self._inode = os.fstat(file.fileno()).st_ino
                data = b""
                while end > 0 and data.count(b"\n") <= count:
                    step = min(BLOCK_BYTES, end)
                    end -= step
                    file.seek(end)
                    data = file.read(step) + data
        except OSError:
            return list(self.given or [])[-count:] if count else []
        found = data.decode(errors="replace").splitlines()
        return found[-count:] if count else []

    def new(self) -> Iterator[str]:
        """Whole lines added since the last call."""
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._position:
                    self._inode, self._position, self._partial = stat.st_ino, 0, b""
                file.seek(self._position)
                data = self._partial + file.read()
                self._position = file.tell()
        except OSError:
            return
        whole, _, self._partial = data.rpartition(b"\n")
        if whole:
            yield from whole.decode(errors="replace").split("\n")
