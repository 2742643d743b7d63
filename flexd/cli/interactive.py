"""Questions and waits, on a terminal only: a script or a pipe never waits for an answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from flexd.cli.exit_codes import ExitCode

YesOption = Annotated[
    bool, typer.Option("-y", "--yes", help="Do not ask for confirmation; pipes and scripts are never asked.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the effect, and change nothing.")]


def must_ask(yes: bool) -> bool:
    """Return True on a terminal without ``--yes``."""
    return not yes and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, yes: bool) -> None:
    """Ask the user to confirm; on any reply but yes end the command: exit status 1, or 130 at Control-C.

    Args:
        question: text without the choices, such as ``Pause job j?``.
    """
    if not must_ask(yes):
        return
    # On stderr: stdout may be redirected to a file.
    try:
        agreed = typer.confirm(question, default=False, err=True)
    except typer.Abort as ended:
        # Raised for Control-C and for the end of the input alike.
        interrupted = isinstance(ended.__context__, KeyboardInterrupt)
        print("\nnothing was changed", file=sys.stderr)
        raise typer.Exit(ExitCode.INTERRUPTED if interrupted else ExitCode.FAILED) from ended
    if not agreed:
        print("nothing was changed", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def waiting_shown(waits: bool) -> Iterator[None]:
    """Show on stderr that the command waits for a migration until the block ends, if it is a terminal."""
    if not waits or not sys.stderr.isatty():
        yield
        return
    # Imported here because rich takes a while to load, and a pipe does not need it.
    from rich.console import Console

    with Console(stderr=True).status("waiting for the migration; flexd status shows its parts"):
        yield
