"""The download process with the real client, against everything that goes wrong on the way (TRAPS 43).

Rules: docs/spec/downloads.md. After every ending: the model is whole and in place, or nothing of it is.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.launcherd.io import download_files, download_worker
from services.launcherd.io.download_files import DownloadError, PartialFolder, RemoteFile
from services.launcherd.io.download_worker import Job
from shared.paths import REPOSITORY
from tests.hub.conftest import BIG_BYTES, REPO, bytes_of
from tests.hub.fake_hub import FakeHub, sha256
from tests.waiting import wait_until

FILE = "Tiny-Q4_0.gguf"


class Worker:
    """One run of the download process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def last(self) -> dict[str, Any]:
        """Its last word."""
        self.process.wait(30)
        self._reader.join(10)
        return self.events[-1] if self.events else {}



class Desk:
    """Starts download processes for one downloads folder."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub = hub
        self.home = home
        self.folder = home / "models"
        self.folder.mkdir()
        self.running: list[Worker] = []

    def start(
        self,
        checkpoint: str = f"{REPO}:Q4_0",
        *,
        recipe: str = "llamacpp",
        mmproj: str = "",
        stall: float = 10.0,
        file_limit: int = 0,
        **env: str,
    ) -> Worker:
        request = {
            "name": "model",
            "checkpoint": checkpoint,
            "recipe": recipe,
            "mmproj": mmproj,
            "folder": str(self.folder),
            "stall_seconds": stall,
        }

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.launcherd.io.download_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
                "PYTHONPATH": str(REPOSITORY),
                "HOME": str(self.home),
                "HF_ENDPOINT": self.hub.endpoint,
                **env,
            },
            preexec_fn=limited if file_limit else None,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        worker = Worker(process)
        self.running.append(worker)
        return worker

    def run(
        self, checkpoint: str = f"{REPO}:Q4_0", *, recipe: str = "llamacpp", mmproj: str = "", stall: float = 10.0
    ) -> dict[str, Any]:
        """The same in this process: its last word. Importing the client takes longer than a small download."""
        events: list[dict[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_ENDPOINT", self.hub.endpoint)
            patch.setattr(download_worker, "tell", lambda event, **fields: events.append({"event": event, **fields}))
            download_worker.run(Job("model", checkpoint, recipe, mmproj, str(self.folder), stall))
        return events[-1]

    def model(self, file: str = "model.gguf") -> bytes | None:
        path = self.folder / "model" / file
        return path.read_bytes() if path.exists() else None

    def visible(self) -> list[str]:
        """What a scan of the folder could find."""
        found = self.folder.glob("[!.]*/**/[!.]*")
        return sorted(str(path.relative_to(self.folder)) for path in found if path.is_file())

    def partial_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / ".partial").glob("model/*.part"))


@pytest.fixture
def desk(hub: FakeHub, tmp_path: Path) -> Iterator[Desk]:
    made = Desk(hub, tmp_path)
    yield made
    for worker in made.running:
        worker.process.kill()
        worker.process.wait()
        for stream in (worker.process.stdin, worker.process.stdout):
            if stream is not None:
                stream.close()


def test_a_model_comes_into_place(desk: Desk, hub: FakeHub) -> None:
    worker = desk.start(HF_TOKEN="hf_secret")
    assert worker.last() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]
    assert desk.visible() == ["model/model.gguf"]
    assert not (desk.folder / ".partial" / "model").exists()
    planned = worker.events[0]
    assert (planned["event"], planned["file_count"], planned["bytes_total"]) == ("planned", 1, BIG_BYTES)
    assert hub.sent[FILE] == BIG_BYTES
    # The hub's token stays with the hub.
    assert {asked.headers.get("authorization") for asked in hub.asked if asked.server == "hub"} == {"Bearer hf_secret"}
    assert not any("authorization" in asked.headers for asked in hub.asked if asked.server == "content")


def test_without_a_quantisation_the_checkpoint_says_which_was_taken(desk: Desk, hub: FakeHub) -> None:
    hub.repos[REPO]["Tiny-Q4_K_M.gguf"] = bytes_of("k", 9_000)
    worker = desk.start(REPO)
    assert worker.last() == {"event": "done"}
    assert worker.events[0]["checkpoint"] == f"{REPO}:Q4_K_M"


def test_parts_come_together_and_a_projector_beside_them(desk: Desk, hub: FakeHub) -> None:
    assert desk.run(f"{REPO}:Q8_0", mmproj="mmproj-Tiny-f16.gguf") == {"event": "done"}
    assert desk.visible() == [
        "model/mmproj-model.gguf",
        *(f"model/model-0000{at}-of-00003.gguf" for at in (1, 2, 3)),
    ]
    assert desk.model("model-00002-of-00003.gguf") == hub.repos[REPO]["Tiny-Q8_0-00002-of-00003.gguf"]


def test_a_part_finished_model_in_parts_is_never_visible(desk: Desk, hub: FakeHub) -> None:
    """A model in parts comes into place with all its parts, in one step." """
    hub.fault("stall", at=10, file="00003")
    worker = desk.start(f"{REPO}:Q8_0")
    wait_until(lambda: desk.partial_bytes() == 10, 10, "two parts and a bit are there")
    assert desk.visible() == []
    worker.process.kill()
    worker.last()
    assert desk.visible() == []
    assert desk.run(f"{REPO}:Q8_0") == {"event": "done"}
    assert len(desk.visible()) == 3
    for part in ("00001", "00002"):
        assert hub.sent[f"Tiny-Q8_0-{part}-of-00003.gguf"] == 100_000 + int(part), "fetched once"


