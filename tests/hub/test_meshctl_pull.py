"""`meshctl pull` and what belongs to it, on a real node with a hub on loopback and the real engine."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.paths import REPOSITORY
from tests.hub.fake_hub import FakeHub, fake_hub
from tests.processes.node import Node, private_home
from tests.waiting import wait_until

REPO = "tiny/Real-GGUF"
CONFIG = """\
[models]
folders = ["{folder}"]

[engine]
path = "embedded"
context_tokens = 512
parallel = 2
threads = 1
"""


class HubNode(Node):
    """A node whose hub is the one on loopback."""

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A command that is still running."""
        return subprocess.Popen(
            [str(REPOSITORY / "bin" / "meshctl"), *words],
            env=self.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def part_bytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.home / "models" / ".partial" / name).glob("*.part"))


@pytest.fixture(scope="module")
def hub(tiny_files: dict[str, bytes]) -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.repos[REPO] = dict(tiny_files)
        running.repos["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": tiny_files["Real-Q8_0.gguf"]}
        yield running


@pytest.fixture(scope="module")
def node(hub: FakeHub) -> Iterator[HubNode]:
    with private_home() as home:
        folder = home / "mine"
        folder.mkdir()
        (home / "mesh.toml").write_text(CONFIG.format(folder=folder))
        made = HubNode(home, environment={"HF_ENDPOINT": hub.endpoint, "COLUMNS": "200"})
        try:
            made.up()
            yield made
        except BaseException:
            print(made.logs())
            raise
        finally:
            made.down()


def test_up_pulls_a_model_that_is_to_be_served(node: HubNode) -> None:
    """Under the name that it has here afterwards, whatever it was named by."""
    ran = node.meshctl("up", "--model", f"{REPO}:Q8_0", "--json")
    assert json.loads(ran.stdout)["already_running"] is True
    (served,) = [model for model in node.status()["models"] if model["on_disk_here"] and not model["builtin"]]
    assert f'serve = ["{served["name"]}"]' in (node.home / "mesh.toml").read_text()
    wait_until(
        lambda: any(
            model["name"] == served["name"] and model["status"] == "ready" for model in node.status()["models"]
        ),
        30,
        "it is served",
    )
    assert node.chat(served["name"], "hello", max_tokens=4).status == 200
    again = node.meshctl("up", "--model", served["name"])
    assert "up already" in again.stderr
    node.meshctl("config", "set", "models.serve", "[]")
    node.meshctl("models", "rm", served["name"], "--yes")
    refused = node.meshctl("up", "--model", "tiny/no-such-repo", check=False)
    assert refused.returncode == 1
    assert "tiny/no-such-repo" in refused.stderr
    node.meshctl("config", "set", "models.serve", "[]")


def test_up_finds_a_file_that_has_just_come(node: HubNode, tiny_files: dict[str, bytes]) -> None:
    assert "'meshctl pull'" in node.meshctl("up", "--model", "fresh").stdout
    (node.home / "mine" / "fresh.gguf").write_bytes(tiny_files["Real-Q8_0.gguf"])
    status = json.loads(node.meshctl("up", "--model", "fresh", "--json").stdout)["status"]
    assert [model["on_disk_here"] for model in status["models"] if model["name"] == "fresh"] == [True]
    node.meshctl("config", "set", "models.serve", "[]")
    node.meshctl("unload", "fresh")
    (node.home / "mine" / "fresh.gguf").unlink()


def test_pull_load_and_answer(node: HubNode) -> None:
    ran = node.meshctl("pull", f"{REPO}:F16", "--name", "mine", "--label", "tool-calling")
    assert "mine is on this node's disk" in ran.stdout
    assert "Next: meshctl load mine" in ran.stdout
    assert "mine:" in ran.stderr, "progress is for the person, not for the pipe"
    node.meshctl("load", "mine")
    said = node.chat("mine", "hello", max_tokens=4, temperature=0)
    assert said.status == 200
    assert said.json()["choices"][0]["message"]["content"]
    again = json.loads(node.meshctl("pull", "mine", "--json").stdout)
    assert again["checkpoint"] == f"{REPO}:F16"
    assert again["labels"] == ["tool-calling"]
    assert Path(again["path"]).is_relative_to(node.home / "models" / "mine")


