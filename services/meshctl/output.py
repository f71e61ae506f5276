"""What every command prints the same way: JSON, errors, tables, ages, sizes. Names from elsewhere are made harmless."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from shared.words import size_words

if TYPE_CHECKING:
    from rich.console import Console


def fail(code: str, detail: str, *, as_json: bool) -> None:
    """Report a failure: one sentence on stderr, or ``{"error": {code, detail}}`` on stdout."""
    if as_json:
        print_json({"error": {"code": code, "detail": detail}})
    else:
        click.echo(f"meshctl: {clean(detail)}", err=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def progress(text: str) -> None:
    """A line for a person who waits; stderr, so that stdout stays what was asked for."""
    click.echo(clean(text), err=True)


QUIET_SECONDS = 1.5
"""Where lines can't be rewritten, a change is printed at most so often."""


class Waiting:
    """One line that is rewritten on a terminal; elsewhere a line per change, not too often."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._shown = ""
        self._key = ""
        self._next_at = 0.0

    def show(self, text: str, seconds: float) -> None:
        """``text`` is what is waited for; on a terminal the seconds are counted beside it."""
        text = clean(text)
        if self._tty:
            line = f"{text} {seconds:.0f} s"
            click.echo(f"\r\033[K{line[: _columns() - 1]}", err=True, nl=False)
            self._shown = line
        elif text != self._key and seconds >= self._next_at:
            click.echo(text, err=True)
            self._key, self._next_at = text, seconds + QUIET_SECONDS

    def show_progress(self, text: str, step: str, seconds: float) -> None:
        """As ``show`` on a terminal; elsewhere a line only when ``step`` is another one."""
        if self._tty:
            self.show(text, seconds)
        elif step != self._key:
            click.echo(clean(text), err=True)
            self._key = step

    def done(self) -> None:
        if self._tty and self._shown:
            click.echo("\r\033[K", err=True, nl=False)
            self._shown = ""


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def clean(text: str) -> str:
    """``text`` without control characters: names and reasons from files and peers reach this terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def age(seconds: float | None) -> str:
    """``42s``, ``3m``, ``5h``, ``2d``; empty when unknown."""
    if seconds is None:
        return ""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // unit:.0f}{name}"
    return f"{seconds // 86_400:.0f}d"


def size(size_bytes: int) -> str:
    """In words; empty for 0, which is unknown."""
    return size_words(size_bytes) if size_bytes > 0 else ""


def console(*, error: bool = False) -> Console:
    """A terminal without markup: a model called ``[red]`` is shown as that."""
    from rich.console import Console

    return Console(stderr=error, markup=False, highlight=False, emoji=False, soft_wrap=False)


STATE_STYLES = {
    "ready": "green",
    "running": "green",
    "alive": "green",
    "ok": "green",
    "loading": "yellow",
    "starting": "yellow",
    "warn": "yellow",
    "idle": "yellow",
    "waiting": "yellow",
    "degraded": "yellow",
    "suspect": "yellow",
    "needs_capacity": "yellow",
    "backoff": "red",
    "fatal": "red",
    "silent": "red",
    "failed": "red",
    "fail": "red",
    "down": "red",
    "dead": "red",
}


NARROW_COLUMNS = 72


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, state_column: int | None = None, width: int | None = None
) -> Any:
    """A rich table without lines. The last column is for sentences: it folds, or on a narrow terminal gets a line of
    its own. ``width`` defaults to the terminal's."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    narrow = (width or _columns()) < NARROW_COLUMNS and len(headers) > 2
    sentences = [row[-1] for row in rows]
    if narrow:
        headers, rows = headers[:-1], [row[:-1] for row in rows]

    def part(rows: Sequence[Sequence[str]], widths: list[int] | None) -> Any:
        shown = Table(
            box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=not widths
        )
        for at, header in enumerate(headers):
            fold = at == len(headers) - 1 or header == "MODEL"
            shown.add_column(header, overflow="fold", no_wrap=not fold, min_width=widths[at] if widths else None)
        for row in rows:
            cells = [Text(clean(cell)) for cell in row]
            if state_column is not None:
                cells[state_column].stylize(STATE_STYLES.get(row[state_column].partition(",")[0], ""))
            shown.add_row(*cells)
        return shown

    if not narrow:
        return part(rows, None)
    widths = [max(len(row[at]) for row in [headers, *rows]) for at in range(len(headers))]
    parts: list[Any] = [Text("  ".join(header.ljust(width) for header, width in zip(headers, widths, strict=True)))]
    for row, sentence in zip(rows, sentences, strict=True):
        parts.append(part([row], widths))
        if sentence:
            parts.append(Padding(Text(clean(sentence), style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def short_id(peer_id: str) -> str:
    """``12D3KooW…6xK2``: enough to tell nodes apart."""
    return peer_id if len(peer_id) <= 14 else f"{peer_id[:8]}…{peer_id[-4:]}"
