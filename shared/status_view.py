"""What ``meshctl status`` and the management API show of a node: one pure function over the daemons' own words.

Inputs are what could be had: snapshots of the daemons that answered, their :class:`DaemonInfo`, and supervisord's
process table. Any subset may be missing; whatever is missing is said, never guessed. Every state carries a reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from shared.codec import Message
from shared.ids import DAEMONS, ModelName
from shared.messages.daemon import DaemonInfo
from shared.messages.downloads import DownloadChanged
from shared.messages.mesh import MemberChanged, MeshIdentityChanged, ProxyChanged, TunnelChanged
from shared.messages.models import (
    AssignmentsChanged,
    CatalogChanged,
    DeviceChanged,
    InventoryChanged,
    LimitsChanged,
    LocalModel,
    MeshModel,
    SlotChanged,
)
from shared.messages.trust import JoinChanged
from shared.messages.tunnel import LinkChanged
from shared.node_status import (
    Addresses,
    DaemonStatus,
    DownloadView,
    HereStatus,
    ModelStatus,
    ModelStatusWord,
    NodeStatus,
    NodeView,
    Overall,
    Ports,
    ProcessRow,
    RequestsView,
    SkippedView,
)
from shared.peer_view import join_steps, peers_of
from shared.status_hints import hints_for
from shared.version import VERSION

T = TypeVar("T")


def to_jsonable(status: NodeStatus) -> dict[str, Any]:
    """Plain JSON types, every field."""
    return dataclasses.asdict(status)


def process_rows(infos: Iterable[Mapping[str, Any]], restarts: Mapping[str, int] | None = None) -> list[ProcessRow]:
    """supervisord's ``getAllProcessInfo`` as rows, for the five daemons and the keeper."""
    rows = []
    for info in infos:
        state = str(info["statename"]).lower()
        alive = state in ("running", "starting", "stopping")
        now, start, stop = int(info["now"]), int(info["start"]), int(info["stop"])
        reason = str(info.get("spawnerr") or "")
        if not reason and state in ("exited", "backoff", "fatal") and info.get("exitstatus"):
            reason = f"ended with exit status {info['exitstatus']}"
        rows.append(
            ProcessRow(
                name=str(info["name"]),
                state=state,
                pid=int(info["pid"]),
                uptime_seconds=float(max(0, now - start)) if alive and start else None,
                down_seconds=float(max(0, now - stop)) if not alive and stop else None,
                reason=reason,
                log_path=str(info.get("stderr_logfile") or info.get("stdout_logfile") or ""),
                restarts=None if restarts is None else restarts.get(str(info["name"]), 0),
            )
        )
    return rows


def build_status(
    snapshots: Mapping[str, Sequence[Message] | None],
    infos: Mapping[str, DaemonInfo | None],
    processes: Sequence[ProcessRow],
) -> NodeStatus:
    """Everything a person wants to know about this node, from whatever the daemons could say."""
    daemons = tuple(_daemon(name, infos.get(name), snapshots.get(name), processes) for name in DAEMONS)
    members = _all(snapshots.get("gossipd"), MemberChanged)
    peers = peers_of(members, _all(snapshots.get("tunneld"), LinkChanged))
    names = {peer.peer_id: peer.name for peer in peers}
    inventory = _one(snapshots.get("launcherd"), InventoryChanged)
    models = _models(
        _one(snapshots.get("electiond"), CatalogChanged),
        inventory,
        _all(snapshots.get("launcherd"), SlotChanged),
        names,
    )
    proxy = _one(snapshots.get("proxyd"), ProxyChanged)
    speeds = {speed.model: speed.tokens_per_second for speed in proxy.speeds} if proxy else {}
    models = tuple(dataclasses.replace(model, tokens_per_second=speeds.get(ModelName(model.name))) for model in models)
    tunnel = _one(snapshots.get("tunneld"), TunnelChanged)
    node = _node(snapshots, members, tunnel, inventory)
    overall, summary = _overall(node, daemons, models, _one(snapshots.get("electiond"), AssignmentsChanged), proxy)
    view = NodeStatus(
        overall=overall,
        summary=summary,
        node=node,
        addresses=Addresses(
            api=proxy.api_url if proxy else "",
            console=proxy.console_url if proxy else "",
            mesh=tunnel.addresses if tunnel else (),
        ),
        ports=Ports(
            api=_port(proxy.api_url) if proxy else None,
            console=_port(proxy.console_url) if proxy else None,
            mesh=tunnel.port if tunnel else None,
        ),
        requests=RequestsView(total=proxy.requests_total if proxy else 0, active=proxy.requests_active if proxy else 0),
        daemons=daemons,
        models=models,
        skipped=tuple(SkippedView(path=item.path, reason=item.reason) for item in inventory.skipped)
        if inventory
        else (),
        peers=peers,
        downloads=_downloads(_all(snapshots.get("launcherd"), DownloadChanged)),
        join=join_steps(_one(snapshots.get("gossipd"), JoinChanged)),
        hints=(),
    )
    return dataclasses.replace(view, hints=hints_for(view))


