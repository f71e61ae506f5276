"""Three nodes that are really apart: each in a network namespace of its own, joined by a bridge.

Where the system does not allow namespaces the tests are skipped with its word; where it has no ``netem`` only the
tests with delay and loss are.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.processes.mesh import alive, new_node, peers, seeds_of
from tests.processes.node import Answer, Node, wait_for

MODELS = (("ash",), ("birch",), ("cedar",))
DELAY_MS = 20
ASK = """
import http.client, json, sys
method, address, path, body = json.loads(sys.stdin.read())
connection = http.client.HTTPConnection(address, timeout=30)
connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
answer = connection.getresponse()
print(json.dumps([answer.status, dict((k.lower(), v) for k, v in answer.getheaders()), answer.read().decode()]))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(words, 127, "", str(error))


def must(*words: str) -> None:
    done = run(*words)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@dataclass
class Apart:
    """Namespaces ``names`` on one bridge; the veth of each is named like it on the bridge's side."""

    bridge: str
    names: list[str]

    def cut(self, number: int) -> None:
        must("ip", "link", "set", self.names[number], "down")

    def heal(self, number: int) -> None:
        must("ip", "link", "set", self.names[number], "up")


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[Apart]:
    tag = f"m{os.getpid() % 10_000}"
    apart = Apart(f"{tag}br", [f"{tag}n{number}" for number in range(count)])
    try:
        made = run("ip", "link", "add", apart.bridge, "type", "bridge")
        if made.returncode:
            pytest.skip(f"this system makes no network namespaces here: {made.stderr.strip()}")
        must("ip", "link", "set", apart.bridge, "up")
        for number, name in enumerate(apart.names):
            made = run("ip", "netns", "add", name)
            if made.returncode:
                pytest.skip(f"this system makes no network namespaces here: {made.stderr.strip()}")
            must("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            must("ip", "link", "set", name, "master", apart.bridge)
            must("ip", "link", "set", name, "up")
            must("ip", "-n", name, "link", "set", "lo", "up")
            must("ip", "-n", name, "address", "add", f"10.213.7.{number + 1}/24", "dev", "eth0")
            must("ip", "-n", name, "link", "set", "eth0", "up")
        yield apart
    finally:
        for name in apart.names:
            run("ip", "netns", "del", name)
            run("ip", "link", "del", name)
        run("ip", "link", "del", apart.bridge)


class NodeApart(Node):
    """A node whose every process runs in a namespace, and who is asked from inside it."""

    namespace: str = ""

    def meshctl(self, *words: str, check: bool = True, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
        command = ["ip", "netns", "exec", self.namespace, str(self.root / "bin" / "meshctl"), *words]
        done = subprocess.run(
            command,
            env={**self.env(), "MESH_HOST": "0.0.0.0"},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done

    def request(self, method: str, path: str, body: Any = None, timeout: float = 30.0) -> Answer:
        asked = json.dumps([method, self.api.removeprefix("http://").partition("/")[0], path, body])
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", ASK]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=timeout, check=True)
        status, headers, text = json.loads(done.stdout)
        return Answer(status, headers, text.encode())


@pytest.fixture(scope="module")
def mesh() -> Iterator[tuple[Apart, list[NodeApart]]]:
    seeds = seeds_of(MODELS)
    with namespaces(len(MODELS)) as apart, contextlib.ExitStack() as stack:
        nodes = []
        for number, own in enumerate(MODELS):
            made = stack.enter_context(new_node(f"n{number}", own, seeds, None))
            node = NodeApart(made.home)
            node.namespace = apart.names[number]
            made.down = node.down  # type: ignore[method-assign]
            nodes.append(node)
        nodes[0].meshctl("init")
        token = nodes[0].meshctl("invite", "--uses", "2").stdout.strip()
        for node in nodes[1:]:
            node.meshctl("join", token)
        for node in nodes:
            wait_for(lambda node=node: len(alive(node)) == len(nodes), 30, "every node to see every other")
            wait_for(lambda node=node: serves_all(node), 60, "every model to be ready everywhere")
        yield apart, nodes


def serves_all(node: Node) -> bool:
    listed = node.request("GET", "/v1/models").json()["data"]
    return {entry["id"] for entry in listed if entry["status"] == "ready"} >= {name for (name,) in MODELS}


def text_of(node: Node, model: str) -> str:
    answer = node.chat(model, "tell me a story", max_tokens=12, temperature=0)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"])


def test_nodes_find_each_other_by_their_own_addresses_and_serve(mesh: tuple[Apart, list[NodeApart]]) -> None:
    _, nodes = mesh
    for number, (model,) in enumerate(MODELS):
        local = text_of(nodes[number], model)
        for node in nodes:
            assert text_of(node, model) == local
    addresses = json.loads(nodes[0].meshctl("whoami", "--json").stdout)["addresses"]
    assert any("/ip4/10.213.7.1/" in address for address in addresses)


def test_a_node_whose_network_is_cut_is_dropped_and_returns(mesh: tuple[Apart, list[NodeApart]]) -> None:
    """TRAPS 2: a partition heals."""
    apart, nodes = mesh
    apart.cut(2)
    began = time.monotonic()
    try:
        wait_for(lambda: alive(nodes[0]) == {"n0", "n1"}, 40, "the cut node is dropped")
        print(f"dropped after {time.monotonic() - began:.1f} s of silence")
        wait_for(lambda: alive(nodes[2]) == {"n2"}, 40, "the cut node is alone")
        assert text_of(nodes[0], "birch") == text_of(nodes[1], "birch")
        assert text_of(nodes[2], "cedar")
    finally:
        apart.heal(2)
    began = time.monotonic()
    for node in nodes:
        wait_for(lambda node=node: len(alive(node)) == 3, 60, "everybody sees everybody again")
    print(f"healed after {time.monotonic() - began:.1f} s")
    wait_for(lambda: serves_all(nodes[0]), 30, "its model is back")
    assert text_of(nodes[0], "cedar") == text_of(nodes[2], "cedar")


def test_delay_and_loss_are_lived_with_and_measured(mesh: tuple[Apart, list[NodeApart]]) -> None:
    apart, nodes = mesh
    link = ("dev", "eth0", "root", "netem", "delay", f"{DELAY_MS}ms", "loss", "2%")
    shaped = run("tc", "-n", apart.names[1], "qdisc", "add", *link)
    if shaped.returncode:
        pytest.skip(f"this system has no netem: {shaped.stderr.strip()}")
    try:
        expected = text_of(nodes[1], "birch")
        for _ in range(10):
            assert text_of(nodes[0], "birch") == expected
        seconds = wait_for(lambda: rtt_of(nodes[0], "n1"), 90, "the longer way shows in the round trip")
        assert DELAY_MS / 1000 <= seconds < 0.5
        assert len(alive(nodes[0])) == 3
    finally:
        run("tc", "-n", apart.names[1], "qdisc", "del", "dev", "eth0", "root")


def rtt_of(node: Node, name: str) -> float | None:
    """Once it is above what the bridge alone takes."""
    found = next((peer.get("rtt_seconds") for peer in peers(node) if peer["name"] == name), None)
    return found if found is not None and found > DELAY_MS / 2000 else None
