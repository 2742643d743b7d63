"""Renders blocks on a terminal: styled, and within its width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.cli.fit import GAP, fit

_INDENT = (0, 0, 0, 2)
_WRONG = "bold red"


def renderable(blocks: Sequence[Block]) -> Group:
    """Return the blocks for a rich console, separated by empty lines."""
    parts: list[RenderableType] = []
    for i, block in enumerate(blocks):
        if i:
            parts.append(Text(""))
        if block.title:
            parts.append(Text(block.title, style="bold"))
        parts.append(Padding(_body(block), _INDENT))
    return Group(*parts)


def _body(block: Block) -> RenderableType:
    if isinstance(block, Sentences):
        return Group(*(Text(line) for line in block.lines))
    return _facts(block) if isinstance(block, Facts) else _Fitting(block)


def _facts(facts: Facts) -> Grid:
    grid = Grid(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.pairs:
        grid.add_row(Text(name), Text(value, style=_WRONG if name in facts.wrong else ""))
    return grid


class _Fitting:
    """A table that fits the width of the console."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        table = self._table
        fitted = fit(table.columns, table.rows, table.right, table.spare, options.max_width, cell_len)
        if fitted is None:
            yield from _one_by_one(table)
            return
        grid = Grid(box=None, header_style="dim", padding=(0, GAP, 0, 0), pad_edge=False)
        for i, width in zip(fitted.columns, fitted.widths, strict=True):
            name = table.columns[i]
            grid.add_column(
                Text(name), justify="right" if name in table.right else "left", width=width, overflow="fold",
                vertical="top",
            )  # fmt: skip
        for row in table.rows:
            grid.add_row(*(Text(row[i]) for i in fitted.columns))
        yield grid
        left_out = [name for i, name in enumerate(table.columns) if i not in fitted.columns]
        if left_out:
            yield Text(f"no room for: {', '.join(left_out)}", style="dim")


def _one_by_one(table: Table) -> Iterable[RenderableType]:
    """Yield every row as a list of names and values."""
    for i, row in enumerate(table.rows):
        if i:
            yield Text("")
        yield _facts(Facts("", tuple(zip(table.columns, row, strict=True))))
