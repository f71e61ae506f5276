"""``models``: what is on disk and in the mesh, and deleting what meshd downloaded."""

from __future__ import annotations

import dataclasses
import os
import shlex
from typing import TYPE_CHECKING

import click

from services.meshctl.completion import complete_model
from services.meshctl.node import Node
from services.meshctl.output import age, clean, console, print_json, size, table
from services.meshctl.pull import can_be_pulled, registered_model, registry
from shared.errors import MeshError
from shared.ids import ModelName
from shared.messages.daemon import Done, ExplainSubject, Explanation
from shared.messages.downloads import DeleteModel, RegisteredModel
from shared.messages.models import RescanModels

if TYPE_CHECKING:
    from shared.node_status import ModelStatus, NodeStatus

UNLOAD_SECONDS = 600.0
"""Requests that are running finish first."""


class ModelNotFound(MeshError):
    code = "model_not_found"


@click.group(invoke_without_command=True)
@click.pass_context
def models(ctx: click.Context) -> None:
    """List, show and delete models. Alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_models, rescan=False, everything=False, as_json=False)


@models.command("list")
@click.option("--rescan", is_flag=True, help="Read the models folders again first.")
@click.option("--all", "everything", is_flag=True, help="Also what can be pulled: the catalog and what you registered.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(rescan: bool, everything: bool, as_json: bool) -> None:
    """List every model of the mesh, and the files of this node that could not be used, with the reason."""
    node = Node()
    node.running()
    if rescan:
        node.ask("launcherd", RescanModels(), deadline_seconds=300.0)
    view = node.status()
    known = registry(node) if everything else ()
    if as_json:
        print_json(
            {
                "models": [dataclasses.asdict(model) for model in view.models],
                "skipped": [dataclasses.asdict(item) for item in view.skipped],
                "scanning": view.node.scanning,
                **({"registry": [dataclasses.asdict(model) for model in known]} if everything else {}),
            }
        )
        return
    if view.models:
        rows = [
            (model.name, model.type, size(model.size_bytes), size(model.need_bytes), model.status, model.reason)
            for model in view.models
        ]
        console().print(table(["MODEL", "TYPE", "FILE", "NEEDS", "STATUS", "REASON"], rows, state_column=4))
    else:
        click.echo("No model is known yet" + ("; the folders are being read." if view.node.scanning else "."))
    for item in view.skipped:
        click.echo(f"skipped  {clean(_short(item.path))}: {clean(item.reason)}")
    if everything:
        offers = [(item.name, item.type, size(item.size_bytes), _whose(item), item.checkpoint) for item in known]
        click.echo("\nWhat 'meshctl pull NAME' gets:")
        console().print(table(["MODEL", "TYPE", "FILE", "STATUS", "FROM"], offers))
    elif not any(not model.builtin for model in view.models):
        folders = ", ".join(node.config.models.folders)
        click.echo(
            f"Next: 'meshctl pull NAME' ('meshctl models list --all' shows names), put .gguf files into {folders}, or "
            "'meshctl up --models-dir FOLDER'"
        )


def _whose(model: RegisteredModel) -> str:
    return ("on this node" if model.downloaded else "not here") + (", yours" if model.user else "")


def _short(path: str) -> str:
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path


@models.command()
@click.argument("model", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(model: str, as_json: bool) -> None:
    """Show all that is known about MODEL."""
    node = Node()
    node.running()
    view, known = node.status(), registered_model(node, model)
    if known is not None and not any(found.name == model for found in view.models):
        _show_registered(known, as_json)
        return
    found = find_model(view, model)
    said = node.ask_all(ExplainSubject(subject=found.name), ("electiond", "launcherd"))
    sentences = [text for reply in said.values() if isinstance(reply, Explanation) for text in reply.sentences]
    if as_json:
        origin = dataclasses.asdict(known) if known is not None else None
        print_json({**dataclasses.asdict(found), "why": sentences, "registry": origin})
        return
    click.echo(clean(f"{found.name}  {found.status}  {found.reason}"))
    for label, value in (*_facts(found), *(_origin(known) if known else ())):
        if value:
            click.echo(clean(f"  {label:12}{value}"))
    for sentence in sentences:
        click.echo(clean(f"  {sentence}"))


def _show_registered(model: RegisteredModel, as_json: bool) -> None:
    """Known, and not on any node."""
    if as_json:
        print_json(dataclasses.asdict(model))
        return
    click.echo(clean(f"{model.name}  {_whose(model)}"))
    for label, value in (("type", model.type), *_origin(model)):
        if value:
            click.echo(clean(f"  {label:12}{value}"))
    click.echo(f"Next: meshctl pull {clean(shlex.quote(model.name))}")


def _origin(model: RegisteredModel) -> list[tuple[str, str]]:
    return [("from", model.checkpoint), ("recipe", model.recipe), ("labels", ", ".join(model.labels))]


def _facts(model: ModelStatus) -> list[tuple[str, str]]:
    here = model.here
    return [
        ("type", model.type + (" (ships with meshd)" if model.builtin else "")),
        ("file", f"{_short(model.path)}  {size(model.size_bytes)}" if model.path else size(model.size_bytes)),
        ("made of", f"{model.architecture} {model.quantization} {_millions(model.parameters)}".strip()),
        ("needs", size(model.need_bytes)),
        ("context", f"{model.context_tokens:,} tokens" if model.context_tokens else ""),
        ("hosts", ", ".join(model.hosts)),
        ("on disk", f"{model.nodes_on_disk} node{'s' if model.nodes_on_disk != 1 else ''}"),
        (
            "here",
            f"{here.state} for {age(here.state_age_seconds)}: pid {here.pid}, port {here.port}, "
            f"{here.busy}/{here.parallel} busy, {here.waiting} waiting, {here.requests_total} requests, "
            f"{here.restarts} restarts"
            if here
            else "",
        ),
        ("log", here.log_path if here else ""),
    ]


def _millions(parameters: int) -> str:
    if parameters >= 10**9:
        return f"{parameters / 1e9:.1f}B parameters"
    return f"{parameters / 1e6:.1f}M parameters" if parameters else ""


def find_model(view: NodeStatus, name: str) -> ModelStatus:
    """Raises: ModelNotFound with the nearest name."""
    found = next((model for model in view.models if model.name == name), None)
    if found is not None:
        return found
    import difflib

    close = difflib.get_close_matches(name, [model.name for model in view.models], n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else "'meshctl models list --all' shows what there is"
    raise ModelNotFound(f"no model {name!r} is known here; {hint}")


@models.command()
@click.argument("model", shell_complete=complete_model)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rm(model: str, yes: bool, as_json: bool) -> None:
    """Delete the files of MODEL, if meshd downloaded them, and forget what you registered.

    It is unloaded first; requests that are running finish. Files that you put into a models folder yourself are never
    deleted.
    """
    node = Node()
    node.running()
    found = next((known for known in node.status().models if known.name == model and known.on_disk_here), None)
    if not yes:
        begun = (node.paths.downloads / ".partial" / model).exists()
        if found is None and not begun and not can_be_pulled(node, model):
            find_model(node.status(), model)
        what = f"{model}, {size(found.size_bytes)}" if found is not None and found.size_bytes else model
        click.confirm(f"Delete {clean(what)}?", abort=True)
    reply = node.ask("launcherd", DeleteModel(model=ModelName(model)), deadline_seconds=UNLOAD_SECONDS)
    detail = reply.detail if isinstance(reply, Done) else ""
    if as_json:
        print_json({"model": model, "detail": detail})
    else:
        click.echo(clean(detail))
