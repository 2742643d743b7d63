"""Asks before something changes: on a terminal only, so that a script or a pipe never hangs on a question."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flexd.cli.exit_codes import ExitCode

YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask. In a pipe or a script nothing is asked.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and change nothing.")]


def must_ask(yes: bool) -> bool:
    """Whether somebody sits in front of it and has not agreed yet."""
    return not yes and sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, yes: bool) -> None:
    """Returns if it may go on. Otherwise ends the command (exit status 1) with nothing changed.

    Args:
        question: without the question mark's answer: ``Pause job j?``.
    """
    if not must_ask(yes):
        return
    # On stderr: stdout may be redirected to a file.
    if not typer.confirm(question, default=False, err=True):
        print("nothing was changed", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED)
