"""launcherd as a process, with real engines: the embedded one, and scripted ones where something has to go wrong."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import msgpack
import zmq

from shared.errors import RequestRefused
from shared.ids import HolderId, ModelName, RequestId, SlotId
from shared.io.bus import BusServer
from shared.io.drive import Tasks
from shared.messages.daemon import ConfigReloaded, GetDaemonInfo, ReloadConfig
from shared.messages.leases import AcquireLease, EngineSuspected
from shared.messages.models import (
    Assignment,
    AssignmentsChanged,
    DeviceChanged,
    EngineLog,
    GetEngineLog,
    InventoryChanged,
    LoadModel,
    PinModel,
    RescanModels,
    SetMaxLoadedModels,
    UnloadModel,
)
from shared.paths import NodePaths
from tests.daemons import start_daemon_process
from tests.engines import tiny_models
from tests.engines.scripted_engine import Script
from tests.launcherd.launcher_node import LauncherNode, alive, change_script, chat, pid_of
from tests.waiting import run_async, until, wait_until

# -- the normal day ------------------------------------------------------------------------------------------


def test_load_lease_and_chat_with_a_real_model(node: LauncherNode) -> None:
    node.start()
    loaded = node.load("tiny-llm")
    slot = node.slot("tiny-llm")
    assert slot is not None
    assert (slot.state, slot.slot_id, slot.parallel, slot.context_tokens) == ("ready", loaded.slot_id, 2, 512)
    lease = node.acquire("tiny-llm.gguf")
    assert lease.slot_id == loaded.slot_id
    assert chat(lease)
    node.report(lease)
    assert node.load("tiny-llm").already
    assert node.load("tiny-llm").slot_id == loaded.slot_id
    assert "1 model loaded" in node.ask(GetDaemonInfo()).state
    assert "loaded in" in node.why("tiny-llm")
    node.ask(PinModel(model=ModelName("tiny-llm"), pinned=True))
    node.ask(SetMaxLoadedModels(limits=(2, -1)))
    daemon = node.daemon
    assert daemon is not None
    wait_until(lambda: "event=model_pinned model=tiny-llm" in daemon.log(), 5, "the pin is logged")
    wait_until(lambda: 'event=limits_set max_loaded_models="2 -1"' in daemon.log(), 5, "the limits are logged")


def test_a_request_loads_its_model_and_displaces_the_idle_one(node: LauncherNode) -> None:
    node.start()
    first = node.acquire("tiny-llm")
    node.give_back(first)
    node.acquire("tiny-embedding")
    other = node.acquire("tiny-other")
    assert chat(other)
    assert node.slot("tiny-llm") is None
    assert node.slot("tiny-embedding") is not None
    assert "makes room for tiny-other" in node.why("tiny-llm")


def test_a_plain_req_socket_can_drive_it(node: LauncherNode) -> None:
    """DESIGN §3: a ROUTER that a plain `zmq.REQ` client can talk to."""
    node.start()
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(NodePaths(node.home).requests("launcherd"))
        for tag, fields, expected in (
            ("LoadModel", {"model": "tiny-llm"}, "ModelLoaded"),
            ("AcquireLease", {"holder": "h", "request_id": "r", "model": "tiny-llm"}, "LeaseGranted"),
            ("AcquireLease", {"holder": "h", "request_id": "r"}, "Refused"),
            ("PlaceModel", {"model": "tiny-llm"}, "Refused"),
        ):
            socket.send(msgpack.packb([f"{tag}{fields}"[:60], 20.0, tag, fields]))
            assert socket.poll(20_000)
            assert msgpack.unpackb(socket.recv())[1] == expected


def test_what_it_publishes_about_models_and_device(node: LauncherNode, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but not really")
    node.configure(models={"folders": [str(node.models), str(tmp_path)]})
    node.start()
    node.ask(RescanModels())
    snapshot = node.snapshot()
    inventory = next(item for item in snapshot if isinstance(item, InventoryChanged))
    models = {model.name: model for model in inventory.models}
    assert models[ModelName("tiny-llm")].type == "llm"
    assert models[ModelName("tiny-embedding")].type == "embedding"
    assert models[ModelName("tiny-llm")].need_bytes > models[ModelName("tiny-llm")].file_size_bytes
    assert any(item.path.endswith("broken.gguf") and item.reason for item in inventory.skipped)
    assert "was skipped" in node.why("broken")
    device = wait_until(
        lambda: next((item for item in node.snapshot() if isinstance(item, DeviceChanged)), None), 10, "the device"
    )
    assert device is not None
    assert device.engine.startswith("xllamacpp")
    assert 0 < device.vram_bytes < device.total_bytes


def test_a_model_that_came_a_moment_ago_is_found(node: LauncherNode, tmp_path: Path) -> None:
    node.configure(models={"folders": [str(tmp_path)]})
    node.start()
    assert node.refusal(LoadModel(model=ModelName("late"))).code == "model_not_found"
    tiny_models.write_llm(tmp_path / "late.gguf")
    assert wait_until(lambda: _try_load(node, "late"), 5, "the new file is found")


def _try_load(node: LauncherNode, model: str) -> bool:
    try:
        node.load(model)
    except RequestRefused:
        return False
    return True


def test_assignments_of_electiond_are_loaded(node: LauncherNode) -> None:
    """electiond chooses the node, launcherd the victim."""

    class Assigns:
        said = AssignmentsChanged(
            assignments=(Assignment(model=ModelName("tiny-other"), origin="flag", reason="named by its owner"),)
        )

        def state_line(self) -> str:
            return ""

        def snapshot(self) -> list[AssignmentsChanged]:
            return [self.said]

        def story(self, limit: int) -> tuple[()]:
            return ()

    async def work() -> None:
        async def nothing(request: object, deadline: float) -> object:
            raise AssertionError(request)

        tasks = Tasks()
        paths = NodePaths(node.home)
        paths.prepare()
        bus = BusServer("electiond", paths, Assigns(), nothing, tasks)
        bus.start()
        node.daemon = start_daemon_process("launcherd", node.home)
        daemon = node.daemon
        await until(lambda: "event=model_ready model=tiny-other" in daemon.log(), 20, "the assigned model is ready")
        await tasks.cancel()
        bus.close()

    run_async(work(), 30)
    slot = node.slot("tiny-other")
    assert slot is not None
    assert slot.origin == "flag"
    assert "It belongs on this node (flag: named by its owner)" in node.why("tiny-other")


def test_the_engine_log_can_be_read(node: LauncherNode) -> None:
    node.start()
    assert node.refusal(GetEngineLog(model=ModelName("tiny-llm"))).code == "no_log"
    node.load("tiny-llm")
    reply = node.ask(GetEngineLog(model=ModelName("tiny-llm"), lines=5))
    assert isinstance(reply, EngineLog)
    assert 0 < len(reply.lines) <= 5
    assert Path(reply.path).parent == node.home / "engines"


# -- what must not go wrong ----------------------------------------------------------------------------------


def test_sigkill_of_launcherd_costs_no_request_and_keeps_the_engine(scripted: LauncherNode) -> None:
    """TRAPS 32; DESIGN §2: SIGKILL of launcherd: no failed request; engines adopted, leases survive."""
    node = scripted
    node.start()
    lease = node.acquire("tiny-llm")
    before = node.slot("tiny-llm")
    answers: list[str] = []
    client = threading.Thread(target=lambda: answers.append(chat(lease, max_tokens=60)))
    client.start()
    node.restart_after_kill()
    after = node.slot("tiny-llm")
    assert before is not None
    assert after is not None
    assert (after.pid, after.slot_id, after.state) == (before.pid, before.slot_id, "ready")
    assert after.in_use == 2  # Remembered credits count as in use until they are announced again.
    confirmed = node.report(lease, in_use=1)
    assert confirmed.revoked == ()
    slot = node.slot("tiny-llm")
    assert slot is not None
    assert slot.in_use == 1
    client.join(10)
    assert answers == ["".join(f"w{number} " for number in range(60))]
    assert node.engines() == [before.pid]


def test_what_was_asked_of_a_killed_launcherd_is_asked_again(scripted: LauncherNode) -> None:
    """TRAPS 32: kill -9 during a load: restart converges, no orphan, no double load."""
    node = scripted
    node.use_script(Script(load_seconds=1.0))
    node.start()
    leases: list[object] = []
    client = threading.Thread(target=lambda: leases.append(node.acquire("tiny-llm", seconds=20)))
    client.start()
    node.wait_state("tiny-llm", "loading")
    wait_until(node.engines, 5, "an engine process")
    node.restart_after_kill()
    client.join(20)
    assert len(leases) == 1
    slot = node.wait_state("tiny-llm", "ready")
    assert node.engines() == [slot.pid]


def test_sigkill_during_an_eviction_converges(scripted: LauncherNode) -> None:
    """TRAPS 32: kill -9 during an eviction: the leased model is still not stopped before its requests end."""
    node = scripted
    node.start()
    lease = node.acquire("tiny-llm")
    node.ask(LoadModel(model=ModelName("tiny-other"), wait=False))
    node.wait_state("tiny-llm", "draining")
    node.restart_after_kill()
    node.ask(LoadModel(model=ModelName("tiny-other"), wait=False))
    assert chat(lease, max_tokens=2)
    words = "announced again"
    wait_until(
        lambda: words in node.wait_state("tiny-other", "queued").reason, 5, f"it waits until credits are {words}"
    )
    node.report(lease, in_use=1)
    node.wait_state("tiny-llm", "draining")
    assert node.report(lease, in_use=1).recalled == (lease.slot_id,)
    node.give_back(lease)
    slot = node.wait_state("tiny-other", "ready")
    assert node.engines() == [slot.pid]


def test_sigkill_of_an_engine_is_noticed_within_a_second(scripted: LauncherNode) -> None:
    """An engine that exits is noticed within 1 s, withdrawn at once, restarted with back-off."""
    node = scripted
    node.start()
    node.load("tiny-llm")
    old = node.slot("tiny-llm")
    assert old is not None
    os.kill(old.pid, signal.SIGKILL)
    slot = node.wait_state("tiny-llm", "restarting", 1.0)
    assert slot.slot_id != old.slot_id
    assert "SIGKILL" in slot.reason
    slot = node.wait_state("tiny-llm", "ready")
    assert slot.restarts == 1
    assert chat(node.acquire("tiny-llm"))
    assert "SIGKILL" in node.why("tiny-llm")


def test_a_crash_loop_ends_with_the_engines_last_words(scripted: LauncherNode) -> None:
    """Crash loops stop with the engine's last log lines as the reason."""
    node = scripted
    node.use_script(Script(exit_status=7, stderr="CUDA error: out of memory"))
    node.start()
    refused = node.refusal(LoadModel(model=ModelName("tiny-llm")))
    assert refused.code == "load_failed"
    assert "out of memory" in refused.detail
    assert "exit status 7" in refused.detail
    assert refused.retry_after_seconds is not None
    slot = node.slot("tiny-llm")
    assert slot is not None
    assert slot.state == "failed"
    assert "out of memory" in slot.reason
    again = node.refusal(AcquireLease(holder=HolderId("h"), request_id=RequestId("r"), model=ModelName("tiny-llm")))
    assert again.code == "load_failed"
    reply = node.ask(GetEngineLog(model=ModelName("tiny-llm")))
    assert any("out of memory" in line for line in reply.lines)
    assert node.engines() == []


