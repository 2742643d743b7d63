"""Count-min counters against a scalar reference, plain counting and DataSketches; hot rows; a budget for 10^9 rows."""

import datasketches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import TableSpec
from flexd.sketch.count_min_kernels import BLOCK_IDS, DEPTH, cell_positions
from flexd.sketch.count_min_table import DISTINCT_ERROR, CountMinTable, error_share, tail_curve
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings, TableChoice

ROWS = 300
ALL = np.arange(ROWS, dtype=np.int64)
ids = st.lists(st.integers(-2, ROWS + 2), max_size=80)
units = st.one_of(st.integers(0, 2**18), st.integers(2**30 - 2, 2**33))
batches = st.lists(st.tuples(ids, units), max_size=8)


def count_min(rows: int = ROWS, log2_width: int = 8, hot_rows: int = 16) -> CountMinTable:
    choice = TableChoice("t", "count_min", 0, 0.0, 0.0, log2_width, hot_rows, 16)
    return CountMinTable(TableSpec("t", rows, 4), choice, 0)


def add(table: CountMinTable, rows: np.ndarray | list[int], units: int) -> tuple[int, int]:
    start, seen, given = 0, np.zeros(2, dtype=np.int64), np.array(rows, dtype=np.int64)
    while start < len(given):
        start, *outside = table.add_units(given, units, start)
        seen += outside
    return int(seen[0]), int(seen[1])


def set_cells(table: CountMinTable, words: np.ndarray, total_units: int) -> None:
    meta, arrays = table._state()
    table._load({**meta, "total_units": total_units}, {**arrays, "cells": words.reshape(-1)})


def cell_values(table: CountMinTable) -> np.ndarray:
    """Return the units in each cell, int64[4, 2^k]; both cells of a joined pair have its value."""
    pairs = table.cells.astype(np.int64).reshape(-1, 2)
    halves = pairs & (2**31 - 1)
    return np.where(pairs >> 31, (halves[:, 1] << 31 | halves[:, 0])[:, None], pairs).reshape(DEPTH, -1)


class Reference:
    """Counts one access at a time, cell by cell, with Python integers."""

    def __init__(self) -> None:
        self.cells, self.joined = [0] * 1024, [False] * 512
        position = np.empty((4, ROWS), np.uint32)
        cell_positions(ALL, ROWS, 8, position)
        self.at = position.T.tolist()

    def add(self, row: int, units: int) -> None:
        at = self.at[row]
        goal = min(self.cells[i] for i in at) + units
        for i in at:
            self.put(i, max(self.cells[i], goal))

    def put(self, i: int, value: int) -> None:
        pair, other = i // 2, i ^ 1
        if not self.joined[pair] and value >= 2**31:
            value = max(value, self.cells[other])
            self.joined[pair] = True
        self.cells[i] = value
        if self.joined[pair]:
            self.cells[other] = value


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 34))
def test_estimates_are_never_too_low_across_joined_pairs(parts, bits):
    exact, table = np.zeros(ROWS, dtype=object), count_min()
    for rows, units in parts:
        add(table, rows, units)
        for row in rows:
            if 0 <= row < ROWS:
                exact[row] += units
    assert table.total_units == sum(exact)
    assert (table.row_units(ALL) >= exact).all()
    table.rescale(max(bits, 1))
    assert (table.row_units(ALL).astype(object) * 2 ** max(bits, 1) >= exact).all()
    joined = table.joined_share
    set_cells(table, table.cells, table.total_units)
    assert table.joined_share == joined
    for rows, units in parts:
        add(table, rows, units)
    assert (table.row_units(ALL).astype(object) >= exact).all()


@settings(max_examples=60, deadline=None)
@given(batches)
def test_cells_are_those_of_the_reference_one_access_a_call(parts):
    reference, table = Reference(), count_min()
    for rows, units in parts:
        for row in rows:
            add(table, [row], units)
            if 0 <= row < ROWS:
                reference.add(row, units)
    assert cell_values(table).reshape(-1).tolist() == reference.cells
    assert table.joined_share == sum(reference.joined) / 512


def test_a_cell_saturates_and_never_wraps():
    table = count_min()
    for _ in range(12):
        add(table, [7], 2**60)
    assert table.row_units(np.array([7])).tolist() == [2**62 - 1]


def test_count_min_error_stays_within_its_bound():
    rows = 100_000
    accesses = np.random.default_rng(1).zipf(1.3, 300_000) % rows
    exact, table = np.bincount(accesses, minlength=rows), count_min(rows, 12)
    add(table, accesses, 3)
    error = table.row_units(np.arange(rows)) - 3 * exact
    assert error.min() >= 0
    stated = error_share(12) * table.total_units
    assert (error > stated).mean() <= np.exp(-4)
    mean_noise, bound = table.noise()
    assert 0 < mean_noise <= bound <= stated
    assert (error > bound).mean() <= 2 * np.exp(-4)


