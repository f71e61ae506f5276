"""Every daemon as a real process, driven by bare ``zmq.REQ`` and ``zmq.SUB`` with plain msgpack; and the three small
ones together, restarted one by one beside a launcherd in the test's hands."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shared import codec
from shared.errors import StillStarting
from shared.ids import DAEMONS, ModelName, SlotId
from shared.io.bus import BusServer, Mirror
from shared.io.drive import Tasks
from shared.messages.daemon import Done, StoryEntry
from shared.messages.models import (
    AssignmentsChanged,
    CatalogChanged,
    DeviceChanged,
    InventoryChanged,
    LocalModel,
    RoutesChanged,
    SlotChanged,
)
from shared.paths import NodePaths
from shared.peer_ids import public_key_of
from tests.daemons import DaemonProcess, daemon_environment, running_daemon, start_daemon_process
from tests.waiting import run_async, until, wait_until

SNAPSHOT_OF = {
    "gossipd": {"MeshIdentityChanged", "MemberChanged", "DemandChanged", "TrustChanged", "JoinChanged"},
    "electiond": {"CatalogChanged", "AssignmentsChanged", "RoutesChanged"},
    "tunneld": {"TunnelChanged"},
    "launcherd": {
        "InventoryChanged",
        "DeviceChanged",
        "SlotChanged",
        "CreditsRecalled",
        "LimitsChanged",
        "RegistryChanged",
    },
    "proxyd": {"ProxyChanged"},
}


def ask(home: Path, daemon: str, tag: str, fields: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """One request with nothing but ZeroMQ and msgpack."""
    with zmq.Context.instance().socket(zmq.REQ) as req:
        req.setsockopt(zmq.LINGER, 0)
        req.setsockopt(zmq.RCVTIMEO, 8000)
        req.connect(f"ipc://{home}/run/{daemon}.req")
        req.send(msgpack.packb(["r1", 5.0, tag, fields or {}]))
        request_id, reply, values = msgpack.unpackb(req.recv())
        assert request_id == "r1"
        return reply, values


def snapshot(home: Path, daemon: str) -> dict[str, dict[str, Any]]:
    """The daemon's whole state by tag, once it has one."""

    def taken() -> dict[str, Any] | None:
        tag, fields = ask(home, daemon, "GetSnapshot")
        assert tag == "Snapshot" or fields["code"] == "starting", fields
        return fields if tag == "Snapshot" else None

    items = wait_until(taken, 10, f"{daemon} has settled")["items"]
    return dict(map(msgpack.unpackb, items))


@contextmanager
def subscribed(home: Path, daemon: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context.instance().socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.RCVTIMEO, 8000)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.connect(f"ipc://{home}/run/{daemon}.pub")
        yield sub


def hear(sub: zmq.Socket[bytes], tag: str) -> list[Any]:
    """``[boot_id, seq, tag, fields]`` of the next publication of that kind."""
    while True:
        topic, payload = sub.recv_multipart()
        if topic == tag.encode():
            value: list[Any] = msgpack.unpackb(payload)
            assert value[2] == tag
            return value


