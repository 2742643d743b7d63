"""Which columns fit, whatever the table and the terminal."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flexd.cli.blocks import Table
from flexd.cli.fit import GAP, LONGEST_WORD, fit
from flexd.cli.screen import renderable

NAMES = ("name", "rows", "step time", "why")
FIGURES = frozenset(("rows", "step time"))
ROW = ("items of the shop", "1,000,000", "2.5 ms", "drift 1.20 > 1.05")


def test_everything_is_shown_where_there_is_room():
    fitted = fit(NAMES, [ROW], FIGURES, (), 200)
    assert fitted is not None
    assert (fitted.columns, fitted.widths) == ((0, 1, 2, 3), (17, 9, 9, 17))
    assert fit(NAMES, [ROW], FIGURES, (), sum(fitted.widths) + 3 * GAP) == fitted


def test_texts_and_headings_give_way_before_a_column_goes_and_figures_never():
    fitted = fit(NAMES, [ROW], FIGURES, ("why",), 40)
    assert fitted is not None
    assert fitted.columns == (0, 1, 2, 3)
    assert fitted.widths[1] == len(ROW[1])
    assert fitted.widths[2] >= len(ROW[2])
    assert sum(fitted.widths) + 3 * GAP == 40, "no cell is wasted"


def test_columns_go_the_last_of_the_spare_ones_first():
    for width, columns in ((26, (0, 1, 2)), (20, (0, 1))):
        fitted = fit(NAMES, [ROW], FIGURES, ("step time", "why"), width)
        assert fitted is not None
        assert fitted.columns == columns
    assert fit(NAMES, [ROW], FIGURES, ("step time", "why"), 10) is None


def test_a_figure_is_not_broken_at_its_unit():
    shown = fit(("rank", "took"), [("1", "12 min 30 s")], frozenset(("took",)), (), 4 + GAP + 11)
    assert shown is not None
    assert shown.widths == (4, 11)
    assert fit(("rank", "took"), [("1", "12 min 30 s")], frozenset(("took",)), (), 4 + GAP + 10) is None


def test_a_word_without_end_is_broken():
    fitted = fit(("table", "rows"), [("x" * 300, "1")], frozenset(("rows",)), (), 60)
    assert fitted is not None
    assert fitted.widths == (60 - GAP - 4, 4)
    assert fit(("table",), [("x" * 300,)], frozenset(), (), LONGEST_WORD) is not None


def test_a_table_without_rows_has_the_width_of_its_headings():
    fitted = fit(NAMES, [], FIGURES, (), 80)
    assert fitted is not None
    assert fitted.widths == tuple(map(len, NAMES))


words = st.text(alphabet="abc ,.-", max_size=40)


@given(st.lists(st.tuples(words, words, words, words), max_size=5), st.integers(1, 120), st.booleans())
def test_what_is_shown_fits_and_no_figure_is_broken(rows, width, spare):
    fitted = fit(NAMES, rows, FIGURES, ("why", "rows") if spare else (), width)
    if fitted is None:
        return
    assert sum(fitted.widths) + GAP * (len(fitted.widths) - 1) <= width
    for column, shown in zip(fitted.columns, fitted.widths, strict=True):
        texts = [row[column] for row in rows]
        assert shown <= max(map(len, (NAMES[column], *texts)))
        if NAMES[column] in FIGURES:
            assert shown >= max(map(len, texts), default=0)


@pytest.mark.parametrize("width", [28, 34, 44, 60, 100])
def test_on_a_console_no_line_is_too_long_and_no_cell_is_lost(width):
    stream = io.StringIO()
    table = Table("", NAMES, (ROW, ("数据" * 6, "7", "-", "")), FIGURES, ("step time",))
    Console(file=stream, width=width, highlight=False).print(renderable([table]))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "1,000,000" in stream.getvalue()
    assert ("no room for: step time" in stream.getvalue()) == (width == 44), stream.getvalue()
