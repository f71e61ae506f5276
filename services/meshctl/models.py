"""``models``: what is on disk and in the mesh, and deleting what meshd downloaded."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from services.meshctl.completion import complete_model
from services.meshctl.node import Node
from services.meshctl.output import age, clean, console, print_json, size, table
from shared.errors import MeshError
from shared.ids import ModelName
from shared.messages.daemon import ExplainSubject, Explanation
from shared.messages.models import InventoryChanged, RescanModels, UnloadModel

if TYPE_CHECKING:
    from shared.node_status import ModelStatus, NodeStatus

UNLOAD_SECONDS = 600.0
"""Requests that are running finish first."""


class ModelNotFound(MeshError):
    code = "model_not_found"


class NotOurs(MeshError):
    """The files were not downloaded by meshd."""

    code = "not_ours"


@click.group(invoke_without_command=True)
@click.pass_context
def models(ctx: click.Context) -> None:
    """List, show and delete models. Alone it lists them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_models, rescan=False, as_json=False)


@models.command("list")
@click.option("--rescan", is_flag=True, help="Read the models folders again first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(rescan: bool, as_json: bool) -> None:
    """List every model of the mesh, and the files of this node that could not be used, with the reason."""
    node = Node()
    node.running()
    if rescan:
        node.ask("launcherd", RescanModels(), deadline_seconds=300.0)
    view = node.status()
    if as_json:
        print_json(
            {
                "models": [dataclasses.asdict(model) for model in view.models],
                "skipped": [dataclasses.asdict(item) for item in view.skipped],
                "scanning": view.node.scanning,
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
    if not any(not model.builtin for model in view.models):
        folders = ", ".join(node.config.models.folders)
        click.echo(f"Next: put .gguf files into {folders}, or 'meshctl up --models-dir FOLDER'")


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
    found = find_model(node.status(), model)
    said = node.ask_all(ExplainSubject(subject=found.name), ("electiond", "launcherd"))
    sentences = [text for reply in said.values() if isinstance(reply, Explanation) for text in reply.sentences]
    if as_json:
        print_json({**dataclasses.asdict(found), "why": sentences})
        return
    click.echo(clean(f"{found.name}  {found.status}  {found.reason}"))
    for label, value in _facts(found):
        if value:
            click.echo(clean(f"  {label:12}{value}"))
    for sentence in sentences:
        click.echo(clean(f"  {sentence}"))


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
    hint = f"did you mean {close[0]}?" if close else "'meshctl models list' shows what there is"
    raise ModelNotFound(f"no model {name!r} is known here; {hint}")


@models.command()
@click.argument("model", shell_complete=complete_model)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rm(model: str, yes: bool, as_json: bool) -> None:
    """Delete the files of MODEL, if meshd downloaded them.

    Files that you put into a models folder yourself are never deleted.
    """
    node = Node()
    node.running()
    view = node.status()
    found = find_model(view, model)
    files = deletable(node, found)
    total = sum(path.stat().st_size for path in files)
    if not yes:
        click.confirm(
            f"Delete {len(files)} file{'s' if len(files) > 1 else ''}, {size(total)}, of {model}?", abort=True
        )
    if found.here is not None:
        node.ask("launcherd", UnloadModel(model=ModelName(found.name)), deadline_seconds=UNLOAD_SECONDS)
    for path in files:
        path.unlink(missing_ok=True)
    node.ask("launcherd", RescanModels(), deadline_seconds=300.0)
    if as_json:
        print_json({"model": found.name, "deleted": [str(path) for path in files], "bytes": total})
    else:
        click.echo(f"Deleted {found.name}: {size(total)}.")


def deletable(node: Node, model: ModelStatus) -> list[Path]:
    """Every part of a model below the downloads folder. Raises: NotOurs, ModelNotFound."""
    path_text = model.path
    if not path_text:
        # The status came from a catalog that knows no paths; launcherd's inventory does.
        said = node.survey(["launcherd"]).snapshots["launcherd"] or []
        lists = [item for item in said if isinstance(item, InventoryChanged)]
        path_text = next((local.path for item in lists for local in item.models if local.name == model.name), "")
    if not path_text:
        raise ModelNotFound(f"{model.name} has no file on this node; nothing to delete")
    path = Path(path_text)
    downloads = node.paths.downloads.resolve()
    # Both the name and what it points at must be inside: a link could lead out.
    if not (path.parent.resolve() / path.name).is_relative_to(downloads) or not path.resolve().is_relative_to(
        downloads
    ):
        raise NotOurs(
            f"{path} was not downloaded by meshd, so meshd does not delete it; delete the file yourself, "
            "then 'meshctl models list --rescan'"
        )
    part = re.fullmatch(r"(.+)-00001-of-(\d{5})", path.stem)
    if part is None:
        return [path]
    names = [f"{part.group(1)}-{at:05}-of-{part.group(2)}{path.suffix}" for at in range(1, int(part.group(2)) + 1)]
    return [path.parent / name for name in names if (path.parent / name).is_file()]
