"""Output of commands: blocks of text, styled on a terminal and plain in a pipe, or JSON and YAML."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TextIO

import yaml
from pydantic import BaseModel

from flexd.cli.blocks import Block, Facts, Sentences


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
