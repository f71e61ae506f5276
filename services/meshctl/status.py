"""``status``, ``ps`` and ``version``: what the node says about itself."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from services.meshctl.node import Node, NodeDown, Survey
from services.meshctl.output import age, clean, console, print_json, size, table
from shared.ids import DAEMONS
from shared.messages.models import DeviceChanged
from shared.version import VERSION

if TYPE_CHECKING:
    from rich.console import Console

    from shared.node_status import ModelStatus, NodeStatus

WATCH_SECONDS = 1.0


@click.command()
@click.option("--watch", "-w", is_flag=True, help="Refresh every second until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(watch: bool, as_json: bool) -> None:
    """Show daemons, models, addresses and what to do next.

    Exit status 1 when the node is down.
    """
    if not watch:
        if not _show(Node(), as_json):
            raise SystemExit(1)
        return
    _watch(as_json)


def _show(node: Node, as_json: bool) -> bool:
    up = not node.is_down()
    if not up and not as_json:
        click.echo(f"meshctl: {_down_text(node)}", err=True)
        return False
    from shared.status_view import to_jsonable

    view = node.status()
    if as_json:
        document = to_jsonable(view)
        if not up:
            document["error"] = {"code": NodeDown.code, "detail": _down_text(node)}
        print_json(document)
    else:
        render(view, console())
    return up


def _down_text(node: Node) -> str:
    return f"this node is not running (MESH_HOME={node.paths.home}). Next: meshctl up"


def _watch(as_json: bool) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    if as_json or not sys.stdout.isatty():
        while True:
            _show(Node(), as_json)
            sys.stdout.flush()
            time.sleep(WATCH_SECONDS)
    screen = console()
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            node = Node()
            if node.is_down():
                live.update(Text(_down_text(node)), refresh=True)
            else:
                live.update(Group(*_parts(node.status(), screen.width)), refresh=True)
            time.sleep(WATCH_SECONDS)


def render(view: NodeStatus, screen: Console) -> None:
    for part in _parts(view, screen.width):
        screen.print(part)


def _parts(view: NodeStatus, width: int) -> list[Any]:
    from rich.text import Text

    from services.meshctl.output import STATE_STYLES

    node = view.node
    head = Text()
    head.append(clean(node.name or "this node"), style="bold")
    head.append("  ")
    head.append(view.overall, style=STATE_STYLES.get(view.overall, ""))
    head.append(f"  {clean(view.summary.removeprefix(view.overall + ': '))}")
    facts = [
        ("node", node.peer_id),
        ("version", f"{node.version}  {node.role}"),
        ("mesh", _mesh(view)),
        ("device", _device(view)),
        ("engine", node.engine or ("none" if node.engine_reason else "")),
        ("api", view.addresses.api and f"{view.addresses.api}/v1" + _requests(view)),
        ("console", view.addresses.console),
        ("reach", "\n".join(_without_peer(address) for address in view.addresses.mesh)),
    ]
    lines = Text()
    for label, value in facts:
        if value:
            for at, line in enumerate(clean(value).splitlines()):
                lines.append(f"  {label if not at else '':8}", style="dim")
                lines.append(f"{line}\n")
    lines.rstrip()
    parts: list[Any] = [head, lines, *_join_part(view), Text(), _daemon_table(view, width)]
    if view.models:
        parts += [Text(), _model_table(view.models, width)]
    if view.downloads:
        parts += [Text(), _download_table(view, width)]
    if view.hints:
        parts += [Text(), Text("\n".join(f"next: {clean(hint)}" for hint in view.hints))]
    return parts


def _join_part(view: NodeStatus) -> list[Any]:
    """The steps of a join that waits or failed; of one that is through there is nothing to say."""
    from rich.text import Text

    from services.meshctl.output import STATE_STYLES

    if all(step.state == "done" for step in view.join):
        return []
    text = Text("\njoining\n", style="bold")
    for step in view.join:
        text.append(f"  {step.name:9}", style="dim")
        text.append(f"{step.state:8} ", style=STATE_STYLES.get(step.state, ""))
        text.append(f"{clean(step.detail)}\n")
    text.rstrip()
    return [text]


def _mesh(view: NodeStatus) -> str:
    if not view.node.mesh_id:
        return ""
    name = view.node.mesh_name or f"unnamed {view.node.mesh_id}"
    count = sum(peer.state == "alive" for peer in view.peers)
    return f"{name}  {count} node{'s' if count != 1 else ''}"


def _device(view: NodeStatus) -> str:
    node = view.node
    if not node.device:
        return ""
    if not node.vram_bytes:
        return node.device
    return f"{node.device}  {size(node.vram_bytes)} for models of {size(node.total_bytes) or 'unknown'}"


def _requests(view: NodeStatus) -> str:
    requests = view.requests
    return f"  {requests.total} requests, {requests.active} now" if requests.total else ""


def _without_peer(address: str) -> str:
    """Every multiaddr of a node ends in its id, which is shown once already."""
    return address.partition("/p2p/")[0]


def _daemon_table(view: NodeStatus, width: int) -> Any:
    rows = [
        (
            daemon.name,
            daemon.state,
            str(daemon.pid or ""),
            age(daemon.uptime_seconds) if daemon.pid else f"down {age(daemon.down_seconds)}".strip(),
            "" if not daemon.restarts else str(daemon.restarts),
            daemon.detail,
        )
        for daemon in view.daemons
    ]
    headers = ["DAEMON", "STATE", "PID", "UP", "RESTARTS", "DOES"]
    if not any(row[4] for row in rows):
        rows = [(*row[:4], row[5]) for row in rows]  # type: ignore[misc]
        headers.remove("RESTARTS")
    return table(headers, rows, state_column=1, width=width)


def _model_table(models: tuple[ModelStatus, ...], width: int) -> Any:
    headers = ["MODEL", "STATUS", "SIZE", "BUSY", "HOSTS", "REASON"]
    rows = [
        [model.name, model.status, size(model.size_bytes), busy(model), ", ".join(model.hosts), model.reason]
        for model in models
    ]
    drop = [at for at in (2, 3, 4) if not any(row[at] for row in rows) or (width < 70 and at in (2, 4))]
    keep = [at for at in range(len(headers)) if at not in drop]
    return table([headers[at] for at in keep], [[row[at] for at in keep] for row in rows], state_column=1, width=width)


def _download_table(view: NodeStatus, width: int) -> Any:
    rows = [
        (
            item.model,
            item.state,
            f"{size(item.bytes_done)} of {size(item.bytes_total)}" if item.bytes_total else "",
            f"{size(int(item.bytes_per_second))}/s" if item.bytes_per_second else "",
            item.reason,
        )
        for item in view.downloads
    ]
    return table(["DOWNLOAD", "STATE", "BYTES", "RATE", "REASON"], rows, state_column=1, width=width)


def busy(model: ModelStatus) -> str:
    """``2/4 +3``: requests running, how many could, how many wait."""
    here = model.here
    if here is None or not here.parallel:
        return ""
    return f"{here.busy}/{here.parallel}" + (f" +{here.waiting}" if here.waiting else "")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ps(as_json: bool) -> None:
    """List the models that are loaded or on their way, with the nodes that serve them."""
    node = Node()
    node.running()
    view = node.status()
    shown = [model for model in view.models if model.hosts or (model.here is not None and model.status != "failed")]
    if as_json:
        import dataclasses

        print_json([dataclasses.asdict(model) for model in shown])
        return
    if not shown:
        click.echo("No model is loaded. Next: meshctl models list, then meshctl load MODEL")
        return
    until = _until(node)
    rows = [
        (
            model.name,
            ", ".join(model.hosts) or "this node",
            size(model.need_bytes or model.size_bytes),
            str(model.here.parallel or "") if model.here else "",
            busy(model),
            f"{model.tokens_per_second:.0f}" if model.tokens_per_second else "",
            f"{age(model.here.last_use_age_seconds)} ago" if model.here and model.here.requests_total else "",
            until(model) if model.status == "ready" else model.reason,
        )
        for model in shown
    ]
    console().print(table(["MODEL", "NODES", "SIZE", "SLOTS", "BUSY", "TOK/S", "USED", "UNTIL"], rows))


def _until(node: Node) -> Any:
    minutes = node.config.models.idle_unload_minutes

    def words(model: ModelStatus) -> str:
        if model.here is not None and model.here.pinned:
            return "pinned"
        if not minutes or model.here is None:
            return "unloaded" if model.builtin else "another needs the room"
        if model.here.busy:
            return f"idle for {minutes:g} min"
        return f"in {age(max(0.0, minutes * 60 - model.here.last_use_age_seconds))}"

    return words


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Show the versions of meshctl, its Python, every daemon and the engine, and warn of a mixture."""
    node = Node()
    found = node.survey() if os.path.isdir(node.paths.bus) else Survey()
    infos = {name: found.infos.get(name) for name in DAEMONS}
    device = next((item for item in found.snapshots.get("launcherd") or () if isinstance(item, DeviceChanged)), None)
    engine = device.engine if device else ""
    daemons = {name: info.version if info else "" for name, info in infos.items()}
    skewed = sorted(name for name, said in daemons.items() if said and said != VERSION)
    python = ".".join(str(part) for part in sys.version_info[:3])
    if as_json:
        document = {"meshctl": VERSION, "python": python, "daemons": daemons, "engine": engine, "skew": skewed}
        print_json(document)
        return
    click.echo(f"meshctl    {VERSION}  (Python {python})")
    for name in DAEMONS:
        said = daemons.get(name) or "not running"
        click.echo(f"{name:10} {clean(said)}{'  differs' if name in skewed else ''}")
    click.echo(f"engine     {clean(engine) or 'unknown while launcherd is not running; meshctl doctor looks for it'}")
    if skewed:
        click.echo("Next: meshctl restart, so that every daemon runs this version")
