"""Print any resource of the API: its values as facts, its lists as tables, its parts below.

Units follow from the names of fields, as everywhere in flexd; ``flexd.core.model.Show`` on a field says what does not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, TextIO

import yaml
from pydantic import BaseModel

from flexd.cli.blocks import Block, Facts, Sentences, Table
from flexd.core import units
from flexd.core.model import Show

_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "�")
MOST_LISTED = 16
"""Values of one list that a line shows; ``-o json`` has all."""
# Facts that report a fault; a terminal shows them in red.
_WRONG = re.compile(r"problem|reasons|lost|missing|healthy|unused|withheld|ending$|^no plan$")
_PLAIN = Show()
_EMPTY: tuple[object, ...] = (None, "", (), [], {})
_UNITS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    (r"unix_seconds$", units.when),
    (r"(age|uptime|window|eta)_seconds$", units.age),
    (r"bytes_per_second", lambda value: f"{units.size(value)}/s"),
    (r"seconds", units.seconds),
    (r"bytes", units.size),
    (r"share|coverage|progress|completion|gap|listed|probability|error|per_rank|per_node|anywhere", units.share),
    (r"^(row|key|rank|node)$|_(rank|node)$|version|generation", str),
)


def present(value: BaseModel, output: OutputFormat, *, rows: int | None = None, tables: bool = False) -> None:
    """Print a resource in the requested format; ``rows`` and ``tables`` as for ``blocks_of``."""
    emit(value, blocks_of(value, rows=rows, tables=tables), output)


def blocks_of(
    value: BaseModel, title: str = "", *, rows: int | None = None, brief: bool = False, tables: bool = False
) -> list[Block]:
    """Return a resource as blocks.

    Args:
        rows: rows of a table, at most; None shows all.
        brief: only the facts of the resource itself, without its details.
        tables: a list of one entry is a table too, and not its facts.
    """
    facts: list[tuple[str, str]] = []
    above: list[Block] = []
    below: list[Block] = []
    for name, item, show in _shown(value):
        if brief and show.detail:
            continue
        under = f"{title} {show.title or _heading(name)}".strip()
        if isinstance(item, BaseModel):
            below += blocks_of(item, under, rows=rows, brief=show.brief)
        elif entries := entries_of(item):
            one = not tables and len(entries) == 1 and _is_large(entries[0][1])
            below += blocks_of(entries[0][1], under) if one else [table_of(under, entries, rows)]
        elif name in ("messages", "why") and isinstance(item, tuple):
            # Sentences, one a line. The answer to the question comes before its facts.
            (below if facts or below else above).append(Sentences(under, item))
        elif isinstance(item, Mapping) and any(isinstance(each, Mapping | list) for each in item.values()):
            facts += flat(item).items()
        else:
            facts.append((show.title or _heading(name), text_of(name, item, show)))
    wrong = frozenset(name for name, text in facts if _WRONG.search(name) or (name, text) == ("ready", "no"))
    shown: list[Block] = [Facts(title, tuple(facts), wrong)] if facts else []
    return shown if brief else [*above, *shown, *below]


def _is_large(value: BaseModel) -> bool:
    """Return True if the only entry of a list is shown as facts, and not as a line of a table."""
    shown = [item for _, item, _ in _shown(value)]
    return len(shown) > 8 or any(isinstance(item, BaseModel) for item in shown)


def table_of(title: str, entries: Sequence[tuple[str, BaseModel]], rows: int | None = None) -> Table:
    """Return a table of resources of one kind by name; columns that are empty in every row are left out."""
    cells = [
        {name: (item, show) for name, item, show in _shown(each, always=True) if not show.detail} for _, each in entries
    ]
    cells, more = cells[:rows], len(cells[rows or len(cells) :])
    columns = [name for name in cells[0] if any(_says(*each[name]) for each in cells)]
    headings = tuple(cells[0][name][1].title or _heading(name) for name in columns)
    lines = [tuple(text_of(name, *each[name]) for name in columns) for each in cells]
    values = [[each[name][0] for each in cells] for name in columns]
    numbers = {
        heading
        for heading, column in zip(headings, values, strict=True)
        if not any(isinstance(item, str | bool | tuple | Mapping | BaseModel) for item in column)
    }
    if entries[0][0]:
        headings = ("name", *headings)
        lines = [(name.replace("_", " "), *line) for (name, _), line in zip(entries, lines, strict=False)]
    if more:
        lines.append((f"and {more} more", *("" for _ in headings[1:])))
    return Table(title, headings, tuple(lines), frozenset(numbers), headings[2:], frozenset(headings[:1]))


def text_of(name: str, item: Any, show: Show = _PLAIN) -> str:
    """Return a value in words; the ``name`` of its field gives the unit."""
    if isinstance(item, str) or item is None:
        return item or units.UNKNOWN
    if isinstance(item, bool):
        return "yes" if item else "no"
    if show.unit and not isinstance(item, Mapping | tuple):
        return show.unit(item)
    if isinstance(item, int | float):
        return _unit(name, item)(item)
    if isinstance(item, BaseModel):
        return ", ".join(f"{show.title or _heading(name)} {text_of(name, *each)}" for name, *each in _shown(item))
    if isinstance(item, Mapping) and not any(isinstance(each, Mapping | list) for each in item.values()):
        has_unit = any(re.search(pattern, name) for pattern, _ in _UNITS)
        parts = ((key, text_of(name if has_unit else key, each, show)) for key, each in item.items() if each)
        return ", ".join(f"{key} {text}" for key, text in parts) or "none"
    if isinstance(item, tuple):
        more = f" and {len(item) - MOST_LISTED} more" if len(item) > MOST_LISTED else ""
        return (", ".join(text_of(name, each, show) for each in item[:MOST_LISTED]) or "none") + more
    return json.dumps(item)


def flat(value: object, path: str = "") -> dict[str, str]:
    """Return values by key path: ``{"a": {"b": [1]}}`` -> ``{"a.b[0]": "1"}``."""
    if isinstance(value, Mapping) and value:
        parts = {f"{path}.{key}".removeprefix("."): item for key, item in value.items()}
    elif isinstance(value, list) and value:
        parts = {f"{path}[{i}]": item for i, item in enumerate(value)}
    else:
        # As YAML writes it: true, not True.
        return {path: value if isinstance(value, str) else json.dumps(value)}
    return {key: text for at, item in parts.items() for key, text in flat(item, at).items()}


def _unit(name: str, value: float) -> Callable[[Any], str]:
    for pattern, form in _UNITS:
        if re.search(pattern, name):
            return form
    return units.count if isinstance(value, int) or abs(value) >= 1000 else "{:.4g}".format


def _heading(name: str) -> str:
    return (re.sub(r"_?(unix_)?seconds$", "", name) or "time").replace("_", " ")


def _shown(value: BaseModel, *, always: bool = False) -> Iterator[tuple[str, Any, Show]]:
    """Yield (name, value, how it is shown) of the fields that say something: empty ones and defaults do not."""
    kind = type(value)
    fields = {name: (field.metadata, field.default) for name, field in kind.model_fields.items()}
    for name, computed in kind.model_computed_fields.items():
        fields[name] = (getattr(computed.return_type, "__metadata__", []), None)
    for name, (metadata, default) in fields.items():
        show = next((each for each in metadata if isinstance(each, Show)), _PLAIN)
        item = getattr(value, name)
        if not show.hidden and (always or show.always or (_says(item) and item != default)):
            yield name, item, show


def _says(item: Any, _: Show = _PLAIN) -> bool:
    return item not in _EMPTY and not (isinstance(item, Mapping) and not any(item.values()))


def entries_of(item: Any, name: str = "") -> list[tuple[str, BaseModel]]:
    """Return the resources of a list or mapping, and of mappings in it, with their titles or keys; those of a list
    without a title have no name."""
    if isinstance(item, BaseModel):
        return [(getattr(item, "title", "") or name, item)]
    if isinstance(item, Mapping):
        return [found for key, each in item.items() for found in entries_of(each, f"{name} {key}".strip())]
    if isinstance(item, tuple | list):
        return [found for each in item for found in entries_of(each)]
    return []


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
    """Print blocks as text, without control characters: names and reasons of users must not steer the terminal."""
    blocks = [_printable(block) for block in blocks]
    if stream.isatty():
        # Imported here because rich takes a while to load, and a pipe does not need it.
        from rich.console import Console

        from flexd.cli.screen import renderable

        Console(file=stream, highlight=False).print(renderable(blocks))
    else:
        stream.write("\n".join(_plain(block) for block in blocks))


def _printable(block: Block) -> Block:
    if isinstance(block, Sentences):
        return replace(block, lines=tuple(line.translate(_CONTROL) for line in block.lines))
    if isinstance(block, Facts):
        return replace(block, pairs=tuple((a.translate(_CONTROL), b.translate(_CONTROL)) for a, b in block.pairs))
    return replace(block, rows=tuple(tuple(cell.translate(_CONTROL) for cell in row) for row in block.rows))


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
