"""``history``, ``migrations`` and ``abort``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from flexd.api.migration import MAX_LISTED
from flexd.cli.confirm import DryRunOption, YesOption, confirm, must_ask
from flexd.cli.exit_codes import exit_code_of_outcome
from flexd.cli.migration_view import abort_blocks, abort_preview_blocks, abort_sentence, detail_blocks, history_blocks
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect, who
from flexd.cli.progress import migration_progress
from flexd.cli.view import OutputFormat, emit

app = typer.Typer(help="Migrations of this daemon and of those before it.", no_args_is_help=True, rich_markup_mode=None)


class State(StrEnum):
    """The names of ``MigrationStateName``."""

    PENDING = "pending"
    PUSHING = "pushing"
    APPLYING = "applying"
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    FAILED = "failed"


LimitOption = Annotated[
    int, typer.Option("-n", "--limit", metavar="N", min=1, max=MAX_LISTED, help="Show at most N migrations.")
]
StateOption = Annotated[State | None, typer.Option("--state", help="Only those that are, or ended, in this state.")]


def add_to(root: typer.Typer) -> None:
    root.command("history")(history)
    root.command("abort")(abort)
    app.command("list")(list_command)
    app.command("show")(show_command)
    root.add_typer(app, name="migrations")


def history(
    limit: LimitOption = 20,
    state: StateOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Lists the newest migrations: when, who, why, how much, and how they ended; and what else was asked for (pause,
    resume, throttle, reload, overridden gates). It outlives the daemon.

    Example: flexd history -n 5 --state aborted
    """
    answer = connect(url, socket).migrations(limit, None if state is None else state.name)
    emit(answer, history_blocks(answer, None if state is None else state.value), output)


def list_command(
    limit: LimitOption = 20,
    state: StateOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """The same as flexd history.

    Example: flexd migrations list -n 5
    """
    history(limit, state, url, socket, output)


def show_command(
    migration_id: Annotated[str, typer.Argument(metavar="ID", help="Of flexd history, or: latest.")],
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Shows one migration with every change of its state.

    Example: flexd migrations show latest
    """
    answer = connect(url, socket).migration(migration_id)
    emit(answer, detail_blocks(answer), output)


def abort(
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Go back to the placement that the migration started from.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0, max=3600, help="How long to wait for the end, in seconds.")
    ] = 60.0,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Recorded.")] = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stops the migration under way at its next chunk, and says where. What waits behind it is not started.

    The daemon goes on planning by itself: pause it first if it shall not. Exit status 0 once it has stopped (and every
    rank is back where it started, with --rollback), 4 if no migration is running or it ended otherwise, 5 at the
    timeout.

    Example: flexd abort --rollback --dry-run
    Example: flexd abort --rollback --reason "loss is rising" --yes
    """
    client = connect(url, socket)
    if dry_run:
        preview = client.preview_abort(rollback=rollback)
        emit(preview, abort_preview_blocks(preview), output)
        return
    if must_ask(yes):
        confirm(f"{abort_sentence(client.preview_abort(rollback=rollback))} Abort?", yes)
    with migration_progress(client, timeout > 0):
        result = client.abort(rollback=rollback, reason=reason, wait_seconds=timeout, who=who())
    emit(result, abort_blocks(result), output)
    raise typer.Exit(exit_code_of_outcome(result.outcome))
