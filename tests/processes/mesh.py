"""A real mesh for tests: several whole nodes on this machine, each with its own ``MESH_HOME`` and free ports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.engines import tiny_models
from tests.engines.scripted_engine import Script, write_engine
from tests.processes.node import Node, private_home, wait_for


def seeds_of(models: Sequence[Sequence[str]]) -> dict[str, int]:
    """The same model is the same file wherever it lies."""
    names = sorted({name for own in models for name in own})
    return {name: number + 1 for number, name in enumerate(names)}


@contextlib.contextmanager
def new_node(
    name: str, models: Sequence[str], seeds: dict[str, int], script: Script | None, config: str = ""
) -> Iterator[Node]:
    """A node that does not run yet. Without a script the embedded engine really computes."""
    with private_home() as home:
        folder = home / "my-models"
        folder.mkdir()
        for model in models:
            tiny_models.write_llm(folder / f"{model}.gguf", seed=seeds[model], name=model)
        engine = f'[engine]\npath = "{write_engine(home / "llama-server", script)}"\n' if script else ""
        serve = f'serve = ["{models[0]}"]\n' if models else ""
        (home / "mesh.toml").write_text(
            f'[node]\nname = "{name}"\n\n[models]\nfolders = ["{folder}"]\n{serve}\n{engine}{config}'
        )
        node = Node(home)
        try:
            yield node
        except BaseException:
            print(f"==== {name}\n{node.logs()}")
            raise
        finally:
            node.down()


@contextlib.contextmanager
def mesh_of(models: Sequence[Sequence[str]], script: Script | None, *, name: str = "proof") -> Iterator[list[Node]]:
    """Nodes ``n0``, ``n1``… in one mesh, each with the models named for it, the first one served.

    The first node makes the mesh and invites, the others join with its token.
    """
    seeds = seeds_of(models)
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(new_node(f"n{number}", own, seeds, script)) for number, own in enumerate(models)
        ]
        nodes[0].meshctl("init", "--name", name)
        if len(nodes) > 1:
            token = nodes[0].meshctl("invite", "--uses", str(len(nodes) - 1)).stdout.strip()
            for node in nodes[1:]:
                node.meshctl("join", token)
        for node in nodes:
            wait_for(lambda node=node: len(alive(node)) == len(nodes), 20, "every node to see every other")
        yield nodes


def peers(node: Node) -> list[dict[str, Any]]:
    return list(node.status()["peers"])


def alive(node: Node) -> set[str]:
    """Names of the nodes that this one lists as alive, itself included."""
    return {peer["name"] for peer in peers(node) if peer["state"] == "alive"}


def status_of(node: Node, model: str) -> str:
    return str(next((item["status"] for item in node.status()["models"] if item["name"] == model), "unknown"))
