"""``tables``, ``rows`` and ``topology``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from flexd.api import routes
from flexd.api.base import RowsByTier
from flexd.api.rank import RankPage
from flexd.api.table import MAX_PAGE_ENTRIES, HotRowPage, TablePage
from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.view import OutputFormat
from flexd.cli.watch import Answer, WatchOption, emit_watched
from flexd.core import units


class Order(StrEnum):
    """The names of ``TableOrder``."""

    ACCESSES = "accesses"
    REPLICAS = "replicas"
    MEMORY = "memory"
    NAME = "name"
    CONFIGURED = "configured"


OffsetOption = Annotated[int, typer.Option("--offset", metavar="N", min=0, help="Skip the first N.")]


def _limit(what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        "-n", "--limit", metavar="N", min=1, max=MAX_PAGE_ENTRIES, help=f"Show at most N {what}."
    )
    return option


def tables(
    order: Annotated[Order, typer.Option("--order", help="Order of the list.")] = Order.ACCESSES,
    limit: Annotated[int, _limit("tables")] = 20,
    offset: OffsetOption = 0,
    watch: WatchOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the tables: accesses, rows by tier, counters, drift.

    Example: flexd tables --order replicas -n 10
    """
    client = connect(url, socket)

    def ask() -> Answer:
        page = client.send(routes.TABLES, offset=offset, limit=limit, order=order.value)
        return page, table_blocks(page)

    emit_watched(ask, output, watch)


def rows(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Name of the table.")],
    limit: Annotated[int, _limit("rows")] = 20,
    offset: OffsetOption = 0,
    watch: WatchOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the hot rows of a table with their tiers.

    The most accessed is first. flexd explain shows the reasons.

    Example: flexd rows items -n 50
    """
    client = connect(url, socket)

    def ask() -> Answer:
        page = client.send(routes.ROWS, table=table, offset=offset, limit=limit)
        return page, row_blocks(page)

    emit_watched(ask, output, watch)


def topology(
    limit: Annotated[int, _limit("ranks")] = 100,
    offset: OffsetOption = 0,
    watch: WatchOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List the ranks: version, step time, traffic, balance.

    Example: flexd topology -n 8
    """
    client = connect(url, socket)

    def ask() -> Answer:
        page = client.send(routes.RANKS, offset=offset, limit=limit)
        return page, rank_blocks(page)

    emit_watched(ask, output, watch)


def table_blocks(page: TablePage) -> list[Block]:
    columns = ("table", "rows", "dim", "accesses", "share", "NODE", "DEVICE", "counter", "memory", "seen", "drift")
    rows = tuple(
        (
            table.table,
            units.count(table.rows),
            f"{table.dim} {table.dtype}",
            units.count(table.accesses),
            units.share(table.share),
            units.count(table.placed_rows.get("NODE")),
            units.count(table.placed_rows.get("DEVICE")),
            table.counter.replace("_", "-"),
            units.size(table.counter_bytes),
            units.count(table.distinct_rows),
            units.UNKNOWN if table.drift_ratio is None else f"x {table.drift_ratio:.3f}",
        )
        for table in page.tables
    )
    right = frozenset(columns) - {"table", "dim", "counter"}
    if not rows:
        return _rest(page.offset, 0, page.total, "table") or [Sentences("", ("no tables",))]
    spare = ("drift", "rows", "memory", "counter", "dim", "seen")
    return [Table("", columns, rows, right, spare), *_rest(page.offset, len(rows), page.total, "table")]


def row_blocks(page: HotRowPage) -> list[Block]:
    columns = ("place", "row", "tier", "home rank", "share", "at least", "at most")
    rows = tuple(
        (
            units.count(row.place),
            str(row.row),
            row.tier,
            units.UNKNOWN if row.home_rank is None else str(row.home_rank),
            _fine_share(row.share),
            _fine_share(row.share_lower),
            _fine_share(row.share_upper),
        )
        for row in page.hottest
    )
    head = Facts(
        "",
        (
            ("table", f"{page.table} with {units.count(page.rows)} rows"),
            ("weight", f"{units.count(page.weight)} accesses, decayed"),
            ("placed", _placed(page.placed_rows)),
        ),
    )
    if not rows:
        return [head, Sentences("", ("no row has been accessed",) if page.total == 0 else ("no rows there",))]
    shown = Table("hot rows", columns, rows, frozenset(columns) - {"tier"})
    return [head, shown, *_rest(page.offset, len(rows), page.total, "listed row")]


def rank_blocks(page: RankPage) -> list[Block]:
    if page.total == 0:
        return [Facts("", (("ranks", page.problem or "none"), ("priced as", page.cluster or units.UNKNOWN)))]
    slots = ", ".join(units.count(number) for number in page.replica_slots) or units.UNKNOWN
    head = Facts(
        "",
        (
            (
                "ranks",
                f"{page.total} = {page.nodes} nodes x {page.local_ranks}, attempt {page.attempt or units.UNKNOWN}, "
                f"generation {page.generation}, {'ready' if page.ready else 'NOT READY'}",
            ),
            *((("problem", page.problem),) if page.problem else ()),
            ("replica slots", f"{slots} a rank"),
            ("placement", f"version {page.placement_version}"),
            ("busiest rank", units.UNKNOWN if page.imbalance is None else f"{page.imbalance:.2f} x the mean"),
            ("priced as", page.cluster or units.UNKNOWN),
        ),
    )
    columns = (
        "rank",
        "node",
        "local",
        "version",
        "step",
        "heard",
        "step time",
        "accesses",
        "replicas",
        "intra",
        "inter",
    )
    rows = tuple(
        (
            str(rank.rank),
            str(rank.node),
            str(rank.local_rank),
            _version(rank.placement_version, rank.behind),
            units.count(rank.step),
            units.age(rank.report_age_seconds),
            units.seconds(rank.step_seconds),
            units.count(rank.accesses_per_step),
            units.share(rank.replica_share),
            units.size(rank.intra_node_bytes_per_step),
            units.size(rank.inter_node_bytes_per_step),
        )
        for rank in page.ranks
    )
    shown = Table("ranks, a step", columns, rows, frozenset(columns), ("node", "replicas", "heard", "local"))
    return [head, shown, *_rest(page.offset, len(rows), page.total, "rank")]


def _rest(offset: int, shown: int, total: int, what: str) -> list[Block]:
    if shown == total:
        return []
    if shown == 0:
        return [Sentences("", (f"none of {units.plural(total, what)} there",))]
    return [
        Sentences("", (f"{units.count(offset + 1)} to {units.count(offset + shown)} of {units.plural(total, what)}",))
    ]


def _placed(rows: RowsByTier) -> str:
    return units.by_tier(rows) or "all at HOME"


def _version(version: int | None, behind: int | None) -> str:
    if version is None:
        return units.UNKNOWN
    return f"{version} (-{behind})" if behind else str(version)


def _fine_share(share: float | None) -> str:
    """Return a share with 4 digits: those of single rows are small."""
    return units.UNKNOWN if share is None else f"{100 * share:.4g}%"
