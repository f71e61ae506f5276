"""Which files are one model, and what the mesh calls it.

A model's name is its file's stem. The same name with another file hash is another model, ``name@hash8``. A file whose
hash is not computed yet counts as the one that keeps the plain name. Source: docs/spec/catalog.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.electiond.view import Node
from shared.ids import ModelName
from shared.messages.mesh import ServedModel

HASH_CHARACTERS = 8


def mesh_names(nodes: Sequence[Node]) -> Mapping[tuple[ModelName, str], ModelName]:
    """By (stem, file hash): the name in the mesh, of those that do not keep their stem.

    The file that most nodes have keeps the plain name; of equally many, the one with the smallest hash.
    """
    copies: dict[ModelName, Counter[str]] = {}
    for node in nodes:
        for model in node.models.values():
            if model.file_hash:
                copies.setdefault(model.name, Counter())[model.file_hash] += 1
    taken = {model for node in nodes for model in node.models}
    names: dict[tuple[ModelName, str], ModelName] = {}
    for name in sorted(copies):
        ordered = sorted(copies[name], key=lambda file_hash: (-copies[name][file_hash], file_hash))
        short = Counter(file_hash[:HASH_CHARACTERS] for file_hash in ordered[1:])
        for file_hash in ordered[1:]:
            wanted = ModelName(f"{name}@{file_hash[:HASH_CHARACTERS]}")
            if short[file_hash[:HASH_CHARACTERS]] > 1 or wanted in taken:
                wanted = ModelName(f"{name}@{file_hash}")
            names[name, file_hash] = wanted
    return names


def with_mesh_names(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, each speaking of models by the names that the mesh has for them."""
    names = mesh_names(nodes)
    return [_renamed(node, names) for node in nodes] if names else list(nodes)


def _renamed(node: Node, names: Mapping[tuple[ModelName, str], ModelName]) -> Node:
    new = {
        model.name: names[model.name, model.file_hash]
        for model in node.models.values()
        if (model.name, model.file_hash) in names
    }
    if not new:
        return node

    def served(items: tuple[ServedModel, ...]) -> tuple[ServedModel, ...]:
        return tuple(replace(item, model=new.get(item.model, item.model)) for item in items)

    models = [replace(model, name=new.get(model.name, model.name)) for model in node.models.values()]
    return replace(
        node,
        models={model.name: model for model in models},
        hosted=served(node.hosted),
        serving=served(node.serving),
        requested=tuple(new.get(name, name) for name in node.requested),
        loads={new.get(name, name): load for name, load in node.loads.items()},
        local_names={mesh: local for local, mesh in new.items()},
    )