def test_lists_and_show(node: HubNode) -> None:
    node.meshctl("pull", f"{REPO}:F16", "--name", "mine", "--label", "tool-calling")
    text = node.meshctl("models", "list", "--all").stdout
    assert "gpt-oss-120b" in text
    assert "on this node, yours" in text
    assert "ggml-org/gpt-oss-120b-GGUF:MXFP4" in text
    registry = json.loads(node.meshctl("models", "list", "--all", "--json").stdout)["registry"]
    assert {entry["name"]: entry["downloaded"] for entry in registry}["mine"]
    assert f"{REPO}:F16" in node.meshctl("models", "show", "mine").stdout
    shown = node.meshctl("models", "show", "gpt-oss-20b").stdout
    assert "Next: meshctl pull gpt-oss-20b" in shown


def test_load_of_a_name_that_is_not_here_pulls_it_first(node: HubNode) -> None:
    ran = node.meshctl("load", "qwen3-0.6b")
    assert "Qwen3-0.6B is ready" in ran.stdout
    assert (node.home / "models" / "Qwen3-0.6B" / "Qwen3-0.6B.gguf").exists()
    node.meshctl("models", "rm", "Qwen3-0.6B", "-y")
    said = node.meshctl("chat", "Qwen3-0.6B", "-m", "hello", "--max-tokens", "4")
    assert said.returncode == 0
    node.meshctl("models", "rm", "Qwen3-0.6B", "-y")


@pytest.mark.slow
def test_rm_deletes_and_forgets(node: HubNode) -> None:
    node.meshctl("pull", f"{REPO}:Q8_0")
    node.meshctl("load", "Real-Q8_0")
    assert "Deleted Real-Q8_0" in node.meshctl("models", "rm", "Real-Q8_0", "-y").stdout
    assert not (node.home / "models" / "Real-Q8_0").exists()
    ran = node.meshctl("models", "rm", "Real-Q8_0", "-y", check=False)
    assert ran.returncode == 1
    assert "no model" in ran.stderr


def test_failures_have_a_code_and_say_what_to_do(node: HubNode) -> None:
    ran = node.meshctl("pull", f"{REPO}:Q2_K", "--json", check=False)
    assert ran.returncode == 1
    error = json.loads(ran.stdout)["error"]
    assert error["code"] == "quantization_not_found"
    assert "F16" in error["detail"]
    ran = node.meshctl("pull", "gpt-os-20b", check=False)
    assert ran.returncode == 1
    assert "did you mean gpt-oss-20b" in ran.stderr
    assert node.meshctl("pull", check=False).returncode == 2
    ran = node.meshctl("load", "nowhere", check=False)
    assert ran.returncode == 1


def test_ctrl_c_ends_only_the_watching_and_cancel_the_download(node: HubNode, hub: FakeHub) -> None:
    hub.fault("stall", at=20_000, file="Real-Q8_0")
    watching = node.start("pull", f"{REPO}:Q8_0")
    wait_until(lambda: node.part_bytes("Real-Q8_0") == 20_000, 20, "it waits in the middle")
    downloads = json.loads(node.meshctl("status", "--json").stdout)["downloads"]
    assert [(item["model"], item["state"]) for item in downloads] == [("Real-Q8_0", "downloading")]
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=20)
    assert watching.returncode == 130
    assert "the download goes on" in said
    again = node.start("pull", f"{REPO}:Q8_0")
    assert again.stderr is not None
    assert "Real-Q8_0: 20.0 kB" in again.stderr.readline(), "it watches the same download"
    assert "cancelled" in node.meshctl("pull", f"{REPO}:Q8_0", "--cancel").stdout
    _, said = again.communicate(timeout=20)
    assert again.returncode == 1
    assert "cancelled" in said
    assert node.part_bytes("Real-Q8_0") == 20_000
    node.meshctl("pull", f"{REPO}:Q8_0")
    assert (node.home / "models" / "Real-Q8_0" / "Real-Q8_0.gguf").exists()


def test_names_are_completed(node: HubNode) -> None:
    env = {**node.env(), "_MESHCTL_COMPLETE": "bash_complete", "COMP_WORDS": "meshctl pull gpt-o", "COMP_CWORD": "2"}
    ran = subprocess.run([str(REPOSITORY / "bin" / "meshctl")], env=env, capture_output=True, text=True, check=False)
    assert "gpt-oss-120b" in ran.stdout
