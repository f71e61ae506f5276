"""The verbs. Only the module of the verb that is run is imported, so that every command starts fast."""

from __future__ import annotations

import importlib

import click

from shared.version import VERSION

VERBS: dict[str, tuple[str, str]] = {
    "up": ("up", "Start this node, or apply changed settings to it."),
    "down": ("down", "Stop this node and everything it started."),
    "status": ("status", "Show what this node is doing, and what to do next."),
    "ps": ("status", "List loaded models, as Ollama does."),
    "init": ("mesh", "Make a mesh with this node as its first."),
    "invite": ("invite", "Print a token that another machine joins with."),
    "join": ("mesh", "Join the mesh that a token invites to."),
    "leave": ("mesh", "Leave the mesh; the node goes on by itself."),
    "drain": ("mesh", "Take no new requests from other nodes, or take them again."),
    "whoami": ("mesh", "Show this node's id, mesh, grant and addresses."),
    "peers": ("peers", "List the nodes of the mesh; ban one, or trust a guest."),
    "restart": ("processes", "Restart daemons; the others keep running."),
    "logs": ("logs", "Print logs of daemons and engines."),
    "models": ("models", "List, show and delete models."),
    "pull": ("pull", "Download a model."),
    "load": ("load", "Load a model and wait until it is ready."),
    "unload": ("load", "Unload a model, or all of them."),
    "pin": ("pin", "Keep a model loaded when others want its place."),
    "unpin": ("pin", "Let a model make room for others again."),
    "chat": ("chat", "Talk to a model."),
    "run": ("chat", "Start the node if need be, load a model and talk to it."),
    "doctor": ("doctor", "Check this machine and say what is missing and how to get it."),
    "why": ("explain", "Say in words why a model, node or request is where it is."),
    "story": ("explain", "Print what a daemon was told and did, newest last."),
    "keys": ("keys", "Create, list and revoke API keys."),
    "config": ("config", "Check, show, change and reload the settings."),
    "version": ("status", "Show the versions of meshctl and of every daemon."),
    "completion": ("completion", "Print the completion script of a shell."),
}
"""Verb -> (module, one line of help)."""


class LazyGroup(click.Group):
    """Knows its verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"services.meshctl.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            import difflib

            close = difflib.get_close_matches(args[0], list(VERBS), n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else "; 'meshctl --help' lists them"
            ctx.fail(f"no such command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, message="meshctl %(version)s")
def meshctl() -> None:
    """Control this machine's meshd node.

    State lives in MESH_HOME (~/.mesh if unset). Start with 'meshctl up', then 'meshctl status'.
    """
