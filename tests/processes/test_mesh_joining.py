"""A node that joins is useful from the first second: it asks others while its own engine still loads."""

from __future__ import annotations

import contextlib
import threading

from tests.engines.scripted_engine import Script
from tests.processes.mesh import alive, new_node, seeds_of, status_of
from tests.processes.node import Answer, Node, wait_for

LOAD_SECONDS = 10.0


def test_while_a_node_joins_and_loads_its_port_answers_through_the_mesh() -> None:
    models = (("ash",), ("birch",))
    seeds = seeds_of(models)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(new_node("n0", models[0], seeds, Script(tokens=4)))
        second = stack.enter_context(new_node("n1", models[1], seeds, Script(tokens=4, load_seconds=LOAD_SECONDS)))
        first.meshctl("init")
        token = first.meshctl("invite").stdout.strip()
        joining = threading.Thread(target=second.meshctl, args=("join", token), daemon=True)
        joining.start()
        answer = wait_for(lambda: _answered(second, "ash"), 15, "an answer through the mesh")
        assert answer.headers["x-mesh-node"] == "n0"
        assert status_of(second, "birch") == "loading"
        wait_for(lambda: alive(first) == {"n0", "n1"}, 10, "both are alive")
        # Its own model is asked for at the other node, and waits there in words until it is loaded here.
        waited = first.chat("birch", "hi", max_tokens=1)
        assert waited.status == 200
        assert waited.headers["x-mesh-node"] == "n1"
        joining.join(60)


def _answered(node: Node, model: str) -> Answer | None:
    with contextlib.suppress(OSError, AssertionError):
        answer = node.chat(model, "hi", max_tokens=1)
        return answer if answer.status == 200 else None
    return None