def test_a_hung_engine_is_replaced(scripted: LauncherNode) -> None:
    """After 2 s of silence it is probed …, after `hang_seconds` it counts as hung: killed and restarted."""
    node = scripted
    node.configure(engine={"hang_seconds": 0.3})
    node.start()
    lease = node.acquire("tiny-llm")
    change_script(lease, hang="accept", ignore_sigterm=True)
    node.ask(EngineSuspected(slot_id=lease.slot_id, detail="2 s of silence"))
    old = node.slot("tiny-llm")
    assert old is not None
    wait_until(lambda: (slot := node.slot("tiny-llm")) and slot.slot_id != lease.slot_id, 15, "a new slot")
    assert "its engine hung: no answer" in node.why("tiny-llm")
    assert node.report(lease, in_use=1).revoked == (lease.slot_id,)  # Its stream ended with the engine.
    new = node.acquire("tiny-llm")
    assert new.slot_id != lease.slot_id
    assert chat(new)
    assert not alive(old.pid)


def test_a_stopped_node_leaves_no_engine_however_stubborn(scripted: LauncherNode) -> None:
    """On "node" all engines are stopped in parallel (SIGTERM, 5 s, SIGKILL)."""
    node = scripted
    node.configure(models={"max_loaded_models": [2, 2]})
    node.use_script(Script(ignore_sigterm=True))
    daemon = node.start()
    node.load("tiny-llm")
    node.load("tiny-other")
    engines = node.engines()
    assert len(engines) == 2
    daemon.process.terminate()
    assert daemon.wait_exit(9) == 0  # Both at once: 5 s, not 10 s.
    assert node.engines() == []
    assert not list((node.home / "engines").glob("*.json"))


