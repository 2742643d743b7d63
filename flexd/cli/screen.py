"""Render blocks on a terminal, styled and within its width."""

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from flexd.cli.blocks import Block, Facts, Sentences, Table

GAP = 2
"""Cells between two columns."""
_WRONG = "bold red"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B(?:/s)?|[munp]?s|min|h|d)(?!\w))")
# Stands for the space between a figure and its unit while lines are broken; rich also breaks at a no-break space.
_NO_BREAK = "\ue000"


def renderable(blocks: Sequence[Block]) -> RenderableType:
    """Return the blocks for a rich console, separated by empty lines."""
    parts: list[RenderableType] = []
    for i, block in enumerate(blocks):
        if i:
            parts.append(Text(""))
        if block.title:
            parts.append(Text(block.title, style="bold"))
        parts.append(Padding(_body(block), (0, 0, 0, 2)))
    return _Spaced(Group(*parts))


class _Spaced:
    """Prints ``_NO_BREAK`` as a space."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for segment in console.render(self._content, options):
            yield Segment(segment.text.replace(_NO_BREAK, " "), segment.style, segment.control)


def _text(text: str, style: str = "") -> Text:
    return Text(_BEFORE_UNIT.sub(_NO_BREAK, text), style=style)


def _body(block: Block) -> RenderableType:
    if isinstance(block, Sentences):
        return _sentences(block)
    return _facts(block) if isinstance(block, Facts) else _Fitting(block)


def _facts(facts: Facts) -> Grid:
    grid = Grid(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.pairs:
        grid.add_row(Text(name), _text(value, _WRONG if name in facts.wrong else ""))
    return grid


def _sentences(sentences: Sentences) -> RenderableType:
    if len(sentences.lines) == 1:
        return _text(sentences.lines[0])
    grid = Grid(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for line in sentences.lines:
        grid.add_row("-", _text(line))
    return grid


class _Fitting:
    """A table that fits the width of the console: texts are broken, figures never, and spare columns give way."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        table = self._table
        rows = [[_BEFORE_UNIT.sub(_NO_BREAK, cell) for cell in row] for row in table.rows]
        whole = table.right | table.whole
        least = {
            name: _least_width(name, [row[i] for row in rows], name in whole) for i, name in enumerate(table.columns)
        }
        shown, spare = list(table.columns), list(table.spare)
        while spare and _width(least, shown) > options.max_width:
            shown.remove(spare.pop())
        if _width(least, shown) > options.max_width:
            yield from _one_by_one(table)
            return
        # Headings of figures get the room that is left before texts do.
        room = options.max_width - _width(least, shown)
        widths = {}
        for name in filter(whole.__contains__, shown):
            widths[name] = min(max(least[name], cell_len(name)), least[name] + room)
            room -= widths[name] - least[name]
        grid = Grid(box=None, header_style="dim", padding=(0, GAP, 0, 0), pad_edge=False)
        for name in shown:
            grid.add_column(
                Text(name), justify="right" if name in table.right else "left", overflow="fold", vertical="top",
                width=widths.get(name),
            )  # fmt: skip
        for row in rows:
            grid.add_row(*(Text(row[table.columns.index(name)]) for name in shown))
        yield grid
        if left_out := [name for name in table.columns if name not in shown]:
            yield Text(f"no room for: {', '.join(left_out)} (-o yaml has them)", style="dim")


def _least_width(name: str, texts: Sequence[str], whole: bool) -> int:
    heading = max(map(cell_len, name.split()), default=0)
    if whole:
        return max(heading, *map(cell_len, texts), 0)
    # A column of texts has room for its longest word of at most 24 cells, or the table loses a column.
    return max(heading, min(24, max((cell_len(word) for text in texts for word in text.split()), default=0)))


def _width(widths: Mapping[str, int], columns: Sequence[str]) -> int:
    return sum(widths[name] for name in columns) + GAP * (len(columns) - 1)


def _one_by_one(table: Table) -> Iterable[RenderableType]:
    """Yield every row as a list of names and values."""
    for i, row in enumerate(table.rows):
        if i:
            yield Text("")
        yield _facts(Facts("", tuple(zip(table.columns, row, strict=True))))
