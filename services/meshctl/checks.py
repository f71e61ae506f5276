"""One finding of ``doctor``, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import click

from services.meshctl.output import STATE_STYLES, clean
from shared.messages.tunnel import ProbeCheck

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``fix`` says what to do; empty when all is well."""

    name: str
    level: Level
    detail: str
    fix: str = ""


def show(check: Check | ProbeCheck) -> None:
    mark = click.style(f"{check.level:4}", fg=STATE_STYLES[check.level])
    click.echo(f"{mark}  {check.name:12} {clean(check.detail)}")
    if check.fix:
        click.echo(f"      {'':12} -> {clean(check.fix)}")
