"""``completion``: the script a shell runs to complete meshctl's words, and the words themselves."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

INSTALL = {
    "bash": "echo 'eval \"$(meshctl completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(meshctl completion zsh)\"' >> ~/.zshrc",
    "fish": "meshctl completion fish > ~/.config/fish/completions/meshctl.fish",
}


@click.command(epilog="Install: " + "   ".join(INSTALL.values()))
@click.argument("shell", type=click.Choice(list(INSTALL)))
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import get_completion_class

    from services.meshctl.commands import meshctl

    cls = get_completion_class(shell)
    assert cls is not None
    click.echo(cls(meshctl, {}, "meshctl", "_MESHCTL_COMPLETE").source())


def complete_model(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of this node's models; none when it is down."""
    from services.meshctl.node import Node
    from shared.errors import MeshError
    from shared.status_view import build_status

    try:
        asked = Node().survey(["launcherd", "electiond"])
    except MeshError:
        return []
    view = build_status(asked.snapshots, asked.infos, [])
    return [
        CompletionItem(model.name, help=f"{model.type}, {model.status}")
        for model in view.models
        if model.name.startswith(incomplete)
    ]


def complete_registered(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the registry; none when the node is down."""
    from services.meshctl.node import Node
    from shared.errors import MeshError
    from shared.messages.downloads import RegistryChanged

    try:
        said = Node().survey(["launcherd"]).snapshots.get("launcherd") or []
    except MeshError:
        return []
    return [
        CompletionItem(model.name, help=f"{model.type}, {'on this node' if model.downloaded else model.checkpoint}")
        for item in said
        if isinstance(item, RegistryChanged)
        for model in item.models
        if model.name.lower().startswith(incomplete.lower())
    ]


def complete_peer(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the mesh's other nodes; none when this one is down."""
    from services.meshctl.node import Node
    from shared.errors import MeshError
    from shared.messages.mesh import MemberChanged

    try:
        said = Node().survey(["gossipd"]).snapshots.get("gossipd") or []
    except MeshError:
        return []
    return [
        CompletionItem(member.announcement.name, help=f"{member.state}, {member.announcement.peer_id}")
        for member in said
        if isinstance(member, MemberChanged)
        and not member.is_self
        and member.announcement.name.startswith(incomplete)
    ]
