"""``why`` and ``story``: what the daemons know about a subject, and what they went through."""

from __future__ import annotations

import click

from services.meshctl.completion import complete_model
from services.meshctl.node import Node
from services.meshctl.output import age, clean, print_json
from shared.codec import Message
from shared.errors import MeshError
from shared.ids import DAEMONS
from shared.messages.daemon import ExplainSubject, Explanation, GetStory, Story
from shared.messages.mesh import MemberChanged
from shared.messages.tunnel import LinkChanged

CAUSAL_ORDER = ("tunneld", "gossipd", "electiond", "launcherd", "proxyd")
"""Who is there, who is in the mesh, who shall serve what, what runs here, what happened to requests."""


class UnknownSubject(MeshError):
    code = "unknown_subject"


@click.command()
@click.argument("subject", metavar="MODEL|NODE|REQUEST", shell_complete=complete_model)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def why(subject: str, as_json: bool) -> None:
    """Say in words why a model waits, is here, was unloaded or failed; what a node is; where a request went."""
    node = Node()
    node.running()
    said: dict[str, list[str]] = {}
    silent: dict[str, str] = {}
    for daemon, reply in _explanations(node, subject).items():
        match reply:
            case Explanation(sentences=sentences):
                if sentences:
                    said[daemon] = list(sentences)
            case MeshError():
                silent[daemon] = reply.detail
    if as_json and (said or silent):
        print_json({"subject": subject, "sentences": said, "not_answered": silent})
    elif not as_json:
        for daemon, known in said.items():
            for sentence in known:
                click.echo(f"{daemon:9} {clean(sentence)}")
        for daemon, reason in silent.items():
            click.echo(f"{daemon:9} did not answer: {clean(reason)}", err=True)
    if not said:
        raise UnknownSubject(_unknown(node, subject, silent))


def _explanations(node: Node, subject: str) -> dict[str, Message | MeshError]:
    """Every daemon's word, in causal order."""
    from shared.peer_names import member_names, subjects_by_daemon

    asked = node.survey(["gossipd", "tunneld"]).snapshots
    links = {item.peer_id: "" for item in asked["tunneld"] or () if isinstance(item, LinkChanged)}
    members = member_names(item for item in asked["gossipd"] or () if isinstance(item, MemberChanged))
    other = subjects_by_daemon(subject, {**links, **members})
    said: dict[str, Message | MeshError] = {}
    for daemon in other:
        said |= node.ask_all(ExplainSubject(subject=other[daemon]), (daemon,))
    said |= node.ask_all(ExplainSubject(subject=subject), [name for name in CAUSAL_ORDER if name not in other])
    return {name: said[name] for name in CAUSAL_ORDER}


def _unknown(node: Node, subject: str, silent: dict[str, str]) -> str:
    import difflib

    if silent:
        return f"the daemons that answered know nothing about {subject!r}; {', '.join(silent)} did not answer"
    view = node.status()
    names = [model.name for model in view.models] + [peer.name for peer in view.peers if peer.name]
    close = difflib.get_close_matches(subject, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else "'meshctl models list' and 'meshctl peers' show what there is"
    return f"no daemon knows a model, node or recent request {subject!r}; {hint}"


@click.command()
@click.argument("daemon", type=click.Choice(DAEMONS))
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=40, show_default=True, help="Newest entries.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def story(daemon: str, limit: int, as_json: bool) -> None:
    """Print what DAEMON was told (stimulus) and what it did (effects), newest last."""
    node = Node()
    reply = node.ask(daemon, GetStory(limit=limit))
    entries = reply.entries if isinstance(reply, Story) else ()
    if as_json:
        print_json(
            [
                {"age_seconds": entry.age_seconds, "stimulus": entry.stimulus, "effects": list(entry.effects)}
                for entry in entries
            ]
        )
        return
    for entry in entries:
        click.echo(f"{age(entry.age_seconds):>5} ago  {clean(entry.stimulus)}")
        for effect in entry.effects:
            click.echo(f"{'':11}-> {clean(effect)}")
    if not entries:
        click.echo(f"{daemon} has nothing to tell yet.")
