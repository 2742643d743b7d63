#!/usr/bin/env python3
"""Draw docs/images/packages.svg: flexd's packages by the processes that load them, and what passes between these.

Packages and their tasks are read from the docstrings of ``flexd/``, their order from the import rules in
``pyproject.toml``. With ``--check`` nothing is written, and the exit status is 1 if the picture is out of date.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from generated import write_or_check
from house import import_graph, reachable

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "images" / "packages.svg"
COMMAND = "python tools/gen_diagram.py"
STARTS = {
    "training ranks": ("flexd.embedding", "flexd.torchrec", "flexd.control.agent", "flexd.stream.publisher"),
    "daemon": ("flexd.daemon",),
}
"""By process: the packages whose modules it starts from."""
COLUMNS = {"training ranks": "#cfe8d5", "both": "#f3e3bd", "daemon": "#cfdcf2", "commands": "#e8e8e8"}
ARROWS = (
    ("row ids, counts, reports of steps", 0, 2, 46), ("rows and tiers, in chunks", 2, 0, 66), ("HTTP", 3, 2, 46),
)  # fmt: skip
"""(what passes, the columns from and to, height)."""
BOX_WIDTH, GAP, FLOW, LINE, TOP = 214, 8, 30, 13, 78
FONT = "font-family='sans-serif' fill='#1c1c1c'"


def docstrings() -> dict[str, str]:
    """Return the first paragraph of each package; a package of packages (``control``) stands for nothing itself."""
    found = {}
    for path in sorted((ROOT / "flexd").rglob("__init__.py")):
        name = ".".join(path.parent.relative_to(ROOT).parts)
        if name.count(".") == 1 + name.startswith("flexd.control."):
            found[name] = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("`", "")
    return {name: text for name, text in found.items() if name != "flexd.control"}


def ranks_of_layers() -> dict[str, int]:
    """Return the number of each package's layer, 0 for the highest; a layer may import those below it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {name: n for n, layer in enumerate(layers) for name in re.split(r"\s*[|:]\s*", layer)}


def loaded_modules() -> dict[str, set[str]]:
    """Return by process the modules that it imports, at once or inside a function."""
    paths = (ROOT / "flexd").rglob("*.py")
    graph = import_graph({str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths})
    return {
        process: reachable(graph, [name for name in graph if is_inside(name, starts)])
        for process, starts in STARTS.items()
    }


def is_inside(module: str, packages: Sequence[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def columns() -> dict[str, list[tuple[str, list[str]]]]:
    """Return by column its packages, the highest layer first, with the lines that say what they do."""
    loaded, order = loaded_modules(), ranks_of_layers()
    found: dict[str, list[tuple[str, list[str]]]] = {name: [] for name in COLUMNS}
    for package, task in sorted(docstrings().items(), key=lambda item: (order.get(item[0], 0), item[0])):
        by = [process for process, names in loaded.items() if any(is_inside(name, [package]) for name in names)]
        column = "both" if len(by) == len(STARTS) else by[0] if by else "commands"
        found[column].append((package, textwrap.wrap(task, 34, max_lines=5, placeholder=" ...")))
    return found


def text(left: float, top: float, size: int, written: str, more: str = "") -> str:
    return f"<text x='{left:.0f}' y='{top:.0f}' font-size='{size}' {more} {FONT}>{written}</text>\n"


def draw() -> str:
    parts, bottom = [], 0
    for n, (name, packages) in enumerate(columns().items()):
        left, top = GAP + n * (BOX_WIDTH + FLOW), TOP
        parts.append(text(left, 20, 15, name, "font-weight='bold'"))
        for package, lines in packages:
            height = 28 + LINE * len(lines)
            parts.append(
                f"<rect x='{left}' y='{top}' width='{BOX_WIDTH}' height='{height}' rx='5' "
                f"fill='{COLUMNS[name]}' stroke='#777'/>\n"
            )
            parts.append(text(left + 7, top + 17, 13, package, "font-weight='bold'"))
            parts += [text(left + 7, top + 33 + LINE * k, 11, escape(line, False)) for k, line in enumerate(lines)]
            top += height + GAP
        bottom = max(bottom, top)
    for written, start, end, top in ARROWS:
        from_, to = (GAP + (n + (n == min(start, end)) * 0.62) * (BOX_WIDTH + FLOW) for n in (start, end))
        parts.append(f"<path d='M{from_:.0f} {top}H{to:.0f}' stroke='#444' marker-end='url(#tip)'/>\n")
        parts.append(text((from_ + to) / 2, top - 5, 11, written, "text-anchor='middle'"))
    width = GAP + len(COLUMNS) * (BOX_WIDTH + FLOW) - FLOW + GAP
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{bottom}' viewBox='0 0 {width} {bottom}'>\n"
        f"<!-- Drawn by `{COMMAND}`: change the packages' docstrings, not this file. -->\n"
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' markerHeight='8' "
        "orient='auto-start-reverse'><path d='M0 0L8 4L0 8z' fill='#444'/></marker></defs>\n"
        f"<rect width='{width}' height='{bottom}' fill='white'/>\n{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, COMMAND, {TARGET: draw()}))
