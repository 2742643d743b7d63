"""``plan``, ``proposals``, ``apply`` and ``replan``."""

from __future__ import annotations

from typing import Annotated

import typer

from flexd.api import routes
from flexd.cli.exit_codes import exit_code_of_outcome
from flexd.cli.interactive import DryRunOption, YesOption, confirm, migration_progress, must_ask
from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.plan_view import plan_blocks, proposal_blocks, replan_blocks, would_move
from flexd.cli.view import OutputFormat, emit

ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Ignore closed gates (too little data, too small a saving); recorded with your name."),
]


WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until every rank has applied the migration.")]


TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="S", min=0, max=3600, help="Longest wait, in seconds.")
]


def plan(
    plan_id: Annotated[
        str | None, typer.Argument(metavar="PLAN_ID", help="Show a kept plan (or: latest) instead of making one.")
    ] = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the plan that would be made now, without moving rows.

    Shows its changes, the cost before and after by phase and link, and the reasons. The plan is kept: flexd apply
    carries it out while ranks, placement and accesses stay as they are.

    Example: flexd plan

    Example: flexd plan latest
    """
    client = connect(url, socket)
    answer = client.send(routes.PLAN) if plan_id is None else client.send(routes.PROPOSAL, plan_id=plan_id)
    emit(answer, plan_blocks(answer), output)


def proposals(url: UrlOption = None, socket: SocketOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the kept plans, newest first.

    These are the daemon's proposals and the plans that flexd plan has shown.

    Example: flexd proposals
    """
    answer = connect(url, socket).send(routes.PROPOSALS)
    emit(answer, proposal_blocks(answer), output)


def apply(
    plan_id: Annotated[str, typer.Argument(metavar="PLAN_ID", help="Id in flexd plan or flexd proposals, or: latest.")],
    wait: WaitOption = False,
    timeout: TimeoutOption = 300.0,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Recorded by the daemon.")
    ] = "applied by hand",
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
    if dry_run:
        kept = client.send(routes.PROPOSAL, plan_id=plan_id)
        emit(kept, plan_blocks(kept), output)
        return
    if must_ask(yes):
        kept = client.send(routes.PROPOSAL, plan_id=plan_id)
        # The id of the plan that was shown: another one may be the latest by the time the user replies.
        plan_id = kept.plan_id
        confirm(f"Plan {plan_id}: {would_move(kept)} Apply?", yes)
    with migration_progress(client, wait):
        result = client.send(
            routes.APPLY, plan_id=plan_id, reason=reason, wait_seconds=timeout if wait else 0.0, force=force, who=who()
        )
    emit(result, replan_blocks(result), output)
    raise typer.Exit(exit_code_of_outcome(result.outcome))


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
    if dry_run:
        planned = client.send(routes.PLAN)
        emit(planned, plan_blocks(planned), output)
        return
    if must_ask(yes):
        confirm(f"As of now {would_move(client.send(routes.PLAN))} Replan?", yes)
    with migration_progress(client, wait):
        result = client.send(
            routes.REPLAN, reason=reason, wait_seconds=timeout if wait else 0.0, force=force, who=who()
        )
    emit(result, replan_blocks(result), output)
    raise typer.Exit(exit_code_of_outcome(result.outcome))
