"""Blocks of text that commands print: tables, facts and sentences."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Facts:
    """Pairs of names and values.

    Attributes:
        wrong: names of values that report a fault; a terminal shows them in red.
    """

    title: str
    pairs: tuple[tuple[str, str], ...]
    wrong: frozenset[str] = frozenset(("problem",))


@dataclass(frozen=True)
class Sentences:
    """Sentences, one paragraph each."""

    title: str
    lines: tuple[str, ...]


Block = Table | Facts | Sentences
