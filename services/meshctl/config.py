"""``config``: check, show, change and reload ``mesh.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from services.meshctl.config_file import parse_setting, sources, split_setting, update_config
from services.meshctl.machine import engine_found
from services.meshctl.node import Node
from services.meshctl.output import clean, print_json, progress
from services.meshctl.reload import reload_daemons, say_reloaded
from shared.config import ENVIRONMENT, SECTIONS, NodeConfig, heeded, is_loopback
from shared.recipes import BUILTIN_RECIPES, RECIPE_KEYS, Recipe


@click.group()
def config() -> None:
    """Check, show, change and reload this node's settings (mesh.toml)."""


@config.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(as_json: bool) -> None:
    """Check mesh.toml and the MESH_* variables; exit status 1 when they can't be used."""
    node = Node()
    warnings = warnings_about(node, node.config)
    path = node.paths.config_file
    if as_json:
        print_json({"path": str(path), "exists": node.config.configured, "warnings": warnings})
        return
    click.echo(
        f"{path} is fine."
        if node.config.configured
        else f"There is no {path}: the node is idle. 'meshctl up' writes it."
    )
    for warning in warnings:
        click.echo(f"warning: {clean(warning)}")


def warnings_about(node: Node, found: NodeConfig) -> list[str]:
    """What is allowed but probably not meant."""
    warnings = [
        f"models.folders: {folder} does not exist; create it or remove it from the list"
        for folder in found.model_folders()
        if not folder.is_dir() and folder != folder.home() / ".models"
    ]
    if not is_loopback(found.api.host) and not node.paths.keys_file.exists():
        allowed = found.api.allow_public_without_keys
        warnings.append(
            f"api.host is {found.api.host} and there is no API key: "
            + ("anybody who reaches it may use it" if allowed else "every request is refused; meshctl keys create")
        )
    if not is_loopback(found.console.host):
        warnings.append(f"console.host is {found.console.host}: other machines can read this node's status")
    _, missing = engine_found(found, node.environ)
    return warnings + ([missing] if missing else [])


@config.command()
@click.argument("key", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(key: str | None, as_json: bool) -> None:
    """Print every setting in effect and where it comes from, or the value of one KEY."""
    node = Node()
    found, origins = sources(node.paths.config_file, node.environ)
    if key is not None:
        section, name = split_setting(key)
        value = getattr(getattr(found, section), name)
        if as_json:
            print_json({"key": key, "value": value, "source": origins[key]})
        else:
            click.echo(_toml(value) if isinstance(value, tuple | bool | Mapping) else str(value))
        return
    if as_json:
        print_json(
            {
                dotted: {
                    "value": getattr(getattr(found, dotted.partition(".")[0]), dotted.partition(".")[2]),
                    "source": origin,
                }
                for dotted, origin in origins.items()
            }
            | {dotted: {"value": value, "source": "mesh.toml"} for dotted, value in own_recipes(found).items()}
        )
        return
    for section in SECTIONS:
        click.echo(f"[{section}]")
        for dotted, origin in origins.items():
            prefix, _, name = dotted.partition(".")
            if prefix == section:
                line = f"{name} = {_toml(getattr(getattr(found, section), name))}"
                click.echo(clean(line if origin == "default" else f"{line:40}  # {origin}"))
        click.echo()
    section = ""
    for dotted, value in own_recipes(found).items():
        prefix, _, name = dotted.rpartition(".")
        if prefix != section:
            section = prefix
            click.echo(clean(f"[{section}]"))
        click.echo(clean(f"{name} = {_toml(value)}"))


def own_recipes(found: NodeConfig) -> dict[str, Any]:
    """``recipes.NAME.KEY`` and value of what mesh.toml adds or changes."""
    changed: dict[str, Any] = {}
    for name, recipe in found.recipes.items():
        usual = BUILTIN_RECIPES.get(name, Recipe(name=name))
        for key in RECIPE_KEYS:
            value = getattr(recipe, key)
            if value != getattr(usual, key):
                changed[f"recipes.{name}.{key}"] = tuple(sorted(value)) if isinstance(value, frozenset) else value
    return changed


@config.command("set", context_settings={"ignore_unknown_options": True})  # A value may be -1.
@click.argument("key")
@click.argument("value")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def set_(key: str, value: str, as_json: bool) -> None:
    """Write one setting into mesh.toml (its comments stay) and reload it if the node is up.

    KEY is like api.port. A list is written a,b,c; engine.extra_args is one text with quotes as in a shell.
    """
    node = Node()
    where, parsed = parse_setting(key, value)
    changed = update_config(node.paths.config_file, node.environ, {where: parsed})
    result = reload_daemons(node) if node.supervised is not None else None
    if as_json:
        print_json(
            {
                "changed": list(changed),
                "reloaded": result.changed if result else [],
                "needs_restart": result.restart if result else {},
            }
        )
        return
    click.echo(f"{key} = {_toml(parsed)}" + ("" if changed else " (as before)"))
    if result is not None:
        say_reloaded(result)
    said = heeded(node.paths.config_file, node.environ)
    for name in (name for name, place in ENVIRONMENT.items() if place == where and said.get(name)):
        progress(f"Note: {name} is set in this shell and overrides it here")


@config.command("reload")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reload_(as_json: bool) -> None:
    """Make the running daemons read mesh.toml again. Models the change does not touch stay loaded."""
    node = Node()
    node.running()
    _ = node.config  # A file that can't be used is reported from here, before any daemon sees it.
    result = reload_daemons(node)
    if as_json:
        print_json({"changed": result.changed, "needs_restart": result.restart, "not_reached": result.failed})
    else:
        say_reloaded(result)
    if result.failed:
        raise SystemExit(1)


def _toml(value: Any) -> str:
    import tomlkit

    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update(value)
        return str(table.as_string())
    return str(tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string())
