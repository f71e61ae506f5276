"""``pull``: get a model onto this node's disk, and watch how it comes."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import time
from dataclasses import asdict, replace

import click

from services.meshctl.completion import complete_registered
from services.meshctl.node import Node, run, survey
from services.meshctl.output import Waiting, age, clean, print_json, progress, size
from shared.codec import Message
from shared.messages.daemon import Done
from shared.messages.downloads import CancelPull, DownloadChanged, PullModel, RegisteredModel, RegistryChanged
from shared.messages.models import InventoryChanged

PULL_SECONDS = 24 * 3600.0 - 1
"""launcherd decides when a download has failed; how long the whole takes does not matter."""
ASK_SECONDS = 60.0
LOOK_SECONDS = 0.3
STEP_PERCENT = 10
"""Where lines can't be rewritten, one is printed every so often."""

_REMOTE = re.compile(r"(https?://|hf\.co/|huggingface\.co/)\S+|[A-Za-z0-9][\w.-]*/[\w.-]+(:\S+)?", re.IGNORECASE)


@click.command()
@click.argument("model", shell_complete=complete_registered)
@click.option("--name", metavar="NAME", help="What to call it here.")
@click.option("--recipe", metavar="RECIPE", default="", help="Which kind of engine runs it, if not llama.cpp.")
@click.option("--label", "labels", metavar="LABEL", multiple=True, help="embeddings, reranking, …; may be repeated.")
@click.option("--mmproj", metavar="FILE", default="", help="A projector of the same repository, for models that see.")
@click.option("--cancel", is_flag=True, help="Stop its download instead; what is there is kept.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def pull(
    model: str, name: str | None, recipe: str, labels: tuple[str, ...], mmproj: str, cancel: bool, as_json: bool
) -> None:
    """Download MODEL onto this node.

    MODEL is a name ('meshctl models list --all' shows them), org/repo:quantisation or org/repo:file.gguf of Hugging
    Face, or the URL of a .gguf file. With --name and --recipe also a file or folder that is here already, for another
    engine.

    Ctrl-C ends only the watching. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are those of the shell that ran
    'meshctl up'.
    """
    node = Node()
    node.running()
    if cancel:
        reply = node.ask("launcherd", CancelPull(model=name or model), deadline_seconds=ASK_SECONDS)
        _say(name or model, reply, as_json)
        return
    path = os.path.expanduser(model)
    if recipe and os.path.exists(path):
        model = os.path.abspath(path)
    request = PullModel(
        model=name or model, checkpoint=model if name else "", recipe=recipe, labels=labels, mmproj=mmproj
    )
    done = pull_model(node, request)
    if as_json:
        print_json(_result(node, done))
        return
    click.echo(f"{clean(done.detail)}. Next: meshctl load {clean(shlex.quote(done.subject))}")


def _say(model: str, reply: Message, as_json: bool) -> None:
    detail = reply.detail if isinstance(reply, Done) else ""
    if as_json:
        print_json({"model": model, "detail": detail})
    else:
        click.echo(clean(detail))


def _result(node: Node, done: Done) -> dict[str, object]:
    said = node.survey(["launcherd"]).snapshots["launcherd"] or []
    lists = [item for item in said if isinstance(item, InventoryChanged)]
    local = next((model for item in lists for model in item.models if model.name == done.subject), None)
    here = asdict(local) if local is not None else {}
    wanted = ("checkpoint", "type", "recipe", "labels", "path", "file_size_bytes")
    return {"model": done.subject, "detail": done.detail, **{key: here.get(key) for key in wanted}}


def pull_model(node: Node, request: PullModel) -> Done:
    """It is on disk when this returns; ``subject`` is its name.

    Raises: NodeDown, RequestRefused with launcherd's reason, DaemonUnreachable; KeyboardInterrupt, and it goes on.
    """
    node.running()
    # Queued at once: the name is known, and who stops watching has not stopped it.
    queued = node.ask("launcherd", replace(request, wait=False), deadline_seconds=ASK_SECONDS)
    name = queued.subject if isinstance(queued, Done) else request.model
    try:
        reply = _watch(node, request, name)
    except KeyboardInterrupt:
        quoted = shlex.quote(name)
        progress(
            f"No longer watched; the download goes on. 'meshctl pull {quoted}' watches it again, "
            f"'meshctl pull {quoted} --cancel' stops it."
        )
        raise
    assert isinstance(reply, Done), reply
    return reply


def _watch(node: Node, request: PullModel, name: str) -> Message:
    waiting = Waiting()
    started = time.monotonic()

    async def work() -> Message:
        from shared.io.bus import BusClient

        client = BusClient("launcherd", node.paths)
        asked = asyncio.ensure_future(client.request(request, deadline_seconds=PULL_SECONDS))
        try:
            while True:
                done, _ = await asyncio.wait({asked}, timeout=LOOK_SECONDS)
                if done:
                    return asked.result()
                said = (await survey(node.paths, ["launcherd"])).snapshots["launcherd"]
                waiting.show_progress(*_words(said, name), time.monotonic() - started)
        finally:
            asked.cancel()
            client.close()

    try:
        return run(work())
    finally:
        waiting.done()


def _words(said: list[Message] | None, name: str) -> tuple[str, str]:
    """A line for people, and what of it is worth a line of its own."""
    if said is None:
        return "launcherd is being restarted; the download goes on after that", "restart"
    found = next((item for item in said if isinstance(item, DownloadChanged) and item.model == name), None)
    if found is None:
        return f"{name}: asked launcherd", "asked"
    percent = 100 * found.bytes_done // found.bytes_total if found.bytes_total else 0
    if found.state in ("queued", "resolving"):
        return f"{name}: {found.state}, {found.reason}", f"{found.state} {found.reason}"
    parts = [size(found.bytes_done) or "0 B"]
    if found.bytes_total:
        parts = [f"{parts[0]} of {size(found.bytes_total)}", f"{percent}%"]
    if found.state == "verifying":
        parts.append(found.reason)
    elif found.bytes_per_second > 0:
        parts.append(f"{size(int(found.bytes_per_second)) or '0 B'}/s")
        if found.bytes_total:
            parts.append(f"{age((found.bytes_total - found.bytes_done) / found.bytes_per_second)} left")
    if found.file_count > 1:
        parts.append(f"file {found.file_index} of {found.file_count}")
    return f"{name}: {', '.join(parts)}", f"{found.state} {found.file_index} {percent // STEP_PERCENT}"


# -- for `load` and `run` --------------------------------------------------------------------------------------


def can_be_pulled(node: Node, model: str) -> bool:
    """Whether a name that is not on disk is one of the registry's, or a place to fetch from."""
    if os.path.exists(os.path.expanduser(model)):
        return False
    return _REMOTE.fullmatch(model) is not None or registered_model(node, model) is not None


def registered_model(node: Node, name: str) -> RegisteredModel | None:
    return next((model for model in registry(node) if model.name.lower() == name.lower()), None)


def registry(node: Node) -> tuple[RegisteredModel, ...]:
    """Empty when launcherd is silent."""
    said = node.survey(["launcherd"]).snapshots["launcherd"] or []
    return next((item.models for item in said if isinstance(item, RegistryChanged)), ())
