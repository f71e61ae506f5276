"""Telling every daemon to read ``mesh.toml`` again, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.meshctl.node import Node
from services.meshctl.output import progress
from shared.errors import MeshError, RequestRefused
from shared.messages.daemon import ConfigReloaded, ReloadConfig

RELOAD_SECONDS = 10.0


@dataclass
class Reloaded:
    """``restart``: daemon -> dotted keys that only count after its restart. ``failed``: daemon -> why."""

    changed: list[str] = field(default_factory=list)
    restart: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def reload_daemons(node: Node) -> Reloaded:
    """Models that the change does not touch stay loaded. Raises: RequestRefused when the daemons refuse the file."""
    result = Reloaded()
    for daemon, reply in node.ask_all(ReloadConfig(), deadline_seconds=RELOAD_SECONDS).items():
        match reply:
            case ConfigReloaded(changed=changed, needs_restart=needs_restart):
                result.changed += [key for key in changed if key not in result.changed]
                if needs_restart:
                    result.restart[daemon] = list(needs_restart)
            case RequestRefused() if reply.code == "config":
                raise reply
            case MeshError():
                result.failed[daemon] = reply.detail
    return result


def say_reloaded(result: Reloaded) -> None:
    """The outcome for a person, on stderr."""
    progress(f"Reloaded: {', '.join(result.changed) or 'nothing that running daemons use has changed'}")
    for daemon, keys in result.restart.items():
        progress(f"{', '.join(keys)}: takes effect after 'meshctl restart {daemon}'")
    for daemon, why in result.failed.items():
        progress(f"{daemon} was not reached ({why}); it reads the file when it starts")
