"""services.meshctl.elsewhere: logs, load, unload and drain of another node, in a real mesh of two.

The first node made the mesh and has an issuer's grant, the second is a member.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engines.scripted_engine import Script
from tests.processes.mesh import mesh_of, peers, status_of
from tests.processes.node import Node, wait_for


@pytest.fixture(scope="module")
def mesh() -> Iterator[list[Node]]:
    with mesh_of((("alpha",), ("beta",)), Script(tokens=2)) as nodes:
        wait_for(lambda: status_of(nodes[0], "beta") == "ready", 40, "the second node to serve its model")
        yield nodes


def code_of(node: Node, *words: str) -> tuple[str, str]:
    refused = node.meshctl(*words, "--json", check=False)
    assert refused.returncode == 1, refused.stdout
    error = json.loads(refused.stdout)["error"]
    return error["code"], error["detail"]


def test_logs_of_another_node(mesh: list[Node]) -> None:
    here, _ = mesh
    shown = here.meshctl("logs", "launcherd", "--node", "n1").stdout
    assert "beta" in shown, "it serves beta, this node alpha"
    both = here.meshctl("logs", "launcherd", "gossipd", "--node", "n1", "-n", "6").stdout.splitlines()
    assert len(both) == 6
    assert {line.split()[0] for line in both} <= {"launcherd", "gossipd"}
    own = here.meshctl("logs", "launcherd", "--node", "n0").stdout
    assert "alpha" in own, "its own name means this node"


def test_a_node_is_named_by_a_part_of_its_id(mesh: list[Node]) -> None:
    peer_id = next(peer["peer_id"] for peer in peers(mesh[0]) if peer["name"] == "n1")
    for name in (peer_id, peer_id[-8:], f"{peer_id[:4]}…{peer_id[-6:]}"):
        assert mesh[0].meshctl("logs", "gossipd", "--node", name, "-n", "1").stdout
    code, detail = code_of(mesh[0], "drain", "--node", "n7")
    assert (code, "meshctl peers" in detail) == ("no_such_peer", True)


def test_peers_and_why_tell_of_the_link(mesh: list[Node]) -> None:
    def link() -> dict[str, object]:
        return dict(next(peer["link"] for peer in peers(mesh[0]) if peer["name"] == "n1") or {})

    wait_for(lambda: link().get("transport") == "quic+tcp" and link().get("rtt_ms"), 20, "both transports, measured")
    assert link()["state"] == "connected"
    assert "quic+tcp" in mesh[0].meshctl("peers").stdout
    peer_id = next(peer["peer_id"] for peer in peers(mesh[0]) if peer["name"] == "n1")
    for name in ("n1", peer_id[-8:]):
        said = mesh[0].meshctl("why", name).stdout
        assert f"tunneld   The link with {peer_id} is connected, round trip" in said
        assert f"gossipd   n1 ({peer_id}) is alive" in said
        assert "with grant member" in said


def test_names_of_other_nodes_complete(mesh: list[Node]) -> None:
    shell = Node(
        mesh[0].home,
        environment={"_MESHCTL_COMPLETE": "bash_complete", "COMP_WORDS": "meshctl drain --node n", "COMP_CWORD": "3"},
    )
    assert shell.meshctl().stdout.split() == ["plain,n1"], "not this node itself"


def test_unload_and_load_on_another_node(mesh: list[Node]) -> None:
    here, there = mesh
    assert "n1: beta" in here.meshctl("unload", "beta", "--node", "n1").stdout
    wait_for(lambda: status_of(there, "beta") == "unloaded", 20, "the other node to unload")
    asked = here.meshctl("load", "beta", "--node", "n1", "--json")
    assert json.loads(asked.stdout) == {"node": "n1", "model": "beta", "detail": "beta: queued"}
    wait_for(lambda: status_of(here, "beta") == "ready", 30, "the other node to load")
    assert status_of(here, "alpha") == "ready", "nothing happened here"
    code, detail = code_of(here, "load", "no-such-model", "--node", "n1")
    assert (code, "no-such-model" in detail) == ("model_not_found", True), (code, detail)


def test_drain_another_node(mesh: list[Node]) -> None:
    def state() -> str:
        return str(next(peer["node_state"] for peer in peers(mesh[0]) if peer["name"] == "n1"))

    assert "n1: draining" in mesh[0].meshctl("drain", "--node", "n1").stdout
    wait_for(lambda: state() == "draining", 10, "the other node to say that it drains")
    assert "takes requests again" in mesh[0].meshctl("drain", "--off", "--node", "n1").stdout
    wait_for(lambda: state() == "active", 10, "the other node to take requests again")


def test_a_member_is_refused_and_told_what_it_needs(mesh: list[Node]) -> None:
    for words in (("logs", "gossipd"), ("load", "alpha"), ("unload",), ("drain",)):
        refused = mesh[1].meshctl(*words, "--node", "n0", check=False)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "needs an issuer's grant" in refused.stderr
    assert status_of(mesh[0], "alpha") == "ready"


@pytest.mark.parametrize(
    "words",
    [
        ("logs", "-f"),
        ("logs", "keeper"),
        ("logs", "engine", "beta"),
        ("load", "beta", "--ctx", "512"),
        ("load", "beta", "--parallel", "2"),
    ],
    ids=" ".join,
)
def test_what_only_goes_here_is_said_so(mesh: list[Node], words: tuple[str, ...]) -> None:
    refused = mesh[0].meshctl(*words, "--node", "n1", check=False)
    assert (refused.returncode, "for this node" in refused.stderr) == (1, True), refused.stderr
