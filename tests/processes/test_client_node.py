"""A node that only consumes: it uses the mesh's models and serves nothing, whatever lies on its disk."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engines.scripted_engine import Script
from tests.processes.mesh import alive, new_node, peers, seeds_of, status_of
from tests.processes.node import Node, wait_for

MODELS = (("alpha",), ("beta", "gamma"))


@pytest.fixture(scope="module")
def mesh() -> Iterator[tuple[Node, Node]]:
    """A host, and a node that joined with ``--client`` though its mesh.toml names a model."""
    seeds, script = seeds_of(MODELS), Script(tokens=3)
    with new_node("host", MODELS[0], seeds, script) as host, new_node("client", MODELS[1], seeds, script) as client:
        host.meshctl("init", "--name", "proof")
        joined = client.meshctl("join", host.meshctl("invite").stdout.strip(), "--client")
        assert "Every model of it answers here" in joined.stdout
        for node in (host, client):
            wait_for(lambda node=node: alive(node) == {"host", "client"}, 20, "both nodes to see each other")
        wait_for(lambda: status_of(client, "alpha") == "ready", 40, "the client to know the host's model")
        yield host, client


def role_of(node: Node, name: str) -> str:
    return str(next(peer["role"] for peer in peers(node) if peer["name"] == name))


def loaded(node: Node) -> list[str]:
    return [model["name"] for model in node.status()["models"] if model["here"] is not None]


def test_a_chat_is_answered_through_the_mesh(mesh: tuple[Node, Node]) -> None:
    host, client = mesh
    answer = client.chat("alpha", "hello", max_tokens=3)
    assert answer.status == 200, answer.body
    assert answer.json()["choices"] == host.chat("alpha", "hello", max_tokens=3).json()["choices"]
    assert loaded(client) == []


def test_it_says_what_it_is(mesh: tuple[Node, Node]) -> None:
    host, client = mesh
    wait_for(lambda: role_of(host, "client") == "client", 10, "the host to hear it")
    assert role_of(client, "client") == "client"
    assert "client = true" in (client.home / "mesh.toml").read_text()
    assert json.loads(client.meshctl("whoami", "--json").stdout)["grant"] == "client"
    assert "only consumes" in client.meshctl("why", "node").stdout


def test_nothing_is_placed_on_it(mesh: tuple[Node, Node]) -> None:
    """Not what its owner once named, not what is asked for: nobody who may serve has it."""
    host, client = mesh
    for node in (host, client):
        assert node.chat("gamma", "hello", max_tokens=1).status in (404, 503)
    assert loaded(client) == []
    assert status_of(host, "beta") != "ready"


def test_up_makes_a_client_and_takes_it_back(mesh: tuple[Node, Node]) -> None:
    host, _ = mesh
    assert "This node is up already" in host.meshctl("up", "--client").stderr
    wait_for(lambda: role_of(host, "host") == "client", 10, "the node to be a client")
    wait_for(lambda: loaded(host) == [], 20, "its model to go")
    host.meshctl("up", "--no-client")
    wait_for(lambda: status_of(host, "alpha") == "ready" and loaded(host) == ["alpha"], 30, "its model to come back")
    wait_for(lambda: role_of(host, "host") == "host", 10, "the node to say that it serves")


def test_an_invite_for_a_client_makes_one_without_being_told(mesh: tuple[Node, Node]) -> None:
    host, _ = mesh
    token = host.meshctl("invite", "--grant", "client").stdout.strip()
    with new_node("guest", ("beta",), seeds_of(MODELS), Script(tokens=3)) as guest:
        guest.up()
        wait_for(lambda: loaded(guest) == ["beta"], 30, "the node to serve its model by itself")
        guest.meshctl("join", token)
        assert "client = true" in (guest.home / "mesh.toml").read_text()
        wait_for(lambda: loaded(guest) == [], 20, "its model to go")
        wait_for(lambda: guest.chat("alpha", "hello", max_tokens=1).status == 200, 20, "the mesh to answer")
