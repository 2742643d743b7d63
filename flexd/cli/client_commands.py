"""Commands to a running daemon: what it shows, and what changes something, which asks or shows the effect first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexd.api import routes
from flexd.api.plan import CostReport, PlanReport, ReasonName
from flexd.api.stream import MAX_PAGE_ENTRIES, TableOrder
from flexd.cli.blocks import Block, Sentences
from flexd.cli.client import DaemonClient, DaemonRefusedError, connect, exit_code_of_outcome, requested_by
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
)
from flexd.cli.render import OutputFormat, blocks_of, emit, entries_of, present, show, table_of
from flexd.core import units
from flexd.core.errors import ConfigError
from flexd.core.model import Model

if TYPE_CHECKING:
    from flexd.core.node_map import NodeMap


STATUS_ROWS = 20
"""Rows of a table in the status; ``-o json`` and ``flexd get`` have all."""
LISTS: dict[str, routes.Operation[Any]] = {
    "tables": routes.TABLES,
    "rows": routes.ROWS,
    "ranks": routes.RANKS,
    "plans": routes.PROPOSALS,
    "history": routes.MIGRATIONS,
    "config": routes.CONFIG,
}
DETAILS: dict[str, routes.Operation[Any]] = {"plan": routes.PROPOSAL, "migration": routes.MIGRATION}
REASONS: dict[ReasonName, str] = {
    "saves": "It saves time at its planned tier, and no other row would earn more with the slots it takes.",
    "pinned": "It is pinned to its tier.",
    "excluded": "Its table is excluded: its rows stay at HOME.",
    "no_gain": "Every further copy costs more synchronisation than it saves: too few nodes look the row up in the same "
    "step.",
    "slot_price": "A copy would save time, but the slots it takes earn more with hotter rows.",
    "migration": "A copy would save time by the estimate, but by the lower bound of its look-ups that does not pay for "
    "copying it.",
    "latency": "A copy would save time, but all such rows together do not pay for the latency of synchronising at all.",
}


def status(url: UrlOption = None, socket: SocketOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the daemon on one screen.

    Shows health, stream, sketch, ranks, placement, last plan and migration.

    Example: flexd status -o json
    """
    present(connect(url, socket).send(routes.STATUS), output, rows=STATUS_ROWS)


