"""Blocks on a terminal: figures keep their units, sentences are told apart."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flexd.cli.blocks import Facts, Sentences, Table
from flexd.cli.screen import renderable


def shown(*blocks: Facts | Sentences | Table, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(renderable(blocks))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", range(24, 60))
@pytest.mark.parametrize("figure", ["806.6 MB", "0.517 us", "15.5 GB/s", "12 min", "2 d"])
def test_a_line_never_ends_between_a_figure_and_its_unit(width: int, figure: str) -> None:
    text = f"the buffers of one step, of all ranks together, take {figure} at most"
    blocks = (Facts("", (("memory", text),)), Sentences("", (text,)), Table("", ("what",), ((text,),)))
    for block in blocks:
        lines = shown(block, width=width)
        assert max(map(len, lines)) <= width
        assert any(figure in line for line in lines), lines


def test_sentences_are_told_apart_where_there_are_several() -> None:
    lines = shown(Sentences("why", ("the first of two sentences", "the second")), width=20)
    assert lines == ["why", "  - the first of two", "    sentences", "  - the second"]
    assert shown(Sentences("", ("only one",)), width=20) == ["  only one"]


def test_a_table_names_what_it_leaves_out() -> None:
    table = Table("", ("name", "rows"), (("items", "1,000"),), frozenset(("rows",)), ("rows",))
    assert shown(table, width=12) == ["  name", "  items", "  no room", "  for: rows", "  (-o yaml", "  has them)"]


def test_a_whole_column_is_not_broken() -> None:
    table = Table("", ("phase", "time"), (("forward rows", "1 ms"),), frozenset(("time",)), ("time",))
    assert shown(table, width=16) == ["  phase     time", "  forward   1 ms", "  rows"]
    whole = Table(table.title, table.columns, table.rows, table.right, table.spare, frozenset(("phase",)))
    assert shown(whole, width=16)[:2] == ["  phase", "  forward rows"]
