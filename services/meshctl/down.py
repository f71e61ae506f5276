"""``down``: an orderly stop, and proof that nothing is left."""

from __future__ import annotations

import contextlib
import time
import xmlrpc.client

import click
import psutil

from services.meshctl.leftovers import Leftover, end, find_leftovers, locked_daemons
from services.meshctl.node import Node, Supervised, wait_until
from services.meshctl.output import Waiting, print_json, progress
from shared.errors import StateError

SETTLE_SECONDS = 3.0
"""Daemons whose supervisord is gone end by themselves; what still runs then has to be ended."""
STOP_SECONDS = 90.0
"""Each daemon has 10 s, launcherd 20, one after another."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def down(as_json: bool) -> None:
    """Stop this node: daemons, engines and supervisord.

    Also cleans up after a supervisord that was killed.
    """
    node = Node()
    found = node.supervised
    if found is not None:
        _shut_down(node, found)
    elif not node.paths.bus.is_dir():
        _say(as_json, was_running=False, ended=[])
        return

    # With supervisord gone the daemons end by themselves; whatever is left then belongs to nobody.
    def left() -> list[Leftover]:
        return find_leftovers(node.paths, node.supervisor_confs)

    wait_until(lambda: None if left() else True, SETTLE_SECONDS, every_seconds=0.2)
    leftovers = left()
    for item in leftovers:
        progress(f"Ending {item.name} (pid {item.pid}), left over by an earlier supervisord or launcherd")
    surviving = end(leftovers)
    if surviving:
        names = ", ".join(f"{item.name} (pid {item.pid})" for item in surviving)
        raise StateError(f"{names} cannot be ended, not even by SIGKILL; look at them with 'ps -fp PID'")
    _say(as_json, was_running=found is not None, ended=[f"{item.name} (pid {item.pid})" for item in leftovers])


def _say(as_json: bool, *, was_running: bool, ended: list[str]) -> None:
    if as_json:
        print_json({"was_running": was_running, "ended_leftovers": ended})
    elif was_running or ended:
        click.echo("This node is down; none of its processes is left.")
    else:
        click.echo("This node was not running.")


def _shut_down(node: Node, found: Supervised) -> None:
    """Ask supervisord and wait until it is gone. Raises: StateError."""
    try:
        found.supervisor.call("shutdown")
    except xmlrpc.client.Fault as fault:
        progress(f"supervisord is stopping already ({fault.faultString})")
    except OSError as error:
        progress(f"supervisord does not answer ({error}); waiting for its end")
    waiting = Waiting()
    started = time.monotonic()

    def gone() -> bool | None:
        if not psutil.pid_exists(found.pid) or _is_zombie(found.pid):
            return True
        # supervisord looks after its children once a second, or when somebody talks to it.
        with contextlib.suppress(OSError, xmlrpc.client.Error):
            found.supervisor.call("getPID")
        alive = [item.name for item in locked_daemons(node.paths)]
        waiting.show(f"Stopping {', '.join(alive) or 'supervisord'} …", time.monotonic() - started)
        return None

    done = wait_until(gone, STOP_SECONDS, every_seconds=0.1)
    waiting.done()
    if done is None:
        raise StateError(
            f"supervisord (pid {found.pid}) has not stopped within {STOP_SECONDS:.0f} s; run 'meshctl status' to see "
            f"what holds it up, then 'meshctl down' again or kill {found.pid}"
        )


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