@contextmanager
def keeper(home: Path) -> Iterator[None]:
    """proxyd's listening sockets come from it; alone it thinks that supervisord is at its stdin."""
    with open(home / "keeper.test.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.proxyd.keeper"],
            cwd=home,
            env=daemon_environment(home),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_serves_bare_clients_alone_on_an_idle_node(name: str, mesh_home: Path) -> None:
    """No daemon waits for another to start; a bare REQ and SUB drive each of them."""
    with ExitStack() as stack:
        if name == "proxyd":
            stack.enter_context(keeper(mesh_home))
        daemon = stack.enter_context(running_daemon(name, mesh_home))
        with subscribed(mesh_home, name) as sub:
            tag, info = ask(mesh_home, name, "GetDaemonInfo")
            assert (tag, info["name"]) == ("DaemonInfo", name)
            assert info["state"]
            boot_id, seq, _, _ = hear(sub, "Heartbeat")
            assert boot_id == info["boot_id"]
            assert seq >= 0

        # What is malformed or unknown is refused, counted, and harms nobody.
        assert ask(mesh_home, name, "FromTheFuture")[1]["code"] == "unknown_tag"
        assert ask(mesh_home, name, "GetStory", {"limit": "all"})[1]["code"] == "schema"
        tag, refused = ask(mesh_home, name, "Heartbeat")
        assert (tag, refused["code"]) == ("Refused", "not_for_me"), f"{name} says {refused}"
        counters = ask(mesh_home, name, "GetDaemonInfo")[1]["counters"]
        assert (counters["unknown_tags"], counters["schema_errors"]) == (1, 1)

        assert ask(mesh_home, name, "ExplainSubject", {"subject": "no such thing"}) == (
            "Explanation",
            {"sentences": []},
        )
        assert ask(mesh_home, name, "GetStory")[0] == "Story"
        assert set(snapshot(mesh_home, name)) <= SNAPSHOT_OF[name]

        # A broken mesh.toml is refused and nothing changes; a good one is taken.
        (mesh_home / "mesh.toml").write_text("[api]\nprot = 1\n")
        tag, refused = ask(mesh_home, name, "ReloadConfig")
        assert (tag, refused["code"]) == ("Refused", "config")
        assert "did you mean port?" in refused["detail"]
        (mesh_home / "mesh.toml").write_text("")
        assert ask(mesh_home, name, "ReloadConfig")[0] == "ConfigReloaded"

        log = daemon.log()
        assert f"{name} ready\n" in log
        assert "Traceback" not in log
        daemon.process.terminate()
        assert daemon.wait_exit() == 0


# -- what each small daemon is there for ---------------------------------------------------------------------------


def test_tunneld_signs_with_the_key_of_its_id_and_keeps_id_and_port_over_kills(mesh_home: Path) -> None:
    with running_daemon("tunneld", mesh_home) as first:
        before = snapshot(mesh_home, "tunneld")["TunnelChanged"]
        assert all(address.endswith(f"/p2p/{before['peer_id']}") for address in before["addresses"])
        tag, reply = ask(mesh_home, "tunneld", "SignRecord", {"payload": b"a record"})
        assert tag == "RecordSigned"
        record = reply["record"]
        assert (record["payload"], record["peer_id"]) == (b"a record", before["peer_id"])
        key = Ed25519PublicKey.from_public_bytes(public_key_of(before["peer_id"]))
        key.verify(record["signature"], b"a record")
        too_large = ask(mesh_home, "tunneld", "SignRecord", {"payload": bytes(1024 * 1024 + 1)})
        assert too_large[1]["code"] == "too_large"
        first.kill()
    with running_daemon("tunneld", mesh_home) as second:
        assert snapshot(mesh_home, "tunneld")["TunnelChanged"] == before
        assert "PRIVATE" not in second.log()


def test_gossipd_publishes_what_was_counted(mesh_home: Path) -> None:
    with running_daemon("gossipd", mesh_home), subscribed(mesh_home, "gossipd") as sub:
        hear(sub, "Heartbeat")
        for _ in range(3):
            assert ask(mesh_home, "gossipd", "CountUnserved", {"model": "qwen", "count": 2}) == (
                "Done",
                {"detail": "", "subject": ""},
            )
        (demand,) = hear(sub, "DemandChanged")[3]["demand"]
        assert demand == {"model": "qwen", "requests_total": 6, "per_minute_1m": 6.0, "per_minute_10m": 0.6}


def test_electiond_refuses_to_place_on_an_idle_node_with_the_way_out(mesh_home: Path) -> None:
    with running_daemon("electiond", mesh_home):
        tag, refused = ask(mesh_home, "electiond", "PlaceModel", {"model": "qwen"})
        assert (tag, refused["code"]) == ("Refused", "idle")
        assert "Run 'meshctl up'" in refused["detail"]


