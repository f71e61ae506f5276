"""Five whole nodes on one machine: join, serve, lose daemons and nodes under load, come back, leave, ban, refuse.

Real supervisord, real daemons, real llama.cpp, real sockets, real SIGKILL. The tests run in order on one mesh: n3 and
n4 serve the same model, n0, n1 and n2 one of their own each.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from shared.ids import DAEMONS
from tests.processes.mesh import alive, mesh_of, new_node, peers, seeds_of
from tests.processes.node import Node, processes_of, wait_for

MODELS = (("ash",), ("birch",), ("cedar",), ("dogwood",), ("dogwood",))
REMOVAL_SECONDS = 10.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[list[Node]]:
    with mesh_of(MODELS, None) as nodes:
        for node in nodes:
            wait_for(lambda node=node: ready_models(node) >= {"ash", "birch", "cedar", "dogwood"}, 60, "all is ready")
        wait_for(lambda: hosts_of(nodes[0], "dogwood") == {"n3", "n4"}, 30, "both hosts of one model are known")
        yield nodes


def listed(node: Node) -> dict[str, dict[str, object]]:
    return {entry["id"]: entry for entry in node.request("GET", "/v1/models").json()["data"]}


def ready_models(node: Node) -> set[str]:
    return {name for name, entry in listed(node).items() if entry["status"] == "ready"}


def hosts_of(node: Node, model: str) -> set[str]:
    return set(listed(node)[model]["hosts"])  # type: ignore[call-overload]


def text_of(node: Node, model: str) -> str:
    answer = node.chat(model, "tell me a story", max_tokens=12, temperature=0)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"])


class Load(threading.Thread):
    """Short chats with one model through one node until stopped; failures are kept."""

    def __init__(self, node: Node, model: str) -> None:
        super().__init__(daemon=True)
        self.node, self.model = node, model
        self.answered = 0
        self.slowest_seconds = 0.0
        self.failures: list[str] = []
        self._end = threading.Event()

    def __enter__(self) -> Load:
        self.start()
        wait_for(lambda: self.answered >= 3, 30, "the load runs")
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join(60)

    def run(self) -> None:
        for _ in range(100_000):
            if self._end.is_set():
                return
            began = time.monotonic()
            try:
                # Another conversation each time, so that every host has its share.
                answer = self.node.chat(self.model, "hi", max_tokens=2, user=str(self.answered))
                if answer.status != 200:
                    self.failures.append(f"{answer.status} {answer.body[:300]!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
            self.answered += 1
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)

    def more(self, count: int = 10) -> None:
        """Wait for so many further answers."""
        goal = self.answered + count
        wait_for(lambda: self.answered >= goal, 30, f"{count} more answers")


def kill_node(node: Node) -> None:
    """SIGKILL of everything that belongs to the node, supervisord first, as when the machine goes dark."""
    for process in sorted(processes_of(node.home), key=lambda process: "supervisord" not in " ".join(_line(process))):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)


def _line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def until_seconds(condition: Callable[[], object], seconds: float, what: str) -> float:
    began = time.monotonic()
    wait_for(condition, seconds, what)
    return time.monotonic() - began


def test_every_model_answers_on_every_node_with_the_text_of_its_own_node(mesh: list[Node]) -> None:
    for number, (model,) in enumerate(MODELS):
        local = text_of(mesh[number], model)
        assert local
        for node in mesh:
            assert text_of(node, model) == local


def test_every_node_lists_the_whole_catalog_and_where(mesh: list[Node]) -> None:
    for node in mesh:
        entries = listed(node)
        assert {model: set(entries[model]["hosts"]) for (model,) in MODELS} == {  # type: ignore[call-overload]
            "ash": {"n0"}, "birch": {"n1"}, "cedar": {"n2"}, "dogwood": {"n3", "n4"},
        }  # fmt: skip


def test_a_stream_through_another_node_is_whole(mesh: list[Node]) -> None:
    answer = mesh[0].chat("birch", "tell me a story", max_tokens=12, temperature=0, stream=True)
    lines = [line for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    said = "".join(
        choice["delta"].get("content") or ""
        for line in lines[:-1]
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    )
    assert said == text_of(mesh[1], "birch")
    assert answer.headers["x-mesh-node"] == "n1"


@pytest.mark.parametrize("daemon", ["gossipd", "electiond", "launcherd", "tunneld"])
def test_a_killed_daemon_of_the_only_host_costs_no_request(mesh: list[Node], daemon: str) -> None:
    host = mesh[1]
    with Load(mesh[0], "birch") as load:
        os.kill(host.pid(daemon), signal.SIGKILL)
        load.more(20)
        wait_for(host.healed, 30, f"{daemon} is back")
        load.more(5)
    assert load.failures == []


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_killed_daemon_of_one_of_two_hosts_costs_no_request(mesh: list[Node], daemon: str) -> None:
    host = mesh[3]
    with Load(mesh[0], "dogwood") as load, Load(mesh[1], "dogwood") as other:
        os.kill(host.pid(daemon), signal.SIGKILL)
        load.more(20)
        wait_for(host.healed, 30, f"{daemon} is back")
        other.more(5)
    assert load.failures + other.failures == []
    wait_for(lambda: hosts_of(mesh[0], "dogwood") == {"n3", "n4"}, 30, "it serves again")


@pytest.mark.parametrize("daemon", ["gossipd", "electiond", "launcherd", "tunneld"])
def test_a_killed_daemon_of_the_entry_node_costs_no_request(mesh: list[Node], daemon: str) -> None:
    entry = mesh[0]
    with Load(entry, "birch") as load:
        os.kill(entry.pid(daemon), signal.SIGKILL)
        load.more(20)
        wait_for(entry.healed, 30, f"{daemon} is back")
    assert load.failures == []


def test_a_node_that_goes_dark_costs_no_request_and_is_gone_in_time(mesh: list[Node]) -> None:
    """And comes back when it is started again. Prints what was measured."""
    dark = mesh[4]
    with Load(mesh[0], "dogwood") as load, Load(mesh[2], "dogwood") as other:
        kill_node(dark)
        began = time.monotonic()
        removal = [
            until_seconds(lambda node=node: "n4" not in alive(node), 30, f"{node.home.name} lists it no more")
            for node in mesh[:4]
        ]
        everywhere = time.monotonic() - began
        load.more(15)
    print(f"removal everywhere after {everywhere:.1f} s; slowest request {load.slowest_seconds:.2f} s; {removal}")
    dark.forget_address()
    dark.up()
    for node in mesh:
        wait_for(lambda node=node: len(alive(node)) == 5, 30, "everybody sees everybody again")
    wait_for(lambda: hosts_of(mesh[0], "dogwood") == {"n3", "n4"}, 30, "it serves again")
    assert text_of(dark, "ash") == text_of(mesh[0], "ash")
    assert load.failures + other.failures == []
    assert everywhere <= REMOVAL_SECONDS


def test_a_node_that_falls_silent_costs_no_request(mesh: list[Node]) -> None:
    """TRAPS 3, 8: frozen, it keeps its connections and answers nothing. New requests go elsewhere meanwhile."""
    frozen = processes_of(mesh[4].home)
    with Load(mesh[0], "dogwood") as load, Load(mesh[1], "dogwood") as other:
        for process in frozen:
            process.suspend()
        try:
            wait_for(lambda: "n4" not in alive(mesh[0]), 30, "it is no longer listed as alive")
            load.more(10)
            other.more(10)
        finally:
            for process in frozen:
                process.resume()
    assert load.failures + other.failures == []
    print(f"slowest request while a host was frozen: {max(load.slowest_seconds, other.slowest_seconds):.1f} s")
    for node in mesh:
        wait_for(lambda node=node: len(alive(node)) == 5, 30, "everybody sees everybody again")


def test_a_stopped_node_says_goodbye(mesh: list[Node]) -> None:
    mesh[4].down()
    seconds = until_seconds(lambda: "n4" not in alive(mesh[0]), 10, "it is no longer listed")
    print(f"goodbye known after {seconds:.1f} s")
    mesh[4].forget_address()
    mesh[4].up()
    wait_for(lambda: len(alive(mesh[0])) == 5, 30, "it is back")


def join(node: Node, token: str) -> subprocess.CompletedProcess[str]:
    return node.meshctl("join", token, check=False)


def test_revoked_forged_and_foreign_tokens_are_refused_with_a_reason(mesh: list[Node]) -> None:
    made = json.loads(mesh[0].meshctl("invite", "--json").stdout)
    mesh[0].meshctl("invite", "revoke", made["invite_id"])
    token = str(made["token"])
    forged = token[:-40] + ("A" if token[-40] != "A" else "B") + token[-39:]
    with new_node("stranger", (), {}, None) as stranger:
        for text, words in ((token, "revoked"), (forged, ""), ("not a token", "")):
            refused = join(stranger, text)
            assert refused.returncode == 1, refused.stdout
            assert words in refused.stderr
            assert text not in refused.stderr
            assert text not in refused.stdout
        assert "stranger" not in alive(mesh[0])
        foreign = stranger.meshctl("invite").stdout.strip()
    elsewhere = join(mesh[1], foreign)
    assert elsewhere.returncode == 1
    assert "--switch" in elsewhere.stderr
    assert len(alive(mesh[1])) == 5


def test_who_leaves_is_gone_at_once_and_goes_on_alone(mesh: list[Node]) -> None:
    leaver = mesh[2]
    leaver.meshctl("leave")
    for node in (mesh[0], mesh[1]):
        wait_for(lambda node=node: "n2" not in alive(node), 10, "it is no longer listed")
    assert alive(leaver) == {"n2"}
    assert text_of(leaver, "cedar")
    token = mesh[0].meshctl("invite").stdout.strip()
    leaver.meshctl("join", token)
    wait_for(lambda: len(alive(mesh[0])) == 5, 30, "it is back")
    wait_for(lambda: "cedar" in ready_models(mesh[0]), 30, "its model is back")
    assert text_of(mesh[0], "cedar") == text_of(leaver, "cedar")


def test_who_is_banned_is_cut_off_and_stays_out(mesh: list[Node]) -> None:
    mesh[0].meshctl("peers", "ban", "n1")
    for node in (mesh[0], mesh[2], mesh[3]):
        wait_for(lambda node=node: "n1" not in alive(node), 15, "it is no longer listed")
    answer = mesh[0].chat("birch", "hi", max_tokens=1)
    assert answer.status in (404, 503)
    wait_for(lambda: alive(mesh[1]) == {"n1"}, 30, "it sees nobody either")
    mesh[1].meshctl("restart", "tunneld")
    wait_for(mesh[1].healed, 20, "tunneld is back")
    assert "n1" not in alive(mesh[0])
    assert next(peer for peer in peers(mesh[0]) if peer["name"] == "n0")["state"] == "alive"


def test_a_mesh_of_seeds_is_a_mesh_of_files() -> None:
    assert seeds_of(MODELS) == {"ash": 1, "birch": 2, "cedar": 3, "dogwood": 4}
