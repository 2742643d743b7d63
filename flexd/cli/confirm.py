"""Asks before a change, on a terminal only: a script or a pipe never hangs on a question."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flexd.cli.exit_codes import ExitCode

YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask. In a pipe or a script nothing is asked.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]


def must_ask(yes: bool) -> bool:
    """True on a terminal without ``--yes``."""
    return not yes and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, yes: bool) -> None:
    """Returns if the answer is yes. Otherwise ends the command: exit status 1, or 130 at Control-C.

    Args:
        question: without the choices: ``Pause job j?``.
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
