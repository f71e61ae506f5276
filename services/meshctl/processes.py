"""``restart``: through supervisord, one daemon after another, so that the node keeps serving."""

from __future__ import annotations

import time
import xmlrpc.client

import click

from services.meshctl.node import Node, Supervised, wait_until
from services.meshctl.output import Waiting, print_json
from services.meshctl.up import StartFailed
from shared.errors import MeshError
from shared.ids import DAEMONS

NOT_RUNNING_FAULT = 70
RESTARTABLE = (*DAEMONS, "keeper")
ANSWER_SECONDS = 30.0


class RestartFailed(MeshError):
    code = "restart_failed"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(RESTARTABLE), metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def restart(names: tuple[str, ...], as_json: bool) -> None:
    """Restart daemons: those named, or all five one after another.

    Loaded models stay loaded. The keeper, which holds the listening ports, is only restarted when named.
    """
    node = Node()
    found = node.running()
    _ = node.config  # A daemon that runs would be stopped for one that refuses to start.
    done = []
    for name in dict.fromkeys(names or DAEMONS):
        old, new = restart_one(node, found, name)
        done.append({"name": name, "old_pid": old, "pid": new})
        if not as_json:
            click.echo(f"{name} restarted: pid {old or 'none'} -> {new}")
    if as_json:
        print_json(done)


def restart_one(node: Node, found: Supervised, name: str) -> tuple[int, int]:
    """(old pid, new pid) once the new process answers. Raises: RestartFailed, StartFailed."""
    waiting = Waiting()
    started = time.monotonic()
    waiting.show(f"Restarting {name} …", 0.0)
    try:
        old = int(found.supervisor.call("getProcessInfo", name)["pid"])
        try:
            found.supervisor.call("stopProcess", name)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode != NOT_RUNNING_FAULT:
                raise
        found.supervisor.call("startProcess", name, False)
    except (OSError, xmlrpc.client.Error) as error:
        raise RestartFailed(f"supervisord did not restart {name}: {error}; see 'meshctl logs {name}'") from error
    finally:
        waiting.done()

    def answering() -> bool | None:
        waiting.show(f"Waiting for {name} to answer …", time.monotonic() - started)
        row = found.supervisor.call("getProcessInfo", name)
        if row["statename"] == "FATAL":
            return False
        if name not in DAEMONS:
            return True if row["statename"] == "RUNNING" else None
        return True if node.survey([name]).infos[name] is not None else None

    try:
        outcome = wait_until(answering, ANSWER_SECONDS)
    except (OSError, xmlrpc.client.Error) as error:
        raise RestartFailed(f"supervisord does not answer any more: {error}; see 'meshctl status'") from error
    finally:
        waiting.done()
    if not outcome:
        daemon = next((daemon for daemon in node.status().daemons if daemon.name == name), None)
        why = daemon.detail if daemon else "it did not start"
        raise StartFailed(f"{name} does not come back: {why}; see 'meshctl logs {name}'")
    return old, int(found.supervisor.call("getProcessInfo", name)["pid"])