def test_a_kill_in_the_middle_is_gone_on_with(desk: Desk, hub: FakeHub) -> None:
    """Killed in the middle, the next one goes on where it was and fetches nothing twice." """
    hub.fault("stall", at=200_000)
    worker = desk.start()
    wait_until(lambda: desk.partial_bytes() == 200_000, 10, "half of it is on disk")
    worker.process.send_signal(signal.SIGKILL)
    worker.last()
    assert desk.visible() == []
    second = desk.start()
    assert second.last() == {"event": "done"}
    assert second.events[0]["bytes_done"] == 200_000
    assert desk.model() == hub.repos[REPO][FILE]
    assert hub.ranges(FILE)[-1] == "bytes=200000-"
    assert hub.sent[FILE] == BIG_BYTES


def test_killed_while_it_was_put_in_place(desk: Desk, hub: FakeHub) -> None:
    """What is verified is not fetched again, however far it had come."""
    content = {name: bytes_of(name, 5_000) for name in ("a-Q4_0-00001-of-00002.gguf", "a-Q4_0-00002-of-00002.gguf")}
    hub.repos["tiny/a"] = content
    files = [
        RemoteFile(url="", remote=name, local=f"model{name[6:]}", size_bytes=5_000, key=sum, sha256=sum)
        for name, sum in ((name, sha256(body)) for name, body in content.items())
    ]
    folder = PartialFolder(desk.folder, "model")
    for file in files:
        folder.whole(file).write_bytes(content[file.remote])

    def killed(_: Path) -> None:
        raise OSError("killed")

    with pytest.MonkeyPatch.context() as patch:
        # The last step fails: everything but the last rename is done.
        patch.setattr(download_files, "_sync", killed)
        with pytest.raises(DownloadError):
            folder.put_in_place(files)
    assert desk.visible() == []
    assert desk.run("tiny/a:Q4_0") == {"event": "done"}
    assert len(desk.visible()) == 2
    assert hub.sent == {}


def test_what_is_in_place_already_is_not_fetched_again(desk: Desk, hub: FakeHub) -> None:
    """launcherd was killed before it heard that it was done."""
    assert desk.run() == {"event": "done"}
    assert desk.run() == {"event": "done"}
    assert hub.sent[FILE] == BIG_BYTES
    assert not (desk.folder / ".partial" / "model").exists()
    hub.repos[REPO][FILE] = bytes_of("new")
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]
    (desk.folder / "model" / "model.gguf").unlink()
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]


def test_it_ends_when_launcherd_does(desk: Desk, hub: FakeHub) -> None:
    """It ends with launcherd, whatever it is doing." """
    hub.fault("stall", at=1_000)
    worker = desk.start()
    wait_until(lambda: desk.partial_bytes() == 1_000, 10, "it waits for more")
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(5) == 3


def test_a_connection_cut_in_the_middle_is_transient_and_kept(desk: Desk, hub: FakeHub) -> None:
    hub.fault("cut", at=150_000)
    failed = desk.run()
    assert (failed["code"], failed["transient"]) == ("network", True)
    assert desk.partial_bytes() == 150_000
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]
    assert hub.sent[FILE] == BIG_BYTES


def test_a_truncated_answer_is_gone_on_with(desk: Desk, hub: FakeHub) -> None:
    """The server says it is all there is, and it is not."""
    hub.fault("truncated", at=100_000)
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]
    assert hub.ranges(FILE) == ["", "bytes=100000-"]


def test_a_server_that_always_sends_nothing_is_a_transient_failure(desk: Desk, hub: FakeHub) -> None:
    hub.fault("truncated", at=0, times=99)
    failed = desk.run()
    assert (failed["code"], failed["transient"]) == ("truncated", True)
    assert desk.visible() == []


