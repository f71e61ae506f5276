"""``keys``: API keys of the inference port. Only hashes are kept, so a key is shown once."""

from __future__ import annotations

import datetime

import click

from services.meshctl.node import Node
from services.meshctl.output import clean, print_json, progress, table
from services.meshctl.output import console as terminal
from shared.config import is_loopback
from shared.io.keys_file import create_key, load_keys, revoke_key


@click.group(invoke_without_command=True)
@click.pass_context
def keys(ctx: click.Context) -> None:
    """Create, list and revoke API keys.

    With at least one key, every request to the inference port must carry one.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_keys, as_json=False)


@keys.command("create")
@click.option("--name", default="", help="What it is for; shown in lists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(name: str, as_json: bool) -> None:
    """Make a key and print it, this once."""
    path = Node().paths.keys_file
    first = not load_keys(path).keys
    key, text = create_key(path, name)
    if as_json:
        print_json({"id": key.id, "name": key.name, "key": text})
        return
    click.echo(text)
    progress("Keep it now: only its hash is stored. Clients send it as 'Authorization: Bearer KEY'.")
    if first:
        progress("From now on requests without a key are refused.")


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_keys(as_json: bool) -> None:
    """List the keys, without their secrets."""
    node = Node()
    ring = load_keys(node.paths.keys_file)
    if as_json:
        print_json(
            [{"id": key.id, "name": key.name, "created_unix_seconds": key.created_unix_seconds} for key in ring.keys]
        )
        return
    if not ring.keys:
        local = is_loopback(node.config.api.host)
        who = "Anybody on this machine" if local else f"Nobody (api.host is {node.config.api.host})"
        click.echo(f"There is no API key. {who} may use the API. Make one: meshctl keys create --name LAPTOP")
        return
    rows = [
        (
            key.id,
            key.name,
            datetime.datetime.fromtimestamp(key.created_unix_seconds).astimezone().strftime("%Y-%m-%d %H:%M"),
        )
        for key in ring.keys
    ]
    terminal().print(table(["ID", "NAME", "CREATED"], rows))


@keys.command("revoke")
@click.argument("id_or_name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def revoke(id_or_name: str, as_json: bool) -> None:
    """Revoke a key by id or name; it stops working within a second."""
    node = Node()
    path = node.paths.keys_file
    key = revoke_key(path, id_or_name)
    if as_json:
        print_json({"id": key.id, "name": key.name})
        return
    click.echo(f"Key {key.id} {clean(key.name)}".rstrip() + " is revoked.")
    if not load_keys(path).keys:
        api = node.config.api
        if is_loopback(api.host) or api.allow_public_without_keys:
            progress("That was the last key: requests need none now.")
        else:
            progress(
                f"That was the last key, and other machines can reach {api.host}: no request is served until "
                "there is a new one. Next: meshctl keys create, or meshctl config set api.host 127.0.0.1"
            )
