"""``invite``: let others into the mesh. The token is shown once and kept nowhere in full."""

from __future__ import annotations

import re

import click

from services.meshctl.node import Node
from services.meshctl.output import age, clean, print_json, progress, table
from services.meshctl.output import console as terminal
from services.meshctl.up import bring_up
from shared.ids import InviteId
from shared.messages.daemon import Done
from shared.messages.trust import (
    CreateInvite,
    Grant,
    InviteCreated,
    InviteList,
    InviteView,
    ListInvites,
    RevokeInvite,
)

UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Duration(click.ParamType[float]):
    """``30m``, ``24h``, ``7d``; seconds without a unit."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip())
        if found is None or float(found[1]) <= 0:
            self.fail(f"{value!r} is no duration; write it like 30m, 24h or 7d", param, ctx)
        return float(found[1]) * UNIT_SECONDS[found[2] or "s"]


@click.group(invoke_without_command=True)
@click.option("--grant", type=click.Choice(["member", "client", "issuer", "guest"]), default="member")
@click.option("--expires", type=Duration(), default="24h", help="Like 30m, 24h or 7d.", show_default=True)
@click.option("--uses", type=click.IntRange(min=1), default=1, help="How many nodes may join with it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def invite(ctx: click.Context, grant: Grant, expires: float, uses: int, as_json: bool) -> None:
    """Print a token that another machine joins with: meshctl join TOKEN.

    A member serves and uses models, a client only uses them, an issuer also invites others, a guest serves whole
    models only.
    """
    if ctx.invoked_subcommand is not None:
        return
    node = Node()
    bring_up(node, {})
    made = node.ask("gossipd", CreateInvite(grant=grant, expires_seconds=expires, uses=uses), deadline_seconds=20.0)
    assert isinstance(made, InviteCreated)
    if as_json:
        print_json({"token": made.token, **_fields(made.invite)})
        return
    click.echo(made.token)
    times = "once" if uses == 1 else f"{uses} times"
    progress(f"Good {times} for {age(expires)}, as {grant}. On the other machine: meshctl join TOKEN")


@invite.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_invites(as_json: bool) -> None:
    """List the invites of this node, without their secrets."""
    found = Node().ask("gossipd", ListInvites())
    assert isinstance(found, InviteList)
    if as_json:
        print_json([_fields(item) for item in found.invites])
        return
    if not found.invites:
        click.echo("There is no invite. Make one: meshctl invite")
        return
    rows = [(item.invite_id, item.grant, f"{item.used} of {item.uses}", _validity(item)) for item in found.invites]
    terminal().print(table(["ID", "GRANT", "USED", "GOOD FOR"], rows))


@invite.command("revoke")
@click.argument("invite_id")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def revoke(invite_id: str, as_json: bool) -> None:
    """Make an invite useless. Nodes that joined with it stay; 'meshctl peers ban' removes one."""
    done = Node().ask("gossipd", RevokeInvite(invite_id=InviteId(invite_id)))
    assert isinstance(done, Done)
    if as_json:
        print_json({"invite_id": invite_id, "detail": done.detail})
    else:
        click.echo(clean(done.detail))


def _validity(item: InviteView) -> str:
    if item.revoked:
        return "revoked"
    if item.expires_in_seconds <= 0:
        return "expired"
    return "used up" if item.used >= item.uses else age(item.expires_in_seconds)


def _fields(item: InviteView) -> dict[str, object]:
    return {
        "invite_id": item.invite_id,
        "grant": item.grant,
        "uses": item.uses,
        "used": item.used,
        "expires_in_seconds": item.expires_in_seconds,
        "issuer": item.issuer,
        "revoked": item.revoked,
    }
