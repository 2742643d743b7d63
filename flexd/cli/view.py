"""What a command prints: blocks of text that look right on a terminal and stay plain in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO

import yaml
from pydantic import BaseModel


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True)
class Table:
    """Rows of text; columns named in ``right`` are set flush right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    title: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sentences:
    """Text for people, a paragraph each."""

    title: str
    lines: tuple[str, ...]


Block = Table | Facts | Sentences


def emit(data: BaseModel | dict[str, Any], blocks: Sequence[Block], output: OutputFormat) -> None:
    """Prints ``data`` as JSON or YAML, or ``blocks`` as text, to stdout."""
    if output is OutputFormat.TABLE:
        show(blocks, sys.stdout)
        return
    document = data.model_dump(mode="json") if isinstance(data, BaseModel) else data
    if output is OutputFormat.JSON:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def show(blocks: Sequence[Block], stream: TextIO) -> None:
    if stream.isatty():
        _show_rich(blocks, stream)
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


def _show_rich(blocks: Sequence[Block], stream: TextIO) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for i, block in enumerate(blocks):
        if i:
            console.print()
        if block.title:
            console.print(Text(block.title, style="bold"))
        if isinstance(block, Sentences):
            for line in block.lines:
                console.print(Padding(Text(line), (0, 0, 0, 2)))
            continue
        grid = RichTable(box=None, show_header=isinstance(block, Table), header_style="dim", padding=(0, 2, 0, 0))
        if isinstance(block, Facts):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, value in block.pairs:
                grid.add_row(Text(name), Text(value))
        else:
            for column in block.columns:
                grid.add_column(Text(column), justify="right" if column in block.right else "left", overflow="fold")
            for row in block.rows:
                grid.add_row(*(Text(cell) for cell in row))
        console.print(Padding(grid, (0, 0, 0, 2)))
