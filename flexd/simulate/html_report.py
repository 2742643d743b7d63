"""The HTML report: one file, nothing to fetch, light or dark as the reader's system is."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexd.core.errors import ConfigError
from flexd.simulate.plots import DARK, LIGHT, render
from flexd.simulate.simulation import Simulation

_CAPTIONS = {
    "traffic": "Bytes sent between nodes in a step of the last quarter, by purpose.",
    "over-time": "Exposed communication of a step, as popularity drifts. Ticks mark the steps at which rows migrate.",
    "budget": "The re-planned placement at other replica budgets.",
    "balance": "Bytes that each rank sends to other nodes.",
}
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1b1b; --faint: #666666; --line: #d9d9d9; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #161a1e; --ink: #e6e6e6; --faint: #9aa4ad; --line: #3a4047; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left; white-space: nowrap; }
th { color: var(--faint); font-weight: 500; } .right { text-align: right; }
figure { margin: 1.5rem 0; } figure img { width: 100%; height: auto; } figcaption { color: var(--faint); }
"""


@dataclass(frozen=True)
class ReportTable:
    """Text cells; columns whose names are in ``right`` are set flush right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()


def write_html_report(simulation: Simulation, words: Sequence[str], tables: Sequence[ReportTable], path: Path) -> None:
    """Raises ConfigError without matplotlib, or if the file cannot be written."""
    _write(path, html_report(simulation, words, tables))


def write_page(title: str, words: Sequence[str], tables: Sequence[ReportTable], path: Path) -> None:
    """Write sentences and tables. Raises ConfigError if the file cannot be written."""
    _write(path, _document(html.escape(title), _text(title, words, tables)))


def html_report(simulation: Simulation, words: Sequence[str], tables: Sequence[ReportTable]) -> str:
    """Return the whole document. Raises ConfigError without matplotlib."""
    light, dark = render(simulation, LIGHT, "svg"), render(simulation, DARK, "svg")
    title = f"flexd simulate: {simulation.accesses_name}"
    body = _text(title, words, tables) + [_figure(name, light[name], dark[name]) for name in light]
    return _document(html.escape(title), body)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error}", remedy="give a file that can be written") from error


def _text(title: str, words: Sequence[str], tables: Sequence[ReportTable]) -> list[str]:
    paragraphs = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(line)}</p>" for line in words)]
    return paragraphs + [_table(table) for table in tables]


def _document(title: str, body: Sequence[str]) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _table(table: ReportTable) -> str:
    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{' class=right' if column in table.right else ''}>{html.escape(cell)}</{tag}>"
            for column, cell in zip(table.columns, row, strict=True)
        )

    lines = [f"<tr>{cells('td', row)}</tr>" for row in table.rows]
    return (
        f"<h2>{html.escape(table.title)}</h2>\n<div class=wide><table>"
        f"<thead><tr>{cells('th', table.columns)}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table></div>"
    )


def _figure(name: str, light: bytes, dark: bytes) -> str:
    caption = html.escape(_CAPTIONS[name])
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data_url(dark)}">'
        f'<img src="{_data_url(light)}" alt="{caption}"></picture><figcaption>{caption}</figcaption></figure>'
    )


def _data_url(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
