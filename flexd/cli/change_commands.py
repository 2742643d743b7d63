"""Commands that change something in the daemon. Each asks on a terminal, and shows its effect first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from flexd.api import routes
from flexd.cli.client import DaemonClient, connect, requested_by
from flexd.cli.exit_codes import exit_code_of_outcome
from flexd.cli.options import (
    BY_HAND,
    DryRunOption,
    OutputOption,
    ReasonOption,
    SocketOption,
    UrlOption,
    YesOption,
    confirm,
    must_ask,
    waiting_shown,
)
from flexd.cli.render import OutputFormat, blocks_of, present, show
from flexd.core.model import Model

ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Ignore closed gates (too little data, too small a saving); recorded with your name."),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until every rank has applied the migration.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="S", min=0, max=3600, help="Longest wait, in seconds.")
]
BytesOption = Annotated[int | None, typer.Option(min=0, max=2**50, metavar="N", help="0 lifts the limit.")]
PREVIEWED = 4
"""Blocks of an effect that are shown before the question, the first ones; ``--dry-run`` shows all."""


def replan(
    wait: WaitOption = False,
    timeout: TimeoutOption = 300.0,
    reason: ReasonOption = BY_HAND,
    force: ForceOption = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Plan now and push the migration to the ranks.

    With --wait the exit status is 0 once every rank has it, 4 if the migration ended otherwise, 5 at the timeout.

    Example: flexd replan --wait --yes --reason "campaign starts"
    """
    client = connect(url, socket)
    fields: dict[str, Any] = {"reason": reason, "wait_seconds": timeout if wait else 0.0, "force": force}
    _change(client, routes.REPLAN, "Replan?", yes, output, lambda: client.send(routes.PLAN), dry_run, **fields)


def apply(
    plan_id: Annotated[str, typer.Argument(metavar="PLAN_ID", help="Id in flexd plan or flexd get plans, or: latest.")],
    wait: WaitOption = False,
    timeout: TimeoutOption = 300.0,
    reason: ReasonOption = "applied by hand",
    force: ForceOption = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Carry out a kept plan.

    Refused (exit status 4) if ranks, placement or accesses have changed since. With --wait the exit status is 0 once
    every rank has it, 4 if the migration ended otherwise, 5 at the timeout.

    Example: flexd apply latest --wait --yes
    """
    client = connect(url, socket)
    kept = client.send(routes.PROPOSAL, plan_id=plan_id)
    # The id of the plan that is shown: another one may be the latest by the time the user replies.
    fields: dict[str, Any] = {
        "plan_id": kept.plan_id, "reason": reason, "wait_seconds": timeout if wait else 0.0, "force": force,
    }  # fmt: skip
    _change(client, routes.APPLY, f"Apply {kept.plan_id}?", yes, output, lambda: kept, dry_run, **fields)


def abort(
    timeout: TimeoutOption = 60.0,
    reason: ReasonOption = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stop the running migration at its next chunk.

    Waiting migrations are not started. Automatic planning continues: use flexd pause to stop it. Exit status 0 once the
    migration has stopped, 4 if no migration runs or it ended otherwise, 5 at the timeout.

    Example: flexd abort --dry-run
    """
    _stop(connect(url, socket), False, timeout, reason, yes, dry_run, output)


def rollback(
    timeout: TimeoutOption = 60.0,
    reason: ReasonOption = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stop the running migration, and restore the placement that it started from.

    Exit status 0 once every rank has the earlier placement again, else as flexd abort.

    Example: flexd rollback --dry-run

    Example: flexd rollback --reason "loss is rising" --yes
    """
    _stop(connect(url, socket), True, timeout, reason, yes, dry_run, output)


def _stop(
    client: DaemonClient, rollback: bool, timeout: float, reason: str, yes: bool, dry_run: bool, output: OutputFormat
) -> None:
    question = "Roll back?" if rollback else "Abort?"
    fields: dict[str, Any] = {"rollback": rollback, "reason": reason, "wait_seconds": timeout}
    _change(
        client, routes.ABORT, question, yes, output,
        lambda: client.send(routes.PREVIEW_ABORT, rollback=rollback), dry_run, **fields,
    )  # fmt: skip


def throttle(
    bytes_per_step: BytesOption = None,
    bytes_per_second: BytesOption = None,
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show or change the limits on the speed of migrations.

    A change takes effect at the next chunk, survives restarts of the daemon, and ends when control.throttle changes in
    the configuration. Bytes are row values and optimizer state on each rank, per step boundary and per second.

    Example: flexd throttle

    Example: flexd throttle --bytes-per-step 262144 --yes
    """
    client = connect(url, socket)
    fields: dict[str, Any] = {"bytes_per_step": bytes_per_step, "bytes_per_second": bytes_per_second}
    if not any(value is not None for value in fields.values()):
        present(client.send(routes.THROTTLE), output)
        return
    now = lambda: client.send(routes.THROTTLE)  # noqa: E731
    _change(client, routes.SET_THROTTLE, "Change these limits?", yes, output, now, reason=reason, **fields)


def pause(
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stop planning, and stop migrations at the next chunk.

    The stream is still read, and training is not affected. The pause lasts until flexd resume, also over a restart of
    the daemon.

    Example: flexd pause --yes --reason maintenance
    """
    question = "No plan is made and no chunk pushed until flexd resume. Pause?"
    _change(connect(url, socket), routes.PAUSE, question, yes, output, reason=reason)


def resume(
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """End a pause.

    Example: flexd resume --yes
    """
    question = "Plans are made and chunks pushed again. Resume?"
    _change(connect(url, socket), routes.RESUME, question, yes, output, reason=reason)


def reload(
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make the daemon read its configuration file again.

    SIGHUP does the same. Keys that need no restart take effect at once, the others are listed as pending. A file with
    a fault changes nothing: exit status 4, with the key path.

    Example: flexd reload --yes

    Example: flexd reload --dry-run
    """
    client = connect(url, socket)
    preview = lambda: client.send(routes.PREVIEW_RELOAD)  # noqa: E731
    _change(client, routes.RELOAD, "Reload?", yes, output, preview, dry_run, reason=reason)


def _change(
    client: DaemonClient,
    route: routes.Operation[Any],
    question: str,
    yes: bool,
    output: OutputFormat,
    preview: Callable[[], Model] | None = None,
    dry_run: bool = False,
    **fields: Any,
) -> None:
    """Send a request that changes something, after its question; or show what it would do."""
    if preview is not None and dry_run:
        present(preview(), output)
        return
    if preview is not None and must_ask(yes):
        # On stderr: stdout may be redirected to a file.
        show(blocks_of(preview())[:PREVIEWED], sys.stderr)
    confirm(question, yes)
    with waiting_shown(bool(fields.get("wait_seconds"))):
        result = client.send(route, requested_by=requested_by(), **fields)
    present(result, output)
    raise typer.Exit(exit_code_of_outcome(getattr(result, "outcome", "")))
