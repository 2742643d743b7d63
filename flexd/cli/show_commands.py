"""Commands that read from the daemon: ``status``, ``get``, ``describe``, ``plan`` and ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flexd.api import routes
from flexd.api.explanation import ReasonName
from flexd.api.plan import CostReport, PlanReport
from flexd.api.table import MAX_PAGE_ENTRIES, TableOrder
from flexd.cli.blocks import Block, Sentences
from flexd.cli.client import connect
from flexd.cli.exit_codes import DaemonRefusedError
from flexd.cli.options import OutputOption, SocketOption, UrlOption
from flexd.cli.render import OutputFormat, blocks_of, emit, entries_of, present, table_of
from flexd.core import units
from flexd.core.errors import ConfigError

if TYPE_CHECKING:
    from flexd.cli.client import DaemonClient
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


_ATTEMPTS = 5

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

    for _ in range(_ATTEMPTS):
        page = first = client.send(routes.USERS)
        pages = [first]
        read = len(first.ids)
        while page.learnt == first.learnt and page.ids and read < first.users:
            page = client.send(routes.USERS, offset=read)
            pages.append(page)
            read += len(page.ids)
        if page.learnt == first.learnt:
            ids, nodes_of = (
                np.concatenate([np.array(getattr(each, name), dtype=np.int64) for each in pages])
                for name in ("ids", "nodes_of")
            )
            share = None if first.by_user is None else first.by_user.expected
            return NodeMap(ids, nodes_of, first.nodes), share
    raise DaemonRefusedError(f"the users were learnt anew {_ATTEMPTS} times while they were read")
