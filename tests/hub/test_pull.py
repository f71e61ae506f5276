"""launcherd gets models and gets rid of them: the real daemon, the real client, a hub on loopback, a real tiny model.

Rules: docs/spec/downloads.md, docs/spec/registry.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.ids import ModelName
from shared.messages.daemon import Done
from shared.messages.downloads import CancelPull, DeleteModel, DownloadChanged, PullModel, RegistryChanged
from shared.messages.models import InventoryChanged, LocalModel, RescanModels
from shared.paths import REPOSITORY
from tests.engines import tiny_models
from tests.hub.fake_hub import FakeHub, fake_hub, sha256
from tests.launcherd.launcher_node import LauncherNode, chat, launcher_node
from tests.waiting import wait_until

REPO = "tiny/Real-GGUF"


@pytest.fixture
def hub(tiny_files: dict[str, bytes]) -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.repos[REPO] = dict(tiny_files)
        yield running


@pytest.fixture
def node(mesh_home: Path, tmp_path: Path, hub: FakeHub) -> Iterator[LauncherNode]:
    folder = tmp_path / "own"
    folder.mkdir()
    with launcher_node(mesh_home, folder) as running:
        running.start(HF_ENDPOINT=hub.endpoint)
        yield running


def pull(node: LauncherNode, model: str, **fields: Any) -> Done:
    reply = node.ask(PullModel(model=model, **fields), 60)
    assert isinstance(reply, Done)
    return reply


def asked(node: LauncherNode, request: Any, seconds: float = 60) -> Future[Any]:
    """Asks in the background: the reply, or what was raised."""
    return ThreadPoolExecutor(1).submit(node.ask, request, seconds)


def models(node: LauncherNode) -> dict[str, LocalModel]:
    [inventory] = [item for item in node.snapshot() if isinstance(item, InventoryChanged)]
    return {model.name: model for model in inventory.models if not model.builtin}


def download(node: LauncherNode) -> DownloadChanged | None:
    found = [item for item in node.snapshot() if isinstance(item, DownloadChanged)]
    return found[0] if found else None


def registered(node: LauncherNode, name: str) -> Any:
    [registry] = [item for item in node.snapshot() if isinstance(item, RegistryChanged)]
    return next((model for model in registry.models if model.name == name), None)


def workers(node: LauncherNode) -> list[psutil.Process]:
    assert node.daemon is not None
    return [
        child
        for child in psutil.Process(node.daemon.pid).children(recursive=True)
        if "download_worker" in " ".join(child.cmdline())
    ]


def half(node: LauncherNode, name: str, number: int) -> None:
    """Wait until so many bytes of a download are on disk."""
    folder = node.home / "models" / ".partial" / name
    wait_until(
        lambda: sum(path.stat().st_size for path in folder.glob("*.part")) == number, 20, f"{number} bytes of {name}"
    )


def test_a_pulled_model_is_known_loads_and_answers(node: LauncherNode, hub: FakeHub) -> None:
    """`Done` means that the model is on this node's disk and in its inventory." """
    reply = pull(node, f"{REPO}:Q8_0")
    assert reply.subject == "Real-Q8_0"
    known = models(node)["Real-Q8_0"]
    assert (known.checkpoint, known.recipe) == (f"{REPO}:Q8_0", "llamacpp")
    assert Path(known.path) == node.home / "models" / "Real-Q8_0" / "Real-Q8_0.gguf"
    assert known.file_hash == sha256(hub.repos[REPO]["Real-Q8_0.gguf"]), "as verified: not read again"
    entry = registered(node, "Real-Q8_0")
    assert entry.downloaded
    assert entry.user
    assert entry.size_bytes == known.file_size_bytes
    node.load("Real-Q8_0")
    assert chat(node.acquire("Real-Q8_0"))
    before = len(hub.asked)
    assert "already" in pull(node, f"{REPO}:Q8_0").detail
    assert "already" in pull(node, "real-q8_0").detail
    assert len(hub.asked) == before


