"""Select the columns of a table that fit a terminal, and their widths. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GAP = 2
"""Cells between two columns."""
LONGEST_WORD = 24
"""A text column is at least as wide as its longest word; only longer words than this are broken."""


@dataclass(frozen=True)
class Fitted:
    """Layout of a table.

    Attributes:
        columns: indices of the columns that are shown.
        widths: width of each of them, in cells.
    """

    columns: tuple[int, ...]
    widths: tuple[int, ...]


@dataclass(frozen=True)
class _Column:
    at: int
    least: int
    natural: int


def fit(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    whole: frozenset[str],
    spare: Sequence[str],
    width: int,
    cells: Callable[[str], int] = len,
) -> Fitted | None:
    """Return the layout of a table in ``width`` cells; None if that is not possible.

    Headings and texts are broken between words, figures never: a figure on two lines reads as two. A table that is
    still too wide loses columns of ``spare``, the last one first.

    Args:
        whole: names of the columns whose cells are not broken.
        cells: returns the width of a text in cells.
    """
    columns = [_column(i, name, [row[i] for row in rows], name in whole, cells) for i, name in enumerate(names)]
    for kept in range(len(spare), -1, -1):
        left_out = set(spare[kept:])
        shown = [column for column in columns if names[column.at] not in left_out]
        room = width - GAP * (len(shown) - 1)
        if sum(column.least for column in shown) <= room:
            return Fitted(tuple(column.at for column in shown), _widths(shown, room))
    return None


def _column(at: int, name: str, texts: list[str], whole: bool, cells: Callable[[str], int]) -> _Column:
    natural = max(map(cells, (name, *texts)))
    heading = max(map(cells, name.split()), default=0)
    if whole:
        return _Column(at, max(heading, *map(cells, texts), 0), natural)
    words = max((cells(word) for text in texts for word in text.split()), default=0)
    return _Column(at, max(heading, min(words, LONGEST_WORD)), natural)


def _widths(columns: list[_Column], room: int) -> tuple[int, ...]:
    """Shrink the widest columns first, none below its least width."""
    low, high = 0, max((column.natural for column in columns), default=0)
    while low < high:
        limit = (low + high + 1) // 2
        if sum(_limited(column, limit) for column in columns) <= room:
            low = limit
        else:
            high = limit - 1
    widths = [_limited(column, low) for column in columns]
    for i, column in enumerate(columns):
        widths[i] += max(0, min(column.natural - widths[i], room - sum(widths)))
    return tuple(widths)


def _limited(column: _Column, limit: int) -> int:
    return max(column.least, min(column.natural, limit))
