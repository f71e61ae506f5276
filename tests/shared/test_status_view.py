"""shared.status_view: whatever subset of the daemons answers, the status is built and says what is missing."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from shared.codec import Message
from shared.ids import DAEMONS, BootId, MeshId, ModelName, PeerId, SlotId
from shared.messages.daemon import DaemonInfo
from shared.messages.downloads import DownloadChanged, DownloadState
from shared.messages.mesh import (
    Announcement,
    MemberChanged,
    MeshIdentityChanged,
    ProxyChanged,
    ServedModel,
    TunnelChanged,
)
from shared.messages.models import (
    AssignmentsChanged,
    CatalogChanged,
    DeviceChanged,
    InventoryChanged,
    LimitsChanged,
    LocalModel,
    MeshModel,
    SkippedFile,
    SlotChanged,
)
from shared.node_status import NodeStatus, ProcessRow
from shared.status_view import build_status, process_rows, to_jsonable

ME, OTHER = PeerId("12D3KooWme"), PeerId("12D3KooWother")
ADDRESS = "/ip4/127.0.0.1/udp/4001/quic-v1/p2p/12D3KooWme"


def mesh_model(name: str, status: str, reason: str, **more: Any) -> MeshModel:
    return MeshModel(name=ModelName(name), type="llm", status=status, reason=reason, file_size_bytes=1000, **more)  # type: ignore[arg-type]


def member(peer: PeerId, name: str, *, is_self: bool = False, state: str = "active") -> MemberChanged:
    said = Announcement(
        peer_id=peer,
        incarnation=1,
        seq=1,
        mesh_id=MeshId("mesh"),
        version="0.1.0",
        name=name,
        role="host",
        state=state,  # type: ignore[arg-type]
        hosted=(ServedModel(model=ModelName("qwen"), type="llm"),),
    )
    return MemberChanged(announcement=said, state="alive", reason="probed", is_self=is_self)


def slot(model: str, state: str, reason: str, slot_id: str = "s1", **more: Any) -> SlotChanged:
    return SlotChanged(
        slot_id=SlotId(slot_id),
        model=ModelName(model),
        type="llm",
        state=state,  # type: ignore[arg-type]
        reason=reason,
        origin="request",
        **more,
    )


def download(name: str, state: DownloadState, reason: str = "fetching") -> DownloadChanged:
    return DownloadChanged(
        model=ModelName(name), checkpoint=f"org/{name}:Q4_K_M", state=state, reason=reason, bytes_done=5, bytes_total=10
    )


def snapshots() -> dict[str, list[Message] | None]:
    return {
        "gossipd": [
            MeshIdentityChanged(mesh_id=MeshId("mesh"), mesh_name="home"),
            member(ME, "desk", is_self=True),
            member(OTHER, "attic"),
        ],
        "electiond": [
            CatalogChanged(
                models=(
                    mesh_model("phi", "unloaded", "nobody asked for it"),
                    mesh_model("qwen", "ready", "served", hosts=(ME, OTHER), nodes_on_disk=(ME,)),
                    mesh_model("guide", "unloaded", "", builtin=True),
                )
            ),
            AssignmentsChanged(assignments=()),
        ],
        "tunneld": [TunnelChanged(peer_id=ME, port=4001, addresses=(ADDRESS,))],
        "launcherd": [
            InventoryChanged(
                models=(LocalModel(name=ModelName("qwen"), type="llm", path="/m/qwen.gguf", file_size_bytes=1000),),
                skipped=(SkippedFile(path="/m/bad.gguf", reason="not a GGUF file"),),
            ),
            DeviceChanged(device="cpu", vram_bytes=8, total_bytes=10, reserve_bytes=2, engine="xllamacpp 1"),
            LimitsChanged(max_loaded_models=(2, 1, 1, 1, 1)),
            download("tiny", "downloading"),
            download("gone", "cancelled"),
            download("phi", "failed", reason="the disk is full"),
            slot(
                "qwen",
                "ready",
                "loaded in 2.1 s",
                in_use=1,
                parallel=4,
                waiting=2,
                last_use_age_seconds=3.0,
                pinned=True,
            ),
        ],
        "proxyd": [ProxyChanged(api_url="http://127.0.0.1:41", console_url="http://127.0.0.1:42", worker_pid=9)],
    }


def infos(version: str = "0.1.0") -> dict[str, DaemonInfo | None]:
    return {
        name: DaemonInfo(
            name=name,
            pid=100 + at,
            version=version,
            boot_id=BootId("b"),
            uptime_seconds=50.0,
            state="fine",
            counters={},
        )
        for at, name in enumerate(DAEMONS)
    }


def rows(**states: str) -> list[ProcessRow]:
    return [
        ProcessRow(name=name, state=states.get(name, "running"), pid=1, uptime_seconds=50, restarts=1)
        for name in DAEMONS
    ]


def build(**states: str) -> NodeStatus:
    said, known = snapshots(), infos()
    for name in states:
        said[name] = known[name] = None
    return build_status(said, known, rows(**states))


def test_a_healthy_node_shows_addresses_ports_models_and_peers() -> None:
    status = build()
    assert (status.overall, status.summary) == ("ready", "ready: qwen")
    assert (status.ports.api, status.ports.console, status.ports.mesh) == (41, 42, 4001)
    assert status.addresses.api == "http://127.0.0.1:41"
    assert status.addresses.mesh == (ADDRESS,)
    assert (status.node.peer_id, status.node.name, status.node.mesh_name) == (ME, "desk", "home")
    qwen = status.models[0]
    assert (qwen.name, qwen.hosts, qwen.on_disk_here) == ("qwen", ("desk", "attic"), True)
    assert qwen.here is not None
    assert (qwen.here.busy, qwen.here.parallel, qwen.here.waiting) == (1, 4, 2)
    assert (qwen.here.pinned, qwen.here.recipe, qwen.here.processors) == (True, "llamacpp", ("cpu",))
    assert status.node.max_loaded_models == (2, 1, 1, 1, 1)
    assert [(item.model, item.state) for item in status.downloads] == [("tiny", "downloading"), ("phi", "failed")]
    assert [peer.name for peer in status.peers] == ["desk", "attic"]
    assert status.hints[0] == "talk to it: meshctl chat qwen"
    assert "1 file skipped" in status.hints[1]


def test_it_is_json_and_survives_a_type_adapter() -> None:
    status = build()
    text = json.dumps(to_jsonable(status))
    assert TypeAdapter(NodeStatus).validate_python(json.loads(text)) == status


@pytest.mark.parametrize("dead", [c for n in range(6) for c in itertools.combinations(DAEMONS, n)], ids=", ".join)
def test_any_subset_of_daemons_may_be_dead(dead: tuple[str, ...]) -> None:
    status = build(**dict.fromkeys(dead, "backoff"))
    assert [daemon.name for daemon in status.daemons if daemon.state != "running"] == [n for n in DAEMONS if n in dead]
    assert all(daemon.detail for daemon in status.daemons if daemon.name in dead)
    assert status.overall == ("down" if len(dead) == 5 else "degraded" if dead else "ready")
    for name in dead if len(dead) < 5 else ():
        assert name in status.summary
    assert status.hints


def test_without_supervisord_and_daemons_it_says_so() -> None:
    status = build_status({}, {}, [])
    assert status.overall == "down"
    assert status.hints == ("start the node: meshctl up",)
    assert {daemon.state for daemon in status.daemons} == {"unknown"}


def test_a_running_process_that_does_not_answer_is_silent() -> None:
    said, known = snapshots(), infos()
    said["gossipd"] = known["gossipd"] = None
    gossipd = build_status(said, known, rows()).daemons[0]
    assert (gossipd.state, gossipd.detail) == ("silent", "the process runs but does not answer on the bus")


def test_just_after_the_start_it_is_starting_unless_somebody_stopped_a_daemon() -> None:
    young = [
        ProcessRow(name=name, state="starting" if name == "proxyd" else "running", pid=1, uptime_seconds=1, restarts=0)
        for name in DAEMONS
    ]
    known = {name: dataclasses.replace(info, uptime_seconds=1.0) if info else None for name, info in infos().items()}
    said = {**snapshots(), "proxyd": None}
    known["proxyd"] = None
    assert build_status(said, known, young).overall == "starting"
    never = [dataclasses.replace(row, state="stopped") if row.name == "proxyd" else row for row in young]
    assert build_status(said, known, never).overall == "starting"
    stopped = [dataclasses.replace(row, down_seconds=1.0) if row.name == "proxyd" else row for row in never]
    assert build_status(said, known, stopped).overall == "degraded"


def test_an_idle_node_says_what_to_do() -> None:
    said = snapshots()
    said["gossipd"] = [member(ME, "desk", is_self=True, state="idle")]
    said["electiond"] = [AssignmentsChanged(assignments=(), idle_reason="this node is idle: no mesh.toml")]
    status = build_status(said, infos(), rows())
    assert (status.overall, status.summary) == ("idle", "this node is idle: no mesh.toml")
    assert "meshctl up --model" in status.hints[0]


def test_without_electiond_the_disk_and_the_slots_are_shown() -> None:
    said = snapshots()
    said["electiond"] = None
    assert [(model.name, model.status) for model in build_status(said, infos(), rows()).models] == [("qwen", "ready")]


def test_a_slot_here_is_newer_than_the_catalog_unless_another_node_hosts_the_model() -> None:
    said = snapshots()
    assert said["launcherd"] is not None
    said["launcherd"] += [
        slot("phi", "failed", "the engine ended at start", "s2"),
        slot("guide", "queued", "after qwen", "s3"),
    ]
    said["launcherd"][2] = slot("qwen", "failed", "crashed")
    status = {model.name: (model.status, model.reason) for model in build_status(said, infos(), rows()).models}
    assert status == {
        "phi": ("failed", "the engine ended at start"),
        "guide": ("loading", "after qwen"),
        "qwen": ("ready", "served"),
    }


def test_of_two_slots_of_a_model_the_useful_one_is_shown() -> None:
    said = snapshots()
    assert said["launcherd"] is not None
    said["launcherd"] += [
        slot("phi", "stopping", "replaced", "old", state_age_seconds=0.1),
        slot("phi", "loading", "since 1 s", "new", state_age_seconds=1.0),
        slot("guide", "unloaded", "asked to", "gone"),
    ]
    phi = next(model for model in build_status(said, infos(), rows()).models if model.name == "phi")
    assert phi.here is not None
    assert (phi.here.state, phi.reason) == ("loading", "since 1 s")
    assert next(model for model in build_status(said, infos(), rows()).models if model.name == "guide").here is None


def test_process_rows_say_why_a_process_is_down() -> None:
    raw = {"name": "gossipd", "statename": "BACKOFF", "pid": 0, "start": 90, "stop": 95, "now": 100, "exitstatus": 1}
    raw |= {"spawnerr": "Exited too quickly (process log may have details)", "stdout_logfile": "/l"}
    row = process_rows([raw], {"gossipd": 3})[0]
    assert (row.state, row.down_seconds, row.uptime_seconds, row.restarts) == ("backoff", 5.0, None, 3)
    assert row.reason.startswith("Exited too quickly")
    assert process_rows([{**raw, "statename": "RUNNING", "spawnerr": ""}])[0].uptime_seconds == 10.0
    assert process_rows([{**raw, "statename": "EXITED", "spawnerr": ""}])[0].reason == "ended with exit status 1"
