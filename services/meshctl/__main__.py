"""``meshctl``: exit status 0 when it is done, 1 when it failed, 2 for wrong usage, 130 when interrupted."""

from __future__ import annotations

import os
import sys

import click

from services.meshctl.commands import meshctl
from services.meshctl.output import fail
from shared.errors import MeshError


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit. Every expected failure becomes one message that says what to do next."""
    given = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in given
    try:
        status = meshctl.main(args=given, prog_name="meshctl", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        status = 2
    except click.UsageError as error:
        if as_json:
            fail("usage", error.format_message(), as_json=True)
        else:
            error.show()
        status = 2
    except click.ClickException as error:
        fail("failed", error.format_message(), as_json=as_json)
        status = 1
    except (click.Abort, KeyboardInterrupt):
        status = 130
    except MeshError as error:
        fail(error.code, error.detail, as_json=as_json)
        status = 1
    except BrokenPipeError:
        # The reader went away (a pager, head): nothing failed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    raise SystemExit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