def test_engines_outlive_a_launcherd_whose_supervisor_died(scripted: LauncherNode) -> None:
    """DESIGN §2: engines don't die with supervisord or launcherd: the next start adopts them."""
    node = scripted
    daemon = node.start(SUPERVISOR_SERVER_URL=f"unix://{node.home}/nobody-here.sock")
    node.load("tiny-llm")
    pid = pid_of(node, "tiny-llm")
    daemon.process.terminate()
    assert daemon.wait_exit() == 0
    assert "kind=orphaned" in daemon.log()
    assert node.engines() == [pid]
    node.start()
    assert pid_of(node, "tiny-llm") == pid
    assert node.load("tiny-llm").already


def test_a_stop_in_the_middle_of_a_load_leaves_nothing(scripted: LauncherNode) -> None:
    node = scripted
    node.use_script(Script(load_seconds=30))
    daemon = node.start()
    node.ask(LoadModel(model=ModelName("tiny-llm"), wait=False))
    wait_until(node.engines, 5, "an engine process")
    daemon.process.terminate()
    assert daemon.wait_exit(9) == 0
    assert node.engines() == []


def test_unload_in_the_middle_of_a_load(scripted: LauncherNode) -> None:
    """TRAPS 31: stopping is safe at any time."""
    node = scripted
    node.use_script(Script(load_seconds=30))
    node.start()
    node.ask(LoadModel(model=ModelName("tiny-llm"), wait=False))
    wait_until(node.engines, 5, "an engine process")
    node.ask(UnloadModel(model=ModelName("tiny-llm")))
    assert node.engines() == []
    assert node.slot("tiny-llm") is None