def test_range_answered_with_200_begins_again(desk: Desk, hub: FakeHub) -> None:
    """A Range that is answered with 200 makes it begin again: never is one file's beginning put before another." """
    hub.fault("cut", at=150_000)
    desk.run()
    hub.fault("range_ignored")
    assert desk.run() == {"event": "done"}
    assert hub.ranges(FILE)[-1] == "bytes=150000-"
    assert desk.model() == hub.repos[REPO][FILE]


def test_another_range_than_was_asked_for_is_not_believed(desk: Desk, hub: FakeHub) -> None:
    hub.fault("cut", at=150_000)
    desk.run()
    hub.fault("wrong_range")
    failed = desk.run()
    assert failed["transient"]
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]


@pytest.mark.parametrize("kind", ["garbled", "too_long", "compressed"])
def test_wrong_bytes_never_come_into_place(desk: Desk, hub: FakeHub, kind: Any) -> None:
    """Only a file of the announced size and SHA-256 comes into place; another one is deleted." """
    hub.fault(kind)
    failed = desk.run()
    assert failed["code"] == ("http_error" if kind == "compressed" else "checksum")
    assert not failed["transient"]
    assert desk.visible() == []
    assert desk.partial_bytes() == 0
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]


def test_a_partial_file_that_rotted_on_disk_is_noticed(desk: Desk, hub: FakeHub) -> None:
    hub.fault("cut", at=150_000)
    desk.run()
    [part] = (desk.folder / ".partial" / "model").glob("*.part")
    content = bytearray(part.read_bytes())
    content[77] ^= 1
    part.write_bytes(content)
    assert desk.run()["code"] == "checksum"
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]


def test_another_version_of_the_file_starts_anew(desk: Desk, hub: FakeHub) -> None:
    hub.fault("cut", at=150_000)
    desk.run()
    hub.repos[REPO][FILE] = bytes_of("new", 300_000)
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]


def test_silence_is_a_stall(desk: Desk, hub: FakeHub) -> None:
    """So many seconds without a byte are a stall; how long the whole takes does not matter." """
    hub.fault("stall", at=50_000)
    failed = desk.run(stall=0.5)
    assert (failed["code"], failed["transient"]) == ("stalled", True)
    assert "0.5 s" in failed["detail"]
    assert desk.partial_bytes() == 50_000


def test_silence_of_the_hub_itself_is_a_stall(desk: Desk, hub: FakeHub) -> None:
    hub.fault("stall", where="info")
    assert desk.run(stall=0.5)["code"] == "stalled"


@pytest.mark.parametrize(
    ("where", "status", "code", "transient"),
    [
        ("content", 403, "not_authorised", False),
        ("content", 404, "repository_not_found", False),
        ("content", 429, "rate_limited", True),
        ("content", 500, "server_error", True),
        ("content", 503, "server_error", True),
        ("content", 418, "http_error", False),
        ("info", 401, "not_authorised", False),
        ("info", 404, "repository_not_found", False),
        ("info", 429, "rate_limited", True),
        ("info", 500, "server_error", True),
    ],
)
def test_status_codes(desk: Desk, hub: FakeHub, where: Any, status: int, code: str, transient: bool) -> None:
    """Whether another try may help is decided by the kind of the failure." """
    hub.fault("status", where=where, status=status, headers={"Retry-After": "7"})
    failed = desk.run()
    assert (failed["code"], failed["transient"]) == (code, transient)
    assert failed["retry_after_seconds"] == (7 if transient else 0)
    assert desk.visible() == []