def get(
    kind: Annotated[
        Literal["tables", "rows", "ranks", "plans", "history", "config"],
        typer.Argument(help="The list to show."),
    ],
    table: Annotated[str | None, typer.Argument(metavar="[TABLE]", help="Name of the table of rows.")] = None,
    limit: Annotated[
        int | None, typer.Option("-n", "--limit", metavar="N", min=1, max=MAX_PAGE_ENTRIES, help="Show at most N.")
    ] = None,
    offset: Annotated[int | None, typer.Option("--offset", metavar="N", min=0, help="Skip the first N.")] = None,
    order: Annotated[TableOrder | None, typer.Option("--order", help="Order of tables.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help="Show only migrations in this state.")
    ] = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List tables, hot rows of a table, ranks, kept plans, the history, or the configuration.

    The history has migrations and other actions of all daemons of the job: pause, resume, throttle, reload and
    overridden gates.

    Example: flexd get tables --order replicas -n 10

    Example: flexd get rows items -n 50

    Example: flexd get history --state aborted
    """
    route, given = LISTS[kind], {"table": table, "limit": limit, "offset": offset, "order": order}
    given["state"] = None if state is None else state.lower()
    fields = {name: value for name, value in given.items() if value is not None}
    for name in fields:
        if route.request is None or name not in route.request.model_fields:
            raise ConfigError(f"flexd get {kind} takes no {name}", remedy="leave it out")
    if kind == "rows" and table is None:
        raise ConfigError("flexd get rows needs the name of a table", remedy="flexd get tables lists them")
    present(connect(url, socket).send(route, **fields), output, tables=True)


def describe(
    kind: Annotated[Literal["plan", "migration"], typer.Argument(help="The kind of resource.")],
    name: Annotated[str, typer.Argument(metavar="ID", help="Id in flexd get plans or flexd get history, or: latest.")],
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show a kept plan, or a migration with all changes of its state.

    Example: flexd describe migration latest
    """
    route = DETAILS[kind]
    answer = connect(url, socket).send(route, **{route.parameters[0]: name})
    emit(answer, plan_blocks(answer) if isinstance(answer, PlanReport) else blocks_of(answer), output)


def plan(url: UrlOption = None, socket: SocketOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show the plan that would be made now, without moving rows.

    Shows its changes, the cost before and after by phase and link, and the reasons. The plan is kept: flexd apply
    carries it out while ranks, placement and accesses stay as they are.

    Example: flexd plan
    """
    answer = connect(url, socket).send(routes.PLAN)
    emit(answer, plan_blocks(answer), output)


def explain(
    target: Annotated[str, typer.Argument(metavar="TABLE[:ROW]", help="A table, or one row of it.")],
    hottest: Annotated[
        int, typer.Option("--hottest", help="Rows to show of a table, the most frequent first.", min=0, max=1000)
    ] = 10,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Explain the tier of a row, or of the hottest rows of a table.

    Of a row: estimated look-ups, price in each tier, thresholds, and the reason.

    Example: flexd explain items:1234
    """
    table, row = split_target(target)
    answer = connect(url, socket).send(routes.EXPLAIN, table=table, row=row, hottest=hottest)
    why = [] if row is None else [Sentences("why", tuple(REASONS[each.reason] for each in answer.explained))]
    emit(answer, [*blocks_of(answer), *why], output)


def plan_blocks(plan: PlanReport) -> list[Block]:
    """Return a plan: its facts, and its costs beside those of the live placement and of other strategies."""
    costs = {"live placement": plan.before, "this plan": plan.after, **plan.baselines}
    phases = entries_of({"before": plan.before.phases, "after": plan.after.phases})
    shown = plan.model_copy(update={"before": CostReport(), "after": CostReport(), "baselines": costs})
    return [*blocks_of(shown), *([table_of("sent by one rank in a step, by phase", phases)] if phases else [])]


def split_target(target: str) -> tuple[str, int | None]:
    """Split ``items:12`` into ("items", 12), and ``items`` into ("items", None). Only digits after the last colon are a
    row."""
    table, colon, row = target.rpartition(":")
    if colon and table and row.isascii() and row.isdigit():
        return table, int(row)
    return target, None


affinity = typer.Typer(help="Which node trains whose samples.", no_args_is_help=True)


@affinity.command("users")
def users(
    out: Annotated[Path, typer.Option("--out", "-o", help="Node map to write.", metavar="FILE.npz")],
    url: UrlOption = None,
    socket: SocketOption = None,
) -> None:
    """Write the node of each user that the daemon has seen, by where rows live.

    The stream must carry user_ids, and a plan must have been made since. The file is for flexd.affinity.NodeMap
    and is replaced at once: a reader has the old one or the new one. Printed is the share of the bytes between nodes
    that is left with each user's samples in her node.

    Example: flexd affinity users -o nodes.npz
    """
    node_map, share = _user_nodes(connect(url, socket))
    node_map.save(out)
    typer.echo(f"{len(node_map.ids):,} users in {node_map.nodes} nodes: {out}")
    if share is None:
        typer.echo("too few global batches are sampled to judge it")
    else:
        typer.echo(f"bytes between nodes: {units.share(share)} of those without affinity would be left")


def _user_nodes(client: DaemonClient) -> tuple[NodeMap, float | None]:
    """Return all pages of one learning, and the share of the bytes that is left with them."""
    import numpy as np

    from flexd.core.node_map import NodeMap

    for _ in range(5):
        first = client.send(routes.USERS)
        pages, read = [first], len(first.ids)
        while pages[-1].learnt == first.learnt and pages[-1].ids and read < first.users:
            pages.append(client.send(routes.USERS, offset=read))
            read += len(pages[-1].ids)
        if pages[-1].learnt == first.learnt:
            ids, nodes_of = (
                np.concatenate([np.array(getattr(each, name), dtype=np.int64) for each in pages])
                for name in ("ids", "nodes_of")
            )
            share = None if first.by_user is None else first.by_user.expected
            return NodeMap(ids, nodes_of, first.nodes), share
    raise DaemonRefusedError("the users were learnt anew five times while they were read")


ForceOption = Annotated[
    bool,
    typer.Option("--force", help="Ignore closed gates (too little data, too small a saving); recorded with your name."),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Wait until every rank has applied the migration.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="S", min=0, max=3600, help="Longest wait, in seconds.")
]
BytesOption = Annotated[int | None, typer.Option(min=0, max=2**50, metavar="N", help="0 lifts the limit.")]


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
    _change(
        client, routes.REPLAN, "Replan?", yes, output, lambda: client.send(routes.PLAN), dry_run, reason=reason,
        wait_seconds=timeout if wait else 0.0, force=force,
    )  # fmt: skip


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
    _change(
        client, routes.APPLY, f"Apply {kept.plan_id}?", yes, output, lambda: kept, dry_run, plan_id=kept.plan_id,
        reason=reason, wait_seconds=timeout if wait else 0.0, force=force,
    )  # fmt: skip


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
    client = connect(url, socket)
    _change(
        client, routes.ABORT, "Abort?", yes, output, lambda: client.send(routes.PREVIEW_ABORT), dry_run,
        reason=reason, wait_seconds=timeout,
    )  # fmt: skip


def rollback(
    migration_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Migration or plan in flexd get history, or: latest. Default: the running."
        ),
    ] = None,
    to_version: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", min=0, help="Restore this version; 0: all copies home.")
    ] = None,
    timeout: TimeoutOption = 60.0,
    reason: ReasonOption = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Restore the placement before a migration: of the running one, which is stopped, or of one that has ended.

    With --to all later migrations are taken back too. Plans to the same tiers are made again after ten minutes at the
    earliest; flexd replan and flexd apply do not wait. Exit status 0 once every rank has the earlier placement again,
    else as flexd abort.

    Example: flexd rollback --reason "loss is rising" --yes

    Example: flexd rollback latest --dry-run

    Example: flexd rollback --to 0 --yes
    """
    client = connect(url, socket)
    if migration_id is not None or to_version is not None:
        if migration_id is not None and to_version is not None:
            raise ConfigError("flexd rollback takes an id or --to", remedy="leave one of them out")
        past = {"migration_id": migration_id or "", "to_version": to_version}
        _change(
            client, routes.ROLLBACK, "Roll back?", yes, output, lambda: client.send(routes.PREVIEW_ROLLBACK, **past),
            dry_run, reason=reason, wait_seconds=timeout, **past,
        )  # fmt: skip
        return
    _change(
        client, routes.ABORT, "Roll back?", yes, output, lambda: client.send(routes.PREVIEW_ABORT, rollback=True),
        dry_run, rollback=True, reason=reason, wait_seconds=timeout,
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
    _change(
        client, routes.SET_THROTTLE, "Change these limits?", yes, output, lambda: client.send(routes.THROTTLE),
        reason=reason, **fields,
    )  # fmt: skip


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
    _change(
        connect(url, socket), routes.PAUSE, "No plan is made and no chunk pushed until flexd resume. Pause?", yes,
        output, reason=reason,
    )  # fmt: skip


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
    _change(
        connect(url, socket), routes.RESUME, "Plans are made and chunks pushed again. Resume?", yes, output,
        reason=reason,
    )  # fmt: skip


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
    _change(
        client, routes.RELOAD, "Reload?", yes, output, lambda: client.send(routes.PREVIEW_RELOAD), dry_run,
        reason=reason,
    )  # fmt: skip


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
        # On stderr: stdout may be redirected to a file. ``--dry-run`` shows all blocks.
        show(blocks_of(preview())[:4], sys.stderr)
    confirm(question, yes)
    if fields.get("wait_seconds") and sys.stderr.isatty():
        print("waiting for the migration; flexd status shows its parts", file=sys.stderr)
    result = client.send(route, requested_by=requested_by(), **fields)
    present(result, output)
    raise typer.Exit(exit_code_of_outcome(getattr(result, "outcome", "")))
