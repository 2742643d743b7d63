"""Output of commands: blocks of text, styled on a terminal and plain in a pipe, or JSON and YAML."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO

import yaml
from pydantic import BaseModel

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


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def emit(data: BaseModel | dict[str, Any], blocks: Sequence[Block], output: OutputFormat) -> None:
    """Print ``data`` as JSON or YAML, or ``blocks`` as text, to stdout."""
    if output is OutputFormat.TABLE:
        show(blocks, sys.stdout)
        return
    document = data.model_dump(mode="json") if isinstance(data, BaseModel) else data
    if output is OutputFormat.JSON:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def show(blocks: Sequence[Block], stream: TextIO) -> None:
    """Print blocks as text."""
    if stream.isatty():
        # Imported here because rich takes a while to load, and a pipe does not need it.
        from rich.console import Console

        from flexd.cli.screen import renderable

        Console(file=stream, highlight=False).print(renderable(blocks))
    else:
        stream.write("\n".join(_plain(block) for block in blocks))


def _plain(block: Block) -> str:
    heading = [f"{block.title}:"] if block.title else []
    indent = "  " if block.title else ""
    if isinstance(block, Sentences):
        return "".join(f"{line}\n" for line in [*heading, *(f"{indent}{line}" for line in block.lines)])
    if isinstance(block, Facts):
        width = max((len(name) for name, _ in block.pairs), default=0)
        body = [f"{indent}{name.ljust(width)}  {value}".rstrip() for name, value in block.pairs]
        return "".join(f"{line}\n" for line in [*heading, *body])
    lines = [block.columns, *block.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(block.columns))]
    body = [
        indent
        + "  ".join(
            cell.rjust(width) if column in block.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, block.columns, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "".join(f"{line}\n" for line in [*heading, *body])