def _one(messages: Sequence[Message] | None, cls: type[T]) -> T | None:
    return next((message for message in reversed(messages or ()) if isinstance(message, cls)), None)


def _all(messages: Sequence[Message] | None, cls: type[T]) -> list[T]:
    return [message for message in messages or () if isinstance(message, cls)]


def _downloads(said: Iterable[DownloadChanged]) -> tuple[DownloadView, ...]:
    return tuple(
        DownloadView(
            model=item.model,
            checkpoint=item.checkpoint,
            state=item.state,
            reason=item.reason,
            bytes_done=item.bytes_done,
            bytes_total=item.bytes_total,
            bytes_per_second=item.bytes_per_second,
        )
        for item in said
        if item.state not in ("done", "cancelled")
    )


def _port(url: str) -> int | None:
    try:
        return urlsplit(url).port
    except ValueError:
        return None


def _daemon(
    name: str, info: DaemonInfo | None, snapshot: Sequence[Message] | None, processes: Sequence[ProcessRow]
) -> DaemonStatus:
    row = next((row for row in processes if row.name == name), None)
    if info is not None:
        state, detail = "running", info.state
    elif snapshot is not None:
        state, detail = "running", ""
    elif row is None:
        state, detail = "unknown", "it does not answer, and no supervisord was found for this node"
    elif row.state == "running":
        state, detail = "silent", "the process runs but does not answer on the bus"
    else:
        state, detail = row.state, row.reason or _PROCESS_REASONS.get(row.state, "")
    uptime = info.uptime_seconds if info else row.uptime_seconds if row else None
    return DaemonStatus(
        name=name,
        state=state,
        pid=row.pid if row and row.pid else info.pid if info else 0,
        serving_pid=info.pid if info else 0,
        uptime_seconds=uptime,
        restarts=row.restarts if row else None,
        detail=detail,
        version=info.version if info else "",
        down_seconds=row.down_seconds if row and state != "running" else None,
        log_path=row.log_path if row else "",
    )


_PROCESS_REASONS = {
    "starting": "started less than a second ago",
    "backoff": "ended too early; supervisord is about to try again",
    "fatal": "ended too early too often; supervisord gave up",
    "exited": "it ended",
    "stopped": "it was stopped, or the node has just been started",
    "stopping": "it is finishing its work",
}


def _node(
    snapshots: Mapping[str, Sequence[Message] | None],
    members: list[MemberChanged],
    tunnel: TunnelChanged | None,
    inventory: InventoryChanged | None,
) -> NodeView:
    identity = _one(snapshots.get("gossipd"), MeshIdentityChanged)
    device = _one(snapshots.get("launcherd"), DeviceChanged)
    limits = _one(snapshots.get("launcherd"), LimitsChanged)
    own = next((member.announcement for member in members if member.is_self), None)
    return NodeView(
        peer_id=tunnel.peer_id if tunnel else own.peer_id if own else "",
        name=own.name if own else "",
        version=own.version if own else VERSION,
        role=own.role if own else "",
        state=own.state if own else "",
        mesh_id=identity.mesh_id if identity else own.mesh_id if own else "",
        mesh_name=identity.mesh_name if identity else "",
        device=device.device if device else own.device if own else "",
        vram_bytes=device.vram_bytes if device else own.vram_bytes if own else 0,
        total_bytes=device.total_bytes if device else 0,
        engine=device.engine if device else "",
        engine_reason=device.engine_reason if device else "",
        scanning=inventory.scanning if inventory else False,
        max_loaded_models=limits.max_loaded_models if limits else (),
    )


_SLOT_STATUS: dict[str, ModelStatusWord] = {
    "ready": "ready",
    "draining": "ready",
    "loading": "loading",
    "restarting": "loading",
    "queued": "loading",
    "stopping": "unloaded",
    "failed": "failed",
    "unloaded": "unloaded",
}
"""In the order in which a slot is the one to show, when a model has several (an old one stopping, a new one)."""