# -- bad state -------------------------------------------------------------------------------------------------------


def refused_start(name: str, home: Path, **env: str) -> str:
    daemon = start_daemon_process(name, home, **env)
    try:
        assert daemon.wait_exit(15) == 1, daemon.log()
    finally:
        daemon.end()
    assert "Traceback" not in daemon.log()
    return daemon.log()


def test_a_taken_mesh_port_is_said_in_the_log(mesh_home: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        said = refused_start("tunneld", mesh_home, MESH_PORT=str(port))
    assert f"mesh port {port} (UDP and TCP on 127.0.0.1) cannot be bound" in said


def test_damaged_state_is_said_in_the_log_and_nothing_is_lost(mesh_home: Path) -> None:
    state = mesh_home / "state"
    state.mkdir()
    for name, file in (("gossipd", "mesh.json"), ("tunneld", "node_key.pem")):
        (state / file).write_text("damaged")
        assert "restore it from a backup" in refused_start(name, mesh_home)
        assert (state / file).read_text() == "damaged"


def test_a_home_too_long_is_said_in_the_log(mesh_home: Path) -> None:
    home = mesh_home / ("x" * 60)
    home.mkdir()
    assert "set MESH_HOME to a shorter path" in refused_start("tunneld", home)


# -- together, restarted one by one ----------------------------------------------------------------------------------


class HandMadeLauncherd:
    """A launcherd on the real bus that has two models on disk; the smaller one runs."""

    def __init__(self, paths: NodePaths, tasks: Tasks) -> None:
        self.inventory = InventoryChanged(models=(disk_model("small", 10**9), disk_model("large", 2 * 10**9)))
        self.device = DeviceChanged(
            device="cpu", vram_bytes=8 * 10**9, total_bytes=10**10, reserve_bytes=0, engine="test"
        )
        self.slot = SlotChanged(
            slot_id=SlotId("s1"),
            model=ModelName("small"),
            type="llm",
            state="ready",
            reason="loaded",
            origin="request",
            parallel=4,
            requests_total=100,
        )
        self.silent = False
        self.bus = BusServer("launcherd", paths, self, self.answer, tasks)
        self.bus.start()

    def state_line(self) -> str:
        return "1 model loaded"

    def snapshot(self) -> list[codec.Message]:
        if self.silent:
            raise StillStarting("a launcherd that takes its time")
        return [self.inventory, self.device, self.slot]

    def story(self, limit: int) -> tuple[StoryEntry, ...]:
        return ()

    async def answer(self, request: codec.Message, deadline_seconds: float) -> codec.Message:
        return Done()


def disk_model(name: str, size_bytes: int) -> LocalModel:
    return LocalModel(name=ModelName(name), type="llm", path=f"/m/{name}.gguf", file_size_bytes=size_bytes)


class Served:
    """What somebody who mirrors electiond is told, over all its lives."""

    def __init__(self, paths: NodePaths, tasks: Tasks) -> None:
        self.heard: list[tuple[str, tuple[str, ...]]] = []
        self.mirror = Mirror("electiond", paths, self.snapshot, self.take)
        self.mirror.start(tasks)

    def snapshot(self, messages: list[codec.Message]) -> None:
        assert messages, "an empty snapshot would take everything back"
        for message in messages:
            self.take(message)

    def take(self, message: codec.Message) -> None:
        match message:
            case RoutesChanged(routes=routes):
                self.heard.append(("routes", tuple(route.model for route in routes)))
            case AssignmentsChanged(assignments=assignments):
                self.heard.append(("assigned", tuple(item.model for item in assignments)))
            case CatalogChanged(models=models):
                self.heard.append(("catalog", tuple(model.name for model in models)))

    def last(self, what: str) -> tuple[str, ...]:
        return next((names for kind, names in reversed(self.heard) if kind == what), ())


def test_no_restart_alone_changes_what_is_served(node_paths: NodePaths) -> None:
    """SIGKILL of any one of them costs nothing; what was said stays true in between. Each is killed in turn."""
    home = node_paths.home
    node_paths.config_file.write_text("")
    running: dict[str, DaemonProcess] = {}

    async def start(name: str) -> None:
        running[name] = start_daemon_process(name, home)
        await asyncio.to_thread(running[name].wait_ready)

    async def scene() -> None:
        tasks = Tasks()
        launcherd = HandMadeLauncherd(node_paths, tasks)
        served = Served(node_paths, tasks)
        for name in ("gossipd", "electiond", "tunneld"):
            await start(name)
        await until(lambda: served.last("routes") == ("small",), 15, f"the running model is routed {served.heard}")
        whole = {"routes": ("small",), "assigned": ("small",), "catalog": ("large", "small")}
        assert {what: served.last(what) for what in whole} == whole
        member = (await asyncio.to_thread(snapshot, home, "gossipd"))["MemberChanged"]
        incarnation = member["announcement"]["incarnation"]

        served.heard.clear()
        for name in ("electiond", "gossipd", "tunneld"):
            running[name].kill()
            launcherd.silent = True
            await start(name)
            if name != "tunneld":
                refused = await asyncio.to_thread(ask, home, name, "GetSnapshot")
                assert refused[1].get("code") == "starting", f"{name} speaks before it has heard launcherd: {refused}"
            launcherd.silent = False
            await asyncio.to_thread(snapshot, home, name)
            info = await asyncio.to_thread(ask, home, name, "GetDaemonInfo")
            assert info[1]["pid"] == running[name].pid

        member = (await asyncio.to_thread(snapshot, home, "gossipd"))["MemberChanged"]
        said = member["announcement"]
        assert said["incarnation"] == incarnation + 1
        assert [item["model"] for item in said["hosted"]] == ["small"]
        assert said["addresses"]
        # The last restart has long settled: everything that electiond's listeners were told meanwhile was the same.
        assert [(what, names) for what, names in served.heard if names != whole[what]] == []
        assert served.heard, "electiond's second life has spoken"

        # And it still works: the slot goes, the route goes with it.
        launcherd.slot = SlotChanged(
            slot_id=SlotId("s1"),
            model=ModelName("small"),
            type="llm",
            state="unloaded",
            reason="x",
            origin="request",
            ended_by="owner",
        )
        launcherd.bus.publish(launcherd.slot)
        await until(lambda: served.last("routes") == (), 10, "the route is withdrawn")
        assert served.last("assigned") == ()
        await tasks.cancel()
        launcherd.bus.close()
        served.mirror.close()

    try:
        run_async(scene(), 50)
        before = json.loads((node_paths.state / "mesh.json").read_text())
        running["gossipd"].process.send_signal(signal.SIGTERM)
        assert running["gossipd"].wait_exit() == 0
        kept = json.loads((node_paths.state / "demand.json").read_text())
        assert kept["totals"] == {"small": 100}, "counted once over two lives of gossipd"
        assert before["mesh_id"]
    except BaseException:
        for daemon in running.values():
            print(f"--- {daemon.name}\n{daemon.log()}")
        raise
    finally:
        for daemon in running.values():
            daemon.end()


def test_the_three_start_within_seconds_of_each_other_in_any_order(node_paths: NodePaths) -> None:
    """Start order is no dependency: each begins first once, and the node knows itself within seconds."""
    home = node_paths.home
    node_paths.config_file.write_text("")
    with ExitStack() as stack:
        start = time.monotonic()
        for name in ("electiond", "gossipd", "tunneld"):
            stack.enter_context(running_daemon(name, home))
        wait_until(lambda: "MemberChanged" in snapshot(home, "gossipd"), 10, "gossipd knows this node")
        peer = snapshot(home, "tunneld")["TunnelChanged"]["peer_id"]
        assert snapshot(home, "gossipd")["MemberChanged"]["announcement"]["peer_id"] == peer
        assert ask(home, "electiond", "GetDaemonInfo")[0] == "DaemonInfo"
        assert time.monotonic() - start < 15
