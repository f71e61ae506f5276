"""What a person should do next, from a node's status. Pure rules, most urgent first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.node_status import NodeStatus

HINT_LIMIT = 4
"""More than a handful of suggestions is none."""

_STATE_WORDS = {
    "fatal": "could not be started",
    "backoff": "does not stay up",
    "exited": "has ended",
    "silent": "does not answer",
}
"""supervisord's states, and ours, that a person must look at."""


def hints_for(status: NodeStatus) -> tuple[str, ...]:
    """Sentences or commands, at most ``HINT_LIMIT``."""
    hints: list[str] = []
    if status.overall == "down":
        return ("start the node: meshctl up",)
    hints += [
        f"{daemon.name} {_STATE_WORDS[daemon.state]}: meshctl logs {daemon.name}, then meshctl restart {daemon.name}"
        for daemon in status.daemons
        if daemon.state in _STATE_WORDS
    ]
    versions = sorted({daemon.version for daemon in status.daemons if daemon.version})
    if len(versions) > 1:
        hints.append(f"daemons of versions {', '.join(versions)} run together: meshctl restart")
    if status.node.engine_reason:
        hints.append(f"no engine: {status.node.engine_reason}")
    hints += [f"{model.name} failed: meshctl why {model.name}" for model in status.models if model.status == "failed"]
    hints += [
        f"{model.name} needs more memory than the mesh has: meshctl why {model.name}"
        for model in status.models
        if model.status == "needs_capacity" and model.requested
    ]
    hints += _what_to_run(status)
    if status.skipped:
        count = len(status.skipped)
        hints.append(f"{count} file{'s' if count > 1 else ''} skipped: meshctl models list shows why")
    return tuple(hints[:HINT_LIMIT])


def _what_to_run(status: NodeStatus) -> list[str]:
    if status.overall == "idle":
        return ["give the node something to do: meshctl up --model NAME, or talk to the guide: meshctl run meshd-guide"]
    ready = [model for model in status.models if model.status == "ready" and model.type == "llm"]
    if ready:
        # Prefer a model of the owner's over the guide that ships with meshd.
        best = min(ready, key=lambda model: (model.builtin, model.name))
        return [f"talk to it: meshctl chat {best.name}"]
    if any(model.status == "loading" for model in status.models):
        return []
    if not any(daemon.name == "launcherd" and daemon.state == "running" for daemon in status.daemons):
        return []  # Nobody knows what is on the disk.
    own = [model for model in status.models if not model.builtin]
    if not own and not status.node.scanning:
        return ["no model of your own yet: put .gguf files into ~/.models, or try meshctl run meshd-guide"]
    llms = [model for model in own if model.type == "llm" and model.status == "unloaded"]
    return [f"load one: meshctl load {llms[0].name}"] if llms else []