def test_private_and_gated_repositories(desk: Desk, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private[REPO] = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    failed = desk.run()
    assert failed["code"] == "not_authorised"
    assert "HF_TOKEN" in failed["detail"]
    assert "hf_wrong" not in failed["detail"]
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert desk.run() == {"event": "done"}
    hub.gated.add(REPO)
    failed = desk.run(f"{REPO}:Q8_0")
    assert failed["code"] == "not_authorised"
    assert "terms" in failed["detail"]


@pytest.mark.parametrize(
    ("checkpoint", "code"),
    [
        ("no/such", "not_authorised"),
        (f"{REPO}:Q2_K", "quantization_not_found"),
        (f"{REPO}:other.gguf", "file_not_found"),
        (f"https://huggingface.co/{REPO}/resolve/v9/{FILE}", "file_not_found"),
        ("/etc/passwd", "bad_source"),
    ],
)
def test_what_is_not_there(desk: Desk, checkpoint: str, code: str) -> None:
    failed = desk.run(checkpoint)
    assert (failed["code"], failed["transient"]) == (code, False)


def test_no_network_at_all_is_transient(desk: Desk) -> None:
    failed = desk.start(HF_ENDPOINT="http://127.0.0.1:1").last()
    assert (failed["code"], failed["transient"]) == ("network", True)


def test_offline_is_said_at_once_and_nobody_is_asked(desk: Desk, hub: FakeHub) -> None:
    """Offline, nothing is fetched and that is said at once." """
    failed = desk.start(HF_HUB_OFFLINE="1").last()
    assert (failed["code"], failed["transient"]) == ("offline", False)
    assert "HF_HUB_OFFLINE" in failed["detail"]
    assert desk.start(f"{hub.content}/files/x.gguf", HF_HUB_OFFLINE="1").last()["code"] == "offline"
    assert hub.asked == []


def test_a_disk_that_becomes_full(desk: Desk, hub: FakeHub) -> None:
    """A full disk ends it with the numbers; what is there is kept." RLIMIT_FSIZE makes write(2) itself fail."""
    failed = desk.start(file_limit=131_072).last()
    assert (failed["code"], failed["transient"]) == ("disk_full", False)
    assert desk.visible() == []
    assert desk.partial_bytes() == 131_072
    assert desk.run() == {"event": "done"}
    assert desk.model() == hub.repos[REPO][FILE]
    assert hub.ranges(FILE)[-1] == "bytes=131072-"


def test_a_disk_that_is_too_small_is_said_before_the_first_byte(desk: Desk, hub: FakeHub) -> None:
    hub.repos[REPO]["Huge-Q6_K.gguf"] = b"GGUF"
    hub.sizes["Huge-Q6_K.gguf"] = 10**16
    failed = desk.run(f"{REPO}:Q6_K")
    assert failed["code"] == "disk_full"
    assert "still to come" in failed["detail"]
    assert "Huge-Q6_K.gguf" not in hub.sent


def test_a_folder_that_cannot_be_written(desk: Desk) -> None:
    (desk.folder / ".partial").write_text("in the way")
    failed = desk.run()
    assert (failed["code"], failed["transient"]) == ("not_writable", False)


def test_small_files_in_git_are_verified_too(desk: Desk, hub: FakeHub) -> None:
    """For other engines than llama.cpp a whole repository comes, small files with their Git hash."""
    hub.repos["tiny/onnx"] = {"config.json": b"{}", ".gitattributes": b"", "sub/model.onnx": bytes_of("onnx", 9_000)}
    hub.in_git |= {"config.json", ".gitattributes"}
    assert desk.run("tiny/onnx", recipe="oga-cpu") == {"event": "done"}
    assert desk.visible() == ["model/config.json", "model/sub/model.onnx"]


def test_files_from_any_web_server(desk: Desk, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.plain["Some Model.gguf"] = bytes_of("plain")
    url = f"{hub.content}/files/Some%20Model.gguf"
    hub.fault("cut", at=100_000)
    assert desk.run(url)["code"] == "network"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert desk.run(url) == {"event": "done"}
    assert desk.model() == hub.plain["Some Model.gguf"]
    assert hub.ranges("Some Model.gguf") == ["", "bytes=100000-"]
    assert not any("authorization" in asked.headers for asked in hub.asked if asked.server == "content")


def test_a_plain_file_that_changed_meanwhile_starts_anew(desk: Desk, hub: FakeHub) -> None:
    hub.plain["x.gguf"] = bytes_of("one")
    hub.fault("cut", at=100_000)
    desk.run(f"{hub.content}/files/x.gguf")
    hub.plain["x.gguf"] = bytes_of("two")
    assert desk.run(f"{hub.content}/files/x.gguf") == {"event": "done"}
    assert desk.model() == hub.plain["x.gguf"]


def test_a_plain_server_without_head_or_range(desk: Desk, hub: FakeHub) -> None:
    hub.no_head = hub.no_range = True
    hub.plain["x.gguf"] = bytes_of("one")
    hub.fault("cut", at=100_000, file="x.gguf")
    hub.faults[0].times = 2
    assert desk.run(f"{hub.content}/files/x.gguf")["code"] == "network"
    assert desk.run(f"{hub.content}/files/x.gguf") == {"event": "done"}
    assert desk.model() == hub.plain["x.gguf"]


def test_a_web_page_is_no_model(desk: Desk, hub: FakeHub) -> None:
    """A login page comes with 200 and a name that ends in .gguf."""
    hub.plain["x.gguf"] = b"<html>please sign in</html>"
    failed = desk.run(f"{hub.content}/files/x.gguf")
    assert failed["code"] == "checksum"
    assert "no GGUF" in failed["detail"]
    assert desk.visible() == []


def test_what_was_in_place_is_replaced_in_one_step(desk: Desk, hub: FakeHub) -> None:
    (desk.folder / "model").mkdir()
    (desk.folder / "model" / "old.gguf").write_bytes(b"broken")
    assert desk.run() == {"event": "done"}
    assert desk.visible() == ["model/model.gguf"]