def _models(
    catalog: CatalogChanged | None,
    inventory: InventoryChanged | None,
    slots: list[SlotChanged],
    names: Mapping[str, str],
) -> tuple[ModelStatus, ...]:
    known: dict[str, MeshModel] = {model.name: model for model in catalog.models} if catalog else {}
    local: dict[str, LocalModel] = {model.name: model for model in inventory.models} if inventory else {}
    order = list(_SLOT_STATUS)
    slot_of: dict[str, SlotChanged] = {}
    for slot in sorted(slots, key=lambda slot: (order.index(slot.state), slot.state_age_seconds, slot.slot_id)):
        if slot.state != "unloaded":
            slot_of.setdefault(slot.model, slot)
    models = [
        _model(name, known.get(name), local.get(name), slot_of.get(name), names)
        for name in dict.fromkeys([*known, *local, *slot_of])
    ]
    rank = {"ready": 0, "loading": 1, "failed": 2, "needs_capacity": 3, "unloaded": 4}
    return tuple(sorted(models, key=lambda model: (rank[model.status], model.name)))


def _model(
    name: str, mesh: MeshModel | None, local: LocalModel | None, slot: SlotChanged | None, names: Mapping[str, str]
) -> ModelStatus:
    best = mesh or local
    status: ModelStatusWord = mesh.status if mesh else "unloaded"
    reason = mesh.reason if mesh else "on this node's disk; electiond has not listed it yet"
    if slot is not None and (mesh is None or not mesh.hosts):
        # The slot is this node's first-hand knowledge, the catalog follows it; another host's "ready" stands.
        status, reason = _SLOT_STATUS[slot.state], slot.reason or reason
    hosts = mesh.hosts if mesh else ()
    return ModelStatus(
        name=name,
        type=best.type if best else slot.type if slot else "llm",
        status=status,
        reason=reason,
        hosts=tuple(names.get(host) or host for host in hosts),
        host_ids=hosts,
        nodes_on_disk=len(mesh.nodes_on_disk) if mesh else int(local is not None),
        on_disk_here=local is not None,
        size_bytes=best.file_size_bytes if best else 0,
        need_bytes=(slot.need_bytes if slot else 0) or (best.need_bytes if best else 0),
        context_tokens=best.context_tokens if best else 0,
        architecture=best.architecture if best else "",
        quantization=best.quantization if best else "",
        parameters=best.parameters if best else 0,
        builtin=best.builtin if best else False,
        requested=mesh.requested if mesh else False,
        path=local.path if local else "",
        here=_here(slot) if slot else None,
    )


def _here(slot: SlotChanged) -> HereStatus:
    return HereStatus(
        state=slot.state,
        reason=slot.reason,
        origin=slot.origin,
        busy=slot.in_use,
        parallel=slot.parallel,
        waiting=slot.waiting,
        context_tokens=slot.context_tokens,
        requests_total=slot.requests_total,
        restarts=slot.restarts,
        load_seconds=slot.load_seconds,
        state_age_seconds=slot.state_age_seconds,
        last_use_age_seconds=slot.last_use_age_seconds,
        pid=slot.pid,
        port=slot.port,
        log_path=slot.log_path,
        recipe=slot.recipe,
        processors=slot.processors,
        pinned=slot.pinned,
    )


def _overall(
    node: NodeView,
    daemons: tuple[DaemonStatus, ...],
    models: tuple[ModelStatus, ...],
    assignments: AssignmentsChanged | None,
    proxy: ProxyChanged | None,
) -> tuple[Overall, str]:
    missing = [daemon for daemon in daemons if daemon.state != "running"]
    if len(missing) == len(daemons):
        return "down", "no daemon answers"
    fresh = all(
        (daemon.state in ("starting", "silent") or (daemon.state == "stopped" and daemon.down_seconds is None))
        and not daemon.restarts
        for daemon in missing
    )
    if missing:
        who = ", ".join(f"{daemon.name} ({daemon.state})" for daemon in missing)
        young = all((daemon.uptime_seconds or 0) < 10 for daemon in daemons if daemon.state == "running")
        return ("starting", f"starting; not up yet: {who}") if fresh and young else ("degraded", f"without {who}")
    if proxy is None or not proxy.api_url:
        return "starting", (proxy.reason if proxy and proxy.reason else "proxyd is about to listen")
    if node.state == "idle":
        why = assignments.idle_reason if assignments else ""
        return "idle", why or "idle: this node has no mesh.toml"
    ready = [model.name for model in models if model.status == "ready"]
    loading = [f"{model.name} ({model.reason})" for model in models if model.status == "loading"]
    if ready:
        return "ready", f"ready: {', '.join(ready)}" + (f"; loading {', '.join(loading)}" if loading else "")
    if loading:
        return "starting", f"loading {', '.join(loading)}"
    why = assignments.idle_reason if assignments else ""
    return "ready", "ready to load" + (f" ({why})" if why else "") + f"; {len(models)} models known"
