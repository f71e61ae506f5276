"""``pin`` and ``unpin``: keep a model loaded when others want its place."""

from __future__ import annotations

import click

from services.meshctl.completion import complete_model
from services.meshctl.node import Node
from services.meshctl.output import clean, print_json
from shared.ids import ModelName
from shared.messages.daemon import Done
from shared.messages.models import PinModel


@click.command()
@click.argument("model", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def pin(model: str, as_json: bool) -> None:
    """Keep MODEL loaded: it makes no room for other models and is not unloaded when idle.

    It holds until 'meshctl unpin', over restarts. 'meshctl unload' still unloads it, and a failed load of another model
    may, since then everything goes.
    """
    _pin(model, True, as_json)


@click.command()
@click.argument("model", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def unpin(model: str, as_json: bool) -> None:
    """Let MODEL make room for others again."""
    _pin(model, False, as_json)


def _pin(model: str, pinned: bool, as_json: bool) -> None:
    node = Node()
    node.running()
    reply = node.ask("launcherd", PinModel(model=ModelName(model), pinned=pinned))
    detail = reply.detail if isinstance(reply, Done) else ""
    if as_json:
        print_json({"model": model, "pinned": pinned, "detail": detail})
    else:
        click.echo(clean(detail))