def test_the_noise_bound_grows_with_the_share_of_joined_cells():
    """Half of the pairs of every row are joined and hold everything: absent rows have 4 / width of the total."""
    width, value = 1 << 12, 2**32
    random = np.random.default_rng(0)
    words = np.zeros((4, width // 2, 2), dtype=np.uint32)
    for row in words:
        row[random.permutation(width // 2)[: width // 4]] = 2**31, 2**31 | value >> 31
    table = count_min(10**6, 12)
    set_cells(table, words, width // 4 * value)
    assert table.joined_share == 0.5
    absent = table.row_units(np.arange(2 * 10**6, 2 * 10**6 + 50_000))
    assert (absent == value).mean() == pytest.approx(1 / 16, abs=0.01)
    _, bound = table.noise()
    assert error_share(12) * table.total_units < value, "the bound without joined cells is too low here"
    assert bound == value
    assert (absent > bound).mean() <= np.exp(-4)


@pytest.mark.parametrize("length", [1, BLOCK_IDS - 1, BLOCK_IDS, BLOCK_IDS + 1, 3 * BLOCK_IDS + 17])
def test_every_length_and_a_full_buffer_of_candidates_count_every_access_once(length):
    rows = np.random.default_rng(length).integers(-5, ROWS + 5, length)
    table = count_min(hot_rows=ROWS)  # room for two blocks, so that each call counts one or two
    assert add(table, rows, 1) == ((rows < 0).sum(), (rows >= ROWS).sum())
    inside = rows[(rows >= 0) & (rows < ROWS)]
    assert table.total_units == len(inside)
    assert (table.row_units(ALL) >= np.bincount(inside, minlength=ROWS)).all()
    # A row's first access is within the band, whatever was counted in its cells before, unless all four are taken.
    wide = count_min(log2_width=16, hot_rows=ROWS)
    add(wide, rows, 1)
    wide.admit_buffered()
    assert set(wide.hot.tolist()) == set(inside.tolist())


def test_a_row_that_becomes_hotter_than_the_coldest_hot_one_is_admitted():
    table = count_min(10_000, 12, 100)
    add(table, np.repeat(np.arange(300), np.arange(600, 300, -1)), 1)
    table.admit_buffered()
    assert set(table.hot.tolist()) == set(range(100)), "the best 100 of 300"
    for accesses, admitted in ((450, False), (70, True)):
        add(table, np.full(accesses, 5000), 1)
        table.admit_buffered()
        assert (5000 in table.hot) == admitted


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 10**5), min_size=1, max_size=20))
def test_cells_of_a_row_are_those_of_datasketches(rows):
    for row in rows:
        table, library = count_min(10**6, 9), datasketches.count_min_sketch(DEPTH, 512)
        add(table, [row, row], 1)
        library.update(row)
        library.update(row)
        cells = np.frombuffer(library.serialize()[-8 * DEPTH * 512 :], dtype=np.float64)
        assert np.array_equal(cell_values(table).reshape(-1), cells)


REGISTERS_AT = 40
"""Offset of the registers in an updatable HLL_8 image of DataSketches."""


@pytest.mark.parametrize("units", [1, 2**33], ids=["light", "heavy"])
@pytest.mark.parametrize("rows", [0, 1, 10, 1_000, 50_000])
def test_registers_are_those_of_datasketches(rows, units):
    """Whatever the cells hold: those of heavy rows are counted in a loop of their own."""
    table = count_min(100_000, 9)
    library = datasketches.hll_sketch(12, datasketches.tgt_hll_type.HLL_8)
    add(table, np.arange(rows), units)
    for row in range(rows):
        library.update(row)
    if rows >= 1_000:
        assert library.serialize_updatable()[REGISTERS_AT : REGISTERS_AT + 4096] == table.registers.tobytes()
    assert table.distinct_rows() == pytest.approx(rows, rel=4 * DISTINCT_ERROR)
    if rows <= 10:
        assert round(table.distinct_rows()) == rows


def test_tail_curve_gives_the_mass_and_the_number_of_rows():
    random = np.random.default_rng(2)
    exact = np.sort(random.pareto(1.5, 50_000) + 1)
    accesses = random.choice(exact, size=30_000, p=exact / exact.sum())
    rows, units = tail_curve(accesses, float(exact.sum()), 1e9)
    assert (rows * units).sum() == pytest.approx(exact.sum())
    assert rows.sum() == pytest.approx(50_000, rel=0.05)
    for level in (2.0, 5.0):
        assert rows[units > level].sum() == pytest.approx((exact > level).sum(), rel=0.15)
    capped, _ = tail_curve(accesses, float(exact.sum()), 1000.0)
    assert capped.sum() == pytest.approx(1000)


def test_a_crowded_decayed_count_min_takes_a_coarser_unit():
    sketches = SketchSet([TableSpec("t", 10**6, 4)], SketchSettings(400_000, 1000.0, 1e9, 100, logarithmic=False))
    table = sketches._tables["t"].sketch
    rows = np.zeros(1, dtype=np.int64)
    sketches.ingest("t", rows, 0, 1.7e9)
    before = table.exponent
    # As after a long stream: every fourth cell holds twice the maximum of a word, in a pair with the next.
    words = np.zeros((4, 1 << table.log2_width), dtype=np.uint32)
    words[:, ::4], words[:, 1::4] = 2**31, 2**31 | 2
    set_cells(table, words, 2**40)
    assert (cell_values(table)[:, ::4] == 2**32).all()
    assert table.joined_share == 0.5
    weight = 2**32 * sketches._decay.unit_weight(before)
    sketches.ingest("t", rows, 0, 1.7e9)
    assert table.exponent > before
    assert table.access_units(1.7e9, sketches._decay) >= 2**8
    assert table.joined_share <= 1 / 8
    cells = cell_values(table).astype(float) * sketches._decay.unit_weight(table.exponent)
    assert np.allclose(cells[:, ::4], weight, rtol=1e-3, atol=2.0)
