"""``proposals``, ``apply`` and ``throttle``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flexd.cli.confirm import DryRunOption, YesOption, confirm, must_ask
from flexd.cli.exit_codes import exit_code_of_outcome
from flexd.cli.options import BY_HAND, OutputOption, ReasonOption, SocketOption, UrlOption, connect, who
from flexd.cli.plan_view import plan_blocks, would_move
from flexd.cli.planning_view import proposal_blocks
from flexd.cli.progress import migration_progress
from flexd.cli.status_view import replan_blocks
from flexd.cli.throttle_view import ThrottleChange, throttle_blocks, throttle_change_blocks, throttle_sentence
from flexd.cli.view import OutputFormat, emit

ForceOption = Annotated[
    bool, typer.Option("--force", help="Also from a profile that is too thin; recorded with your name.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until every rank has applied the migration.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="S", min=0, max=3600, help="How long to wait, in seconds.")
]
BytesOption = Annotated[int | None, typer.Option(min=0, max=2**50, metavar="N", help="0 lifts the limit.")]


def add_to(app: typer.Typer) -> None:
    app.command("proposals")(proposals)
    app.command("apply")(apply)
    app.command("throttle")(throttle)


def proposals(url: UrlOption = None, socket: SocketOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Lists the plans that are kept: the daemon's own proposals and what flexd plan has shown, newest first.

    Example: flexd proposals
    """
    answer = connect(url, socket).proposals()
    emit(answer, proposal_blocks(answer), output)


def apply(
    plan_id: Annotated[str, typer.Argument(metavar="PLAN_ID", help="Of flexd plan or flexd proposals, or: latest.")],
    wait: WaitOption = False,
    timeout: TimeoutOption = 300.0,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Recorded.")] = "applied by hand",
    force: ForceOption = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Carries out a plan that was made before.

    Refused (exit status 4) if ranks, placement or accesses have moved on since. With --wait the exit status is 0 once
    every rank has it, 4 if the migration ended otherwise, 5 at the timeout.

    Example: flexd apply latest --wait --yes
    """
    client = connect(url, socket)
    if dry_run:
        kept = client.proposal(plan_id)
        emit(kept, plan_blocks(kept), output)
        return
    if must_ask(yes):
        kept = client.proposal(plan_id)
        # The id of the plan that was shown: another one may be the latest by the time the user replies.
        plan_id = kept.plan_id
        confirm(f"Plan {plan_id}: {would_move(kept)} Apply?", yes)
    with migration_progress(client, wait):
        result = client.apply(plan_id, reason, timeout if wait else 0.0, force=force, who=who())
    emit(result, replan_blocks(result), output)
    raise typer.Exit(exit_code_of_outcome(result.outcome))


def throttle(
    bytes_per_step: BytesOption = None,
    bytes_per_second: BytesOption = None,
    adaptive: Annotated[
        Literal["on", "off"] | None, typer.Option(help="Slow down when the ranks' steps become slower.")
    ] = None,
    reason: ReasonOption = BY_HAND,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Shows how fast rows may migrate, or changes it: from the next chunk on.

    It outlives the daemon, and ends when control.throttle changes in the configuration.

    Bytes are of row values and optimizer state, at each step boundary of every rank and in the long run.

    Example: flexd throttle
    Example: flexd throttle --bytes-per-step 262144 --adaptive on --yes
    """
    client = connect(url, socket)
    adapts = None if adaptive is None else adaptive == "on"
    if dry_run:
        change = ThrottleChange.between(client.throttle(), bytes_per_step, bytes_per_second, adapts)
        emit(change, throttle_change_blocks(change), output)
        return
    if bytes_per_step is None and bytes_per_second is None and adapts is None:
        answer = client.throttle()
    else:
        if must_ask(yes):
            change = ThrottleChange.between(client.throttle(), bytes_per_step, bytes_per_second, adapts)
            confirm(f"{throttle_sentence(change)} Change?", yes)
        answer = client.set_throttle(bytes_per_step, bytes_per_second, adapts, reason=reason, who=who())
    emit(answer, throttle_blocks(answer), output)
