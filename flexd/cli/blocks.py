"""Blocks of text that commands print: tables, facts and sentences."""

from __future__ import annotations

from dataclasses import dataclass

PROBLEM = frozenset(("problem",))
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "�")


def printable(text: str) -> str:
    """Replace control characters: names and reasons of users must not steer the terminal or break a line."""
    return text.translate(_CONTROL)


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings.

    Attributes:
        right: columns of numbers, set flush right and never broken.
        spare: columns that a narrow terminal leaves out, the last one first.
        whole: columns of text whose cells are never broken over lines.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    spare: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(printable(cell) for cell in row) for row in self.rows))


@dataclass(frozen=True)
class Facts:
    """Pairs of names and values.

    Attributes:
        wrong: names of values that report a fault; a terminal shows them in red.
    """

    title: str
    pairs: tuple[tuple[str, str], ...]
    wrong: frozenset[str] = PROBLEM

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", tuple((printable(name), printable(value)) for name, value in self.pairs))


@dataclass(frozen=True)
class Sentences:
    """Sentences, one paragraph each."""

    title: str
    lines: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(printable(line) for line in self.lines))


Block = Table | Facts | Sentences
