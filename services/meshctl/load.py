"""``load`` and ``unload``: ask launcherd, and say what it is waiting for meanwhile."""

from __future__ import annotations

import asyncio
import shlex
import time
from dataclasses import replace

import click

from services.meshctl.completion import complete_model
from services.meshctl.config_file import update_config
from services.meshctl.elsewhere import NotOnAnotherNode, ask_node, on_node, other_node
from services.meshctl.node import Node, run, survey
from services.meshctl.output import Waiting, clean, print_json, progress
from services.meshctl.pull import can_be_pulled, pull_model
from services.meshctl.reload import reload_daemons
from shared.codec import Message
from shared.errors import RequestRefused
from shared.ids import ModelName
from shared.llamacpp_args import split_args
from shared.messages.daemon import Done
from shared.messages.downloads import PullModel
from shared.messages.models import LoadModel, ModelLoaded, SlotChanged, UnloadModel

LOAD_SECONDS = 24 * 3600.0 - 1
"""launcherd decides when a load has failed; the queue before it waits as long as it takes."""
LOOK_SECONDS = 0.3


@click.command()
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--ctx-size",
    "--ctx",
    "context_tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Context over all requests, tokens.",
)
@click.option("--parallel", type=click.IntRange(min=0), default=0, help="Requests it works on at once.")
@click.option("--llamacpp-args", metavar="ARGS", help="Options for llama.cpp instead of the configured ones, quoted.")
@click.option("--llamacpp-backend", metavar="NAME", default="", help="Build of llama.cpp that runs it.")
@click.option("--pin/--no-pin", "pinned", default=None, help="Keep it loaded when others need the place, or no longer.")
@on_node
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def load(
    model: str,
    context_tokens: int,
    parallel: int,
    llamacpp_args: str | None,
    llamacpp_backend: str,
    pinned: bool | None,
    where: str | None,
    as_json: bool,
) -> None:
    """Load MODEL on this node and wait until it is ready. A model of the registry, org/repo:quantisation or a URL that
    is not on disk is pulled first.

    With the same options on a loaded model nothing happens; with others it is loaded again. With --node the other node
    is asked to load it, with its own settings, and it is not waited for.
    """
    node = Node()
    peer_id = other_node(node, where)
    if peer_id is not None:
        if context_tokens or parallel or llamacpp_args is not None or llamacpp_backend or pinned is not None:
            raise NotOnAnotherNode("options are for this node; another node loads with its own settings")
        _say(where, model, ask_node(node, peer_id, "load", model), as_json, hint="'meshctl ps' shows when it is ready")
        return
    request = LoadModel(
        model=ModelName(model),
        context_tokens=context_tokens,
        parallel=parallel,
        extra_args=None if llamacpp_args is None else split_args(llamacpp_args, source="--llamacpp-args"),
        backend=llamacpp_backend,
        pinned=pinned,
    )
    loaded = load_model(node, request)
    if as_json:
        print_json(
            {
                "model": loaded.model,
                "slot_id": loaded.slot_id,
                "load_seconds": loaded.load_seconds,
                "already": loaded.already,
            }
        )
    elif loaded.already:
        click.echo(f"{loaded.model} is ready already.")
    else:
        click.echo(
            f"{clean(loaded.model)} is ready, loaded in {loaded.load_seconds:.1f} s. Next: {_next(node, loaded.model)}"
        )


def _say(where: str | None, model: str | None, lines: tuple[str, ...], as_json: bool, hint: str = "") -> None:
    """What another node answered."""
    if as_json:
        print_json({"node": where, "model": model, "detail": "; ".join(lines)})
        return
    for line in lines:
        click.echo(clean(f"{where}: {line}"))
    if hint:
        progress(hint)


def _next(node: Node, model: ModelName) -> str:
    """What this type of model is for."""
    known = next((known for known in node.status().models if known.name == model), None)
    route = {"embedding": "/v1/embeddings", "reranking": "/v1/rerank"}.get(known.type if known else "")
    return f"POST {route}" if route else f"meshctl chat {clean(shlex.quote(model))}"


def load_model(node: Node, request: LoadModel) -> ModelLoaded:
    """Ready when it returns. An idle node gets its ``mesh.toml`` first, and a model that only the registry knows is
    pulled.

    Raises: NodeDown, RequestRefused with launcherd's reason, DaemonUnreachable.
    """
    node.running()
    configure(node)
    try:
        reply = _ask_and_watch(node, request, request.model)
    except RequestRefused as error:
        if error.code != "model_not_found" or not can_be_pulled(node, request.model):
            raise
        pulled = pull_model(node, PullModel(model=request.model))
        request = replace(request, model=ModelName(pulled.subject))
        reply = _ask_and_watch(node, request, request.model)
    assert isinstance(reply, ModelLoaded), reply
    return reply


def configure(node: Node) -> None:
    """Make an idle node one that serves, as DESIGN §2 says of load and run."""
    if not node.paths.config_file.exists():
        update_config(node.paths.config_file, node.environ, {})
        progress(f"Wrote {node.paths.config_file}: this node serves models now")
        reload_daemons(node)


def _ask_and_watch(node: Node, request: Message, model: str) -> Message:
    waiting = Waiting()

    async def work() -> Message:
        from shared.io.bus import BusClient

        client = BusClient("launcherd", node.paths)
        asked = asyncio.ensure_future(client.request(request, deadline_seconds=LOAD_SECONDS))
        started = time.monotonic()
        try:
            while True:
                done, _ = await asyncio.wait({asked}, timeout=LOOK_SECONDS)
                if done:
                    return asked.result()
                waiting.show(await _state(node, model), time.monotonic() - started)
        finally:
            asked.cancel()
            client.close()

    try:
        return run(work())
    finally:
        waiting.done()


async def _state(node: Node, model: str) -> str:
    said = (await survey(node.paths, ["launcherd"])).snapshots["launcherd"]
    if said is None:
        return "launcherd is being restarted; the request is repeated"
    slots = [item for item in said if isinstance(item, SlotChanged) and (not model or item.model == model)]
    if not slots:
        return f"{model or 'models'}: asked launcherd"
    newest = min(slots, key=lambda slot: slot.state_age_seconds)
    return f"{newest.model}: {newest.state}, {newest.reason or 'no reason given'}"


@click.command()
@click.argument("model", required=False, shell_complete=complete_model)
@on_node
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def unload(model: str | None, where: str | None, as_json: bool) -> None:
    """Unload MODEL, or every model. Requests that are running finish first."""
    node = Node()
    peer_id = other_node(node, where)
    if peer_id is not None:
        _say(where, model, ask_node(node, peer_id, "unload", model or ""), as_json)
        return
    node.running()
    request = UnloadModel(model=ModelName(model) if model else None)
    reply = _ask_and_watch(node, request, model or "")
    detail = reply.detail if isinstance(reply, Done) else ""
    if as_json:
        print_json({"model": model, "detail": detail})
    else:
        click.echo(detail or f"{model or 'Every model'} is unloaded.")
