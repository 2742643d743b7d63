"""Questions and progress of a migration, on a terminal only: a script or a pipe never waits for an answer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TextIO

import typer

from flexd.api import routes
from flexd.api.migration import MigrationReport
from flexd.cli.client import DaemonClient
from flexd.cli.exit_codes import ExitCode
from flexd.core import units
from flexd.core.errors import FlexdError

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


_EVERY_SECONDS = 0.5
_CELLS = 30
_ERASE_LINE = "\r\x1b[K"


@contextmanager
def migration_progress(client: DaemonClient, waiting: bool, stream: TextIO | None = None) -> Iterator[None]:
    """Show the migration in flight on ``stream`` (stderr) until the block ends, if it is a terminal."""
    shown = stream or sys.stderr
    if not waiting or not shown.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(client, ended, shown), name="flexd-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # The command has its result: a status call that hangs is abandoned.
        thread.join(2 * _EVERY_SECONDS)
        shown.write(_ERASE_LINE)
        shown.flush()


def progress_line(migration: MigrationReport) -> str:
    done = round(_CELLS * migration.progress)
    return (
        f"[{'#' * done}{'.' * (_CELLS - done)}] {units.share(migration.progress)}  "
        f"{units.count(migration.rows_applied)} of {units.count(migration.rows)} rows, {migration.state.lower()}"
    )


def _show(client: DaemonClient, ended: threading.Event, stream: TextIO) -> None:
    while not ended.wait(_EVERY_SECONDS):
        try:
            migration = client.send(routes.STATUS).migration
        except FlexdError:
            # The call that waits reports the error.
            continue
        if migration is not None and not ended.is_set():
            stream.write(_ERASE_LINE + progress_line(migration))
            stream.flush()