def test_a_missing_file_evicts_nothing(node: LauncherNode, tmp_path: Path) -> None:
    """TRAPS 23: missing file: nothing evicted, clear error."""
    tiny_models.write_llm(tmp_path / "a.gguf")
    tiny_models.write_llm(tmp_path / "b.gguf")
    node.configure(models={"folders": [str(tmp_path)], "max_loaded_models": [2]})
    node.start()
    loaded = node.load("a")
    (tmp_path / "b.gguf").unlink()
    refused = node.refusal(LoadModel(model=ModelName("b")))
    assert refused.code in ("model_file_missing", "model_not_found")
    slot = node.slot("a")
    assert slot is not None
    assert (slot.state, slot.slot_id) == ("ready", loaded.slot_id)
    assert wait_until(
        lambda: node.refusal(LoadModel(model=ModelName("b"))).code == "model_not_found", 5, "the folders are looked at"
    )


def test_a_model_that_cannot_fit_is_refused_with_the_numbers(node: LauncherNode) -> None:
    """TRAPS 29."""
    node.configure(node={"max_vram_bytes": 10**6})
    node.start()
    refused = node.refusal(LoadModel(model=ModelName("tiny-llm"), context_tokens=4096))
    assert refused.code == "model_too_large"
    assert "1.0 MB" in refused.detail


def test_two_launcherds_with_one_home(node: LauncherNode) -> None:
    """The second says who is there and ends; the first is not disturbed."""
    first = node.start()
    second = start_daemon_process("launcherd", node.home)
    try:
        assert second.wait_exit() == 1
        assert f"pid {first.pid}" in second.log()
    finally:
        second.end()
    assert node.load("tiny-llm")