def test_a_name_labels_and_parts(node: LauncherNode, hub: FakeHub) -> None:
    """What the registry says of a model, its inventory says: checkpoint, labels, recipe; its type by its labels." """
    reply = pull(node, "mine", checkpoint=f"{REPO}:F16", labels=("embeddings",))
    assert reply.subject == "mine"
    known = models(node)["mine"]
    assert (known.type, known.labels, known.checkpoint) == ("embedding", ("embeddings",), f"{REPO}:F16")
    assert len(list((node.home / "models" / "mine").glob("*.gguf"))) == 3
    node.restart_after_kill()
    wait_until(lambda: "mine" in models(node), 10, "the model is there again")
    assert models(node)["mine"].labels == ("embeddings",)
    assert registered(node, "mine").user
    refused = node.refusal(PullModel(model="mine", checkpoint=f"{REPO}:Q8_0"), 60)
    assert refused.code == "name_taken"


def test_launcherd_killed_in_the_middle_goes_on_where_it_was(node: LauncherNode, hub: FakeHub) -> None:
    """launcherd killed with -9 in the middle: the next one goes on, and fetches nothing twice." """
    size = len(hub.repos[REPO]["Real-Q8_0.gguf"])
    cut = size // 2
    hub.fault("stall", at=cut)
    node.ask(PullModel(model=f"{REPO}:Q8_0", wait=False))
    half(node, "Real-Q8_0", cut)
    [worker] = workers(node)
    assert "Real-Q8_0" not in models(node)
    assert node.daemon is not None
    node.daemon.kill()
    wait_until(lambda: not worker.is_running() or worker.status() == "zombie", 5, "the worker ends with launcherd")
    node.start(HF_ENDPOINT=hub.endpoint)
    wait_until(lambda: "Real-Q8_0" in models(node), 20, "it is there")
    assert hub.sent["Real-Q8_0.gguf"] == size
    wait_until(lambda: download(node) is None, 5, "nothing is being downloaded")
    assert registered(node, "Real-Q8_0").user
    assert json.loads((node.home / "state" / "downloads.json").read_text()) == []


def test_launcherd_killed_before_it_heard_of_the_end(node: LauncherNode, hub: FakeHub) -> None:
    """The model is in place, and nobody has registered it."""
    reply = pull(node, "mine", checkpoint=f"{REPO}:Q8_0", labels=("vision",))
    assert node.daemon is not None
    node.daemon.kill()
    pending = [{"name": "mine", "checkpoint": f"{REPO}:Q8_0", "labels": ["vision"], "register": True}]
    (node.home / "state" / "downloads.json").write_text(json.dumps(pending))
    (node.home / "state" / "registry.json").unlink()
    node.start(HF_ENDPOINT=hub.endpoint)
    wait_until(lambda: "mine" in models(node) and models(node)["mine"].labels == ("vision",), 20, "it is registered")
    assert registered(node, reply.subject).user
    assert hub.sent["Real-Q8_0.gguf"] == len(hub.repos[REPO]["Real-Q8_0.gguf"])


