"""Real nodes: a request for a model that is loaded nowhere, and a node that joins with nothing named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.engines import tiny_models
from tests.engines.scripted_engine import Script
from tests.processes.mesh import alive, new_node
from tests.processes.node import Node, wait_for

SEEDS = {"ash": 1, "birch": 2, "cedar": 3, "dogwood": 4}


@pytest.fixture(scope="module")
def mesh() -> Iterator[list[Node]]:
    """``n0`` serves ash; ``n1`` serves birch and has cedar; ``n2`` names nothing and has ash and dogwood."""
    with contextlib.ExitStack() as stack:
        models = (("ash",), ("birch", "cedar"), ())
        nodes = [stack.enter_context(new_node(f"n{number}", own, SEEDS, Script())) for number, own in enumerate(models)]
        for model in ("ash", "dogwood"):
            tiny_models.write_llm(nodes[2].home / "my-models" / f"{model}.gguf", seed=SEEDS[model], name=model)
        nodes[0].meshctl("init", "--name", "placed")
        token = nodes[0].meshctl("invite", "--uses", "2").stdout.strip()
        nodes[1].meshctl("join", token)
        wait_for(lambda: len(alive(nodes[0])) == 2, 20, "the first two to see each other")
        wait_for(lambda: hosts(nodes[0], "birch") == {"n1"}, 20, "n1 to serve")
        nodes[2].meshctl("join", token)
        yield nodes


def entry(node: Node, model: str) -> dict[str, object]:
    listed = {item["id"]: item for item in node.request("GET", "/v1/models").json()["data"]}
    return dict(listed.get(model, {}))


def hosts(node: Node, model: str) -> set[str]:
    return set(entry(node, model).get("hosts", ()))  # type: ignore[call-overload]


def test_a_node_that_joins_takes_a_model_that_nobody_serves(mesh: list[Node]) -> None:
    """It loads it at once, or, when it had time to load ash while it was alone, once ash is a minute old."""
    for node in mesh:
        wait_for(lambda node=node: entry(node, "dogwood").get("status") in ("loading", "ready"), 30, "n2 to take it")  # type: ignore[misc]
    taken = mesh[2].meshctl("why", "dogwood").stdout
    assert "no other node serves it" in taken or "that no other node serves" in taken


def test_a_request_for_a_model_on_another_nodes_disk_loads_it_there(mesh: list[Node]) -> None:
    cedar = entry(mesh[0], "cedar")
    assert cedar["status"] == "unloaded"
    assert "on the disk of n1" in str(cedar["reason"])
    answer = mesh[0].chat("cedar", "hi", max_tokens=2)
    assert answer.status == 200, answer.body
    for node in mesh:
        wait_for(lambda node=node: hosts(node, "cedar") == {"n1"}, 15, "all to know where cedar runs")  # type: ignore[misc]