def test_an_idle_node_loads_by_hand_only(node: LauncherNode) -> None:
    """Without mesh.toml: AcquireLease is refused with `idle`, but LoadModel works; the file ends it."""
    (node.home / "mesh.toml").unlink()
    home_models = node.home / ".models"
    home_models.mkdir()
    tiny_models.write_llm(home_models / "own.gguf")
    node.start()
    request = AcquireLease(holder=HolderId("h"), request_id=RequestId("r"), model=ModelName("own"))
    refused = node.refusal(request)
    assert refused.code == "idle"
    assert "meshctl" in refused.detail
    loaded = node.load("own")
    node.configure(models={"folders": [str(home_models)]}, engine={"context_tokens": 0})
    node.ask(ReloadConfig())
    lease = node.acquire("own")
    assert lease.slot_id == loaded.slot_id


def test_reload_keeps_models_and_bad_files_change_nothing(node: LauncherNode) -> None:
    """ReloadConfig keeps untouched models loaded; limits take effect for later loads."""
    node.start()
    node.load("tiny-llm")
    pid = pid_of(node, "tiny-llm")
    node.configure(models={"max_loaded_models": [2]}, api={"port": 12345})
    reply = node.ask(ReloadConfig())
    assert isinstance(reply, ConfigReloaded)
    assert reply.changed == ("models.max_loaded_models",)
    node.load("tiny-other")
    assert pid_of(node, "tiny-llm") == pid
    (node.home / "mesh.toml").write_text("[models]\nmax_loded_models = 1\n")
    refused = node.refusal(ReloadConfig())
    assert refused.code == "config"
    assert "max_loaded_models" in refused.detail
    assert pid_of(node, "tiny-llm") == pid


def test_a_client_loads_nothing(node: LauncherNode) -> None:
    """[node] client = true: it only consumes."""
    node.configure(node={"client": True})
    node.start()
    refused = node.refusal(LoadModel(model=ModelName("tiny-llm")))
    assert (refused.code, "--no-client" in refused.detail) == ("client", True)
    node.configure(node={"client": False})
    node.ask(ReloadConfig())
    assert not node.load("tiny-llm").already


def test_leftovers_of_another_life_are_swept(scripted: LauncherNode) -> None:
    """DESIGN §2: the next start adopts or sweeps. Nothing is ever orphaned."""
    node = scripted
    daemon = node.start()
    node.load("tiny-llm")
    node.load("tiny-embedding")
    assert len(node.engines()) == 2
    daemon.kill()
    records = sorted((node.home / "engines").glob("*.json"))
    kept = _pid_of_record(records[0])
    records[1].write_text("{not json")
    node.start()
    wait_until(lambda: node.engines() == [kept], 5, "only the engine with a readable record")


def _pid_of_record(path: Path) -> int:
    pid: int = json.loads(path.read_text())["identity"]["pid"]
    return pid


def test_a_queue_that_is_full_says_when_to_come_back(scripted: LauncherNode) -> None:
    """TRAPS 35: bounded queue, 429 with Retry-After."""
    node = scripted
    node.configure(engine={"queue_limit": 1, "parallel": 1})
    node.start()
    lease = node.acquire("tiny-llm")
    waiting = threading.Thread(target=lambda: node.give_up(_request("r1"), 1.5))
    waiting.start()
    wait_until(lambda: (slot := node.slot("tiny-llm")) is not None and slot.waiting == 1, 5, "one request waits")
    refused = node.refusal(_request("r2"))
    assert refused.code == "overloaded"
    assert refused.retry_after_seconds
    node.report(lease, in_use=1)
    waiting.join(10)
    wait_until(lambda: (slot := node.slot("tiny-llm")) is not None and slot.waiting == 0, 5, "its caller is gone")


def _request(request_id: str) -> AcquireLease:
    return AcquireLease(holder=HolderId("proxy"), request_id=RequestId(request_id), model=ModelName("tiny-llm"))


def test_reports_about_unknown_slots_are_revoked(node: LauncherNode) -> None:
    """`revoked`: slots that are gone."""
    node.start()
    lease = node.acquire("tiny-llm")
    ghost = replace(lease, slot_id=SlotId("ghost"))
    assert node.report(ghost).revoked == ("ghost",)