@pytest.mark.slow
def test_a_killed_download_process_is_started_again(node: LauncherNode, hub: FakeHub) -> None:
    size = len(hub.repos[REPO]["Real-Q8_0.gguf"])
    hub.fault("stall", at=size // 2)
    reply = asked(node, PullModel(model=f"{REPO}:Q8_0"))
    half(node, "Real-Q8_0", size // 2)
    [worker] = workers(node)
    worker.kill()
    assert reply.result(30).subject == "Real-Q8_0"
    assert hub.sent["Real-Q8_0.gguf"] == size


def test_launcherd_answers_others_while_a_download_stalls_and_cancels_it(node: LauncherNode, hub: FakeHub) -> None:
    """Cancelling stops the download; those who wait for it are told; what is there stays." """
    tiny_models.write_llm(node.models / "own.gguf")
    hub.fault("stall", at=10_000, times=9)
    first = asked(node, PullModel(model=f"{REPO}:Q8_0"))
    half(node, "Real-Q8_0", 10_000)
    node.ask(PullModel(model=f"{REPO}:F16", wait=False))
    states = {item.model: item for item in node.snapshot() if isinstance(item, DownloadChanged)}
    assert states[ModelName("Real-Q8_0")].state == "downloading"
    assert states[ModelName("Real-F16")].state == "queued"
    assert "Real-Q8_0" in states[ModelName("Real-F16")].reason
    assert "is on its way from" in node.why("Real-Q8_0")
    assert "waits for the download of Real-Q8_0" in node.why("Real-F16")
    assert "'meshctl pull Qwen3-4B' gets it" in node.why("Qwen3-4B")
    node.load("own")
    assert chat(node.acquire("own"))
    assert node.refusal(DeleteModel(model=ModelName("Real-Q8_0")), 60).code == "downloading"
    node.ask(CancelPull(model="Real-F16"))
    node.ask(CancelPull(model=f"{REPO}:Q8_0"))
    with pytest.raises(Exception, match="cancelled"):
        first.result(30)
    wait_until(lambda: workers(node) == [], 5, "no download process is left")
    assert node.refusal(CancelPull(model="Real-Q8_0")).code == "not_downloading"
    assert "10.0 kB" in node.ask(DeleteModel(model=ModelName("Real-Q8_0"))).detail
    assert node.refusal(DeleteModel(model=ModelName("Real-Q8_0")), 60).code == "model_not_found"


@pytest.mark.slow
def test_a_failure_that_another_try_cures(node: LauncherNode, hub: FakeHub) -> None:
    hub.fault("status", where="info", status=500)
    assert pull(node, f"{REPO}:Q8_0").subject == "Real-Q8_0"


def test_failures_say_what_to_do_and_leave_nothing(node: LauncherNode, hub: FakeHub) -> None:
    refused = node.refusal(PullModel(model=f"{REPO}:Q2_K"), 60)
    assert refused.code == "quantization_not_found"
    assert "F16" in refused.detail
    assert "Q8_0" in refused.detail
    assert node.refusal(PullModel(model="nonsense"), 60).code == "model_not_found"
    assert node.refusal(PullModel(model="no/such"), 60).code == "not_authorised"
    hub.repos[REPO]["Bad-Q4_0.gguf"] = b"GGUF" + b"\0" * 500
    refused = node.refusal(PullModel(model=f"{REPO}:Q4_0"), 60)
    assert refused.code == "not_usable"
    assert registered(node, "Real-Q4_0") is None
    assert not (node.home / "models" / "Real-Q4_0").exists()
    assert models(node) == {}


def test_delete_unloads_first_and_forgets(node: LauncherNode, hub: FakeHub) -> None:
    """Deleting unloads the model first, and deletes only what meshd downloaded." """
    pull(node, "mine", checkpoint=f"{REPO}:F16")
    node.load("mine")
    lease = node.acquire("mine")
    reply = asked(node, DeleteModel(model=ModelName("mine")))
    node.wait_state("mine", "draining")
    assert (node.home / "models" / "mine").exists()
    node.give_back(lease)
    assert "Deleted mine" in reply.result(20).detail
    assert not (node.home / "models" / "mine").exists()
    assert models(node) == {}
    assert registered(node, "mine") is None
    assert node.engines() == []


def test_what_meshd_did_not_download_is_never_deleted(node: LauncherNode) -> None:
    own = tiny_models.write_llm(node.models / "own.gguf")
    outside = tiny_models.write_llm(node.models / "linked.gguf")
    (node.home / "models").mkdir(exist_ok=True)
    (node.home / "models" / "link.gguf").symlink_to(outside)
    node.ask(RescanModels())
    for name in ("own", "link"):
        assert node.refusal(DeleteModel(model=ModelName(name)), 60).code == "not_ours"
    for name in ("../own", "/etc", "..", ""):
        assert node.refusal(DeleteModel(model=ModelName(name)), 60).code == "model_not_found"
    assert own.exists()
    assert outside.exists()


def test_models_of_other_engines_are_in_the_inventory(node: LauncherNode, tmp_path: Path) -> None:
    """A checkpoint of another engine that is on disk is a model: its type by its labels, its need by its size." """
    file = tmp_path / "whisper.bin"
    file.write_bytes(b"x" * 1000)
    pull(node, "hears", checkpoint=str(file), recipe="whispercpp")
    known = models(node)["hears"]
    assert (known.type, known.recipe, known.path, known.file_size_bytes) == ("audio", "whispercpp", str(file), 1000)
    assert known.checkpoint == str(file)
    refused = node.refusal(PullModel(model="gone", checkpoint=str(tmp_path / "none"), recipe="whispercpp"))
    assert refused.code == "file_not_found"
    assert "left as it is" in node.ask(DeleteModel(model=ModelName("hears"))).detail
    assert file.exists()
    assert "hears" not in models(node)


def test_other_engines_models_can_be_downloaded(node: LauncherNode, hub: FakeHub) -> None:
    hub.repos["tiny/whisper"] = {"ggml-base.bin": b"w" * 5_000, "ggml-tiny.bin": b"t" * 100}
    pull(node, "hears", checkpoint="tiny/whisper:ggml-base.bin", recipe="whispercpp")
    known = models(node)["hears"]
    assert known.path.endswith("models/hears/ggml-base.bin")
    assert known.file_size_bytes == 5_000
    node.ask(DeleteModel(model=ModelName("hears")))
    assert not (node.home / "models" / "hears").exists()


def test_a_broken_registry_is_kept_aside_and_said(mesh_home: Path, tmp_path: Path, hub: FakeHub) -> None:
    """A registry that can't be read is kept aside and said, and never keeps launcherd from starting." """
    state = mesh_home / "state"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    (state / "registry.json").write_text("{broken")
    (state / "downloads.json").write_text("[3]")
    with launcher_node(mesh_home, tmp_path) as node:
        daemon = node.start(HF_ENDPOINT=hub.endpoint)
        assert "registry_broken" in daemon.log()
        assert (state / "registry.json.broken").read_text() == "{broken"
        assert registered(node, "Qwen3-0.6B") is not None


def test_offline_uses_what_is_in_place(mesh_home: Path, tmp_path: Path, hub: FakeHub) -> None:
    """Offline, nothing is fetched and that is said at once; what is in place is used." """
    tiny_models.write_llm(tmp_path / "own.gguf")
    with launcher_node(mesh_home, tmp_path) as node:
        node.start(HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1")
        assert node.refusal(PullModel(model=f"{REPO}:Q8_0"), 60).code == "offline"
        assert "already" in pull(node, "own").detail
        assert hub.asked == []


def test_huggingface_hub_is_never_imported_by_launcherd() -> None:
    code = "import sys, services.launcherd.daemon as _; print({'huggingface_hub', 'httpx2'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert ran.stdout.strip() == "set()"


def test_a_silent_server_is_given_up_after_the_configured_time_and_asked_again(
    mesh_home: Path, tmp_path: Path, hub: FakeHub
) -> None:
    hub.fault("stall", at=10_000)
    with launcher_node(mesh_home, tmp_path) as node:
        daemon = node.start(HF_ENDPOINT=hub.endpoint, MESH_DOWNLOAD_STALL_SECONDS="0.5")
        assert pull(node, f"{REPO}:Q8_0").subject == "Real-Q8_0"
        assert "code=stalled" in daemon.log()
        assert hub.sent["Real-Q8_0.gguf"] == len(hub.repos[REPO]["Real-Q8_0.gguf"])
