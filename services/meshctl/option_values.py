"""Values of options that click cannot check by itself: refused as wrong usage, before anything is done."""

from __future__ import annotations

import click

from shared.config import parse_limits
from shared.errors import ConfigError
from shared.llamacpp_args import refusal, split_args


def checked_limits(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    try:
        if text is not None:
            parse_limits(text, source="--max-loaded-models")
    except ConfigError as error:
        raise click.BadParameter(error.detail) from None
    return text


def checked_args(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    try:
        why = "" if text is None else refusal(split_args(text, source="--llamacpp-args"))
    except ConfigError as error:
        raise click.BadParameter(error.detail) from None
    if why:
        raise click.BadParameter(why)
    return text
