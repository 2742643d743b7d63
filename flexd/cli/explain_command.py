"""``explain``: why a row is in its tier."""

from __future__ import annotations

from typing import Annotated

import typer

from flexd.cli.explain_view import explain_blocks
from flexd.cli.options import OutputOption, SocketOption, UrlOption, connect
from flexd.cli.view import OutputFormat, emit


def explain(
    target: Annotated[str, typer.Argument(metavar="TABLE[:ROW]", help="A table, or one row of it.")],
    hottest: Annotated[
        int, typer.Option("--hottest", help="Rows to show of a table, the most frequent first.", min=0, max=1000)
    ] = 10,
    url: UrlOption = None,
    socket: SocketOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Why a row is in its tier: estimate, price in each tier, threshold. Of a table: its thresholds and hottest rows.

    Example: flexd explain items:1234
    """
    table, row = split_target(target)
    answer = connect(url, socket).explain(table, row, hottest)
    emit(answer, explain_blocks(answer, single=row is not None), output)


def split_target(target: str) -> tuple[str, int | None]:
    """``items:12`` -> ("items", 12); ``items`` -> ("items", None). Only digits after the last colon are a row."""
    table, colon, row = target.rpartition(":")
    if colon and table and row.isascii() and row.isdigit():
        return table, int(row)
    return target, None
