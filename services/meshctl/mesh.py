"""``init``, ``join``, ``leave``, ``drain`` and ``whoami``: this node's place in a mesh. gossipd decides; this shows."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import click

from services.meshctl.config_file import update_config
from services.meshctl.elsewhere import ask_node, on_node, other_node
from services.meshctl.node import Node, run, survey
from services.meshctl.output import Waiting, clean, print_json, progress
from services.meshctl.reload import reload_daemons
from services.meshctl.up import CLIENT_WITH_MODEL, bring_up, changes_of, endpoint
from shared.codec import Message
from shared.errors import ConfigError, DaemonUnreachable, MeshError, RequestRefused
from shared.io.bus import BusClient
from shared.messages.daemon import Done
from shared.messages.trust import (
    DrainNode,
    InitMesh,
    JoinChanged,
    JoinMesh,
    JoinStep,
    LeaveMesh,
    MeshJoined,
    NodeIdentity,
    WhoAmI,
)

TOKEN_VARIABLE = "MESH_TOKEN"
JOIN_SECONDS = 60.0
"""Connecting, verifying and being admitted; tunneld gives up on an address after seconds."""
SETTLE_SECONDS = 15.0
"""How long a join that was admitted is followed until peers and assignment are known; it goes on without us."""
LOOK_SECONDS = 0.1
TOKEN_FILE_BYTES = 64 * 1024


@click.command()
@click.option("--name", default="", help="The mesh's name; without one it is known by a random id.")
@click.option("--switch", is_flag=True, help="Leave the mesh this node is in for the new one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def init(name: str, switch: bool, as_json: bool) -> None:
    """Make a mesh with this node as its first member, and start the node if it does not run."""
    node = Node()
    bring_up(node, {})
    made = node.ask("gossipd", InitMesh(name=name, switch=switch), deadline_seconds=20.0)
    assert isinstance(made, MeshJoined)
    if as_json:
        print_json({"mesh_id": made.mesh_id, "mesh_name": made.mesh_name, "already": made.already})
        return
    what = f"mesh {made.mesh_name}" if made.mesh_name else f"the unnamed mesh {made.mesh_id}"
    click.echo(clean(f"This node is {'already in' if made.already else 'the first of'} {what}. Next: meshctl invite"))


@click.command()
@click.argument("token", required=False)
@click.option("--model", "-m", "models", multiple=True, metavar="M", help="Serve this model. Repeatable.")
@click.option("--client", is_flag=True, help="Only use the mesh: serve nothing.")
@click.option("--switch", is_flag=True, help="Leave the mesh this node is in for this one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def join(token: str | None, models: tuple[str, ...], client: bool, switch: bool, as_json: bool) -> None:
    """Join the mesh that TOKEN invites to; starts the node if it does not run.

    TOKEN is the token itself, - for standard input, @FILE for a file, or nothing when MESH_TOKEN holds it.
    """
    node = Node()
    text = read_token(token, node.environ.get(TOKEN_VARIABLE))
    if client and models:
        raise click.UsageError(CLIENT_WITH_MODEL)
    bring_up(node, changes_of(node, models, (), client=client or None))
    request = JoinMesh(token=text, client=client, switch=switch)
    joined, steps = run(_join(node, request, quiet=as_json))
    if joined.grant == "client" and update_config(node.paths.config_file, node.environ, {("node", "client"): True}):
        # The invite lets it only consume: its own daemons shall not load what nobody may be served.
        reload_daemons(node)
    if as_json:
        print_json(
            {
                "mesh_id": joined.mesh_id,
                "mesh_name": joined.mesh_name,
                "grant": joined.grant,
                "already": joined.already,
                "steps": [{"name": step.name, "state": step.state, "detail": step.detail} for step in steps],
            }
        )
        return
    name = f"mesh {joined.mesh_name}" if joined.mesh_name else f"the unnamed mesh {joined.mesh_id}"
    click.echo(clean(f"This node is in {name}. Every model of it answers here: {endpoint(node.status())}"))


def read_token(given: str | None, from_environment: str | None) -> str:
    """The token, wherever it is. Raises: ConfigError."""
    if given is None:
        if not from_environment:
            raise click.UsageError(f"give the token, - for standard input, @FILE, or set {TOKEN_VARIABLE}")
        return from_environment.strip()
    if given == "-":
        return sys.stdin.read(TOKEN_FILE_BYTES).strip()
    if given.startswith("@"):
        path = Path(os.path.expanduser(given[1:]))
        try:
            with open(path, encoding="utf-8") as file:
                return file.read(TOKEN_FILE_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the token from {path}: {error}") from error
    return given.strip()


async def _join(node: Node, request: JoinMesh, *, quiet: bool) -> tuple[MeshJoined, tuple[JoinStep, ...]]:
    """Ask, show every step as it happens, and follow it a while after the node is admitted. Raises: MeshError."""
    client = BusClient("gossipd", node.paths)
    asked = asyncio.ensure_future(client.request(request, deadline_seconds=JOIN_SECONDS))
    shown = Steps(quiet)
    try:
        while not asked.done():
            await asyncio.wait([asked], timeout=LOOK_SECONDS)
            shown.show(await _steps(node))
        reply: Message = await asked
        if not isinstance(reply, MeshJoined):
            raise MeshError("gossipd answered something else; see 'meshctl version'")
        until = time.monotonic() + SETTLE_SECONDS
        while not shown.finished and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
            shown.show(await _steps(node))
        return reply, shown.steps
    except (RequestRefused, DaemonUnreachable):
        shown.show(await _steps(node))
        raise
    finally:
        shown.done()
        client.close()


async def _steps(node: Node) -> tuple[JoinStep, ...]:
    said = await survey(node.paths, ("gossipd",))
    found = next((item for item in said.snapshots["gossipd"] or () if isinstance(item, JoinChanged)), None)
    return found.steps if found else ()


class Steps:
    """Prints each finished step once, and what the newest one waits for on a line that is rewritten."""

    def __init__(self, quiet: bool) -> None:
        self.steps: tuple[JoinStep, ...] = ()
        self._quiet = quiet
        self._printed = 0
        self._waiting = Waiting()
        self._started = time.monotonic()

    @property
    def finished(self) -> bool:
        return bool(self.steps) and self.steps[-1].name == "assigned" and self.steps[-1].state != "waiting"

    def show(self, steps: tuple[JoinStep, ...]) -> None:
        self.steps = steps
        if self._quiet:
            return
        for step in steps[self._printed :]:
            if step.state == "waiting":
                self._waiting.show(f"{step.name}: {step.detail}", time.monotonic() - self._started)
                return
            self._waiting.done()
            mark = "failed: " if step.state == "failed" else ""
            progress(f"{step.name}: {mark}{step.detail}")
            self._printed += 1

    def done(self) -> None:
        self._waiting.done()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def leave(as_json: bool) -> None:
    """Leave the mesh: say goodbye, forget its certificate. The node goes on by itself, in a mesh of one."""
    done = Node().ask("gossipd", LeaveMesh(), deadline_seconds=20.0)
    assert isinstance(done, Done)
    _say(done, as_json)


@click.command()
@click.option("--off", is_flag=True, help="Take requests again.")
@on_node
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def drain(off: bool, where: str | None, as_json: bool) -> None:
    """Take no new requests from other nodes; running ones finish."""
    node = Node()
    peer_id = other_node(node, where)
    if peer_id is not None:
        said = "; ".join(ask_node(node, peer_id, "drain", "off" if off else ""))
        _say(Done(detail=f"{where}: {said}"), as_json)
        return
    done = node.ask("gossipd", DrainNode(off=off), deadline_seconds=10.0)
    assert isinstance(done, Done)
    _say(done, as_json)


def _say(done: Done, as_json: bool) -> None:
    if as_json:
        print_json({"detail": done.detail})
    else:
        click.echo(clean(done.detail))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def whoami(as_json: bool) -> None:
    """Show this node's id, mesh, grant and addresses."""
    found = Node().ask("gossipd", WhoAmI())
    assert isinstance(found, NodeIdentity)
    if as_json:
        import dataclasses

        print_json(dataclasses.asdict(found))
        return
    mesh = found.mesh_name or found.mesh_id or "none (this node is idle)"
    lines = [
        f"node     {found.name}",
        f"id       {found.peer_id}",
        f"mesh     {mesh}",
        f"grant    {found.grant or 'none yet: the first meshctl invite makes one'}",
    ]
    if found.root_fingerprint:
        lines.append(f"root     {found.root_fingerprint}")
        days = found.certificate_expires_in_seconds / 86_400
        good = f"certificate valid for {days:.0f} more days" if days > 0 else "certificate expired: meshctl join TOKEN"
        lines.append(f"renewal  {good}")
    lines += [f"address  {address}" for address in found.addresses]
    for line in lines:
        click.echo(clean(line))
