"""``tables``, ``rows`` and ``topology``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from flexd.api.table import MAX_PAGE_ENTRIES
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.table_view import rank_blocks, row_blocks, table_blocks
from flexd.cli.view import OutputFormat
from flexd.cli.watch import Answer, WatchOption, emit_watched


class Order(StrEnum):
    """The names of ``TableOrder``."""

    ACCESSES = "accesses"
    REPLICAS = "replicas"
    MEMORY = "memory"
    NAME = "name"
    CONFIGURED = "configured"


OffsetOption = Annotated[int, typer.Option("--offset", metavar="N", min=0, help="Leave out the first N.")]


def _limit(what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        "-n", "--limit", metavar="N", min=1, max=MAX_PAGE_ENTRIES, help=f"Show at most N {what}."
    )
    return option


def add_to(app: typer.Typer) -> None:
    app.command("tables")(tables)
    app.command("rows")(rows)
    app.command("topology")(topology)


def tables(
    order: Annotated[Order, typer.Option("--order", help="What comes first.")] = Order.ACCESSES,
    limit: Annotated[int, _limit("tables")] = 20,
    offset: OffsetOption = 0,
    watch: WatchOption = None,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Lists the tables: accesses, rows by tier, how they are counted, drift.

    Example: flexd tables --order replicas -n 10
    """
    client = connect(url, socket)

    def ask() -> Answer:
        page = client.tables(offset, limit, order.value)
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
    """Lists the hot rows of a table with their tiers, the most accessed first. ``flexd explain`` says why.

    Example: flexd rows items -n 50
    """
    client = connect(url, socket)

    def ask() -> Answer:
        page = client.rows(table, offset, limit)
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
    """Lists the ranks: node, placement version, step time, traffic and balance.

    Example: flexd topology -n 8
    """
    client = connect(url, socket)

    def ask() -> Answer:
        page = client.ranks(offset, limit)
        return page, rank_blocks(page)

    emit_watched(ask, output, watch)
