"""Count-min cells against a scalar reference: joined pairs, blocks, merging, rescaling, a budget that holds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import budget
from flexd.sketch.counters import hashing
from flexd.sketch.counters.countmin import BLOCK_IDS, CountMin
from flexd.sketch.sketch_set import SketchSet

ROWS = 300
ALL = np.arange(ROWS, dtype=np.int64)
ids = st.lists(st.integers(-2, ROWS + 2), max_size=80)
units = st.one_of(st.integers(0, 2**18), st.integers(2**30 - 2, 2**33))
batches = st.lists(st.tuples(ids, units), max_size=8)


class Reference:
    """One cell and one access at a time, with Python's own integers."""

    def __init__(self, conservative: bool) -> None:
        self.conservative, self.cells, self.joined = conservative, [0] * 1024, [False] * 512
        position = np.empty((4, ROWS), np.uint32)
        hashing.cell_positions(ALL, ROWS, 8, position)
        self.at = position.T.tolist()

    def add(self, row: int, units: int) -> None:
        at = self.at[row]
        goal = min(self.cells[i] for i in at) + units
        for i in at:
            wanted = max(self.cells[i], goal) if self.conservative else self.cells[i] + units
            self.put(i, wanted)

    def put(self, i: int, value: int) -> None:
        pair, other = i // 2, i ^ 1
        if not self.joined[pair] and value >= 2**31:
            value = max(value, self.cells[other]) if self.conservative else value + self.cells[other]
            self.joined[pair] = True
        self.cells[i] = value
        if self.joined[pair]:
            self.cells[other] = value


def _add(counter: CountMin, rows: list[int], units: int, room: int = BLOCK_IDS) -> None:
    start, ids = 0, np.array(rows, dtype=np.int64)
    while start < len(ids):
        buffer = np.empty(room, dtype=np.int64)
        start, _, _, _ = counter.add(ids, start, units, np.zeros(16, np.uint8), 2**62, buffer, 0)


def _exact(parts: list[tuple[list[int], int]]) -> np.ndarray:
    exact = np.zeros(ROWS, dtype=object)
    for rows, units in parts:
        for row in rows:
            if 0 <= row < ROWS:
                exact[row] += units
    return exact


def _built(parts: list[tuple[list[int], int]], conservative: bool) -> CountMin:
    counter = CountMin(ROWS, 8, conservative=conservative)
    for rows, units in parts:
        _add(counter, rows, units)
    return counter


@pytest.mark.parametrize("conservative", [True, False])
@settings(max_examples=60, deadline=None)
@given(batches)
def test_cells_are_those_of_the_reference_one_access_a_call(conservative, parts):
    reference, counter = Reference(conservative), CountMin(ROWS, 8, conservative=conservative)
    for rows, units in parts:
        for row in rows:
            _add(counter, [row], units)
            if 0 <= row < ROWS:
                reference.add(row, units)
    assert counter.values().reshape(-1).tolist() == reference.cells
    assert counter.joined_share == sum(reference.joined) / 512


@pytest.mark.parametrize("conservative", [True, False])
@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 34))
def test_estimates_are_never_too_low_across_joined_pairs(conservative, parts, bits):
    exact, counter = _exact(parts), _built(parts, conservative)
    assert counter.total_units == sum(exact)
    assert (counter.query(ALL) >= exact).all()
    counter.rescale(bits)
    assert (counter.query(ALL).astype(object) * 2**bits >= exact).all()
    twin = CountMin(ROWS, 8, conservative=conservative)
    twin.load(counter.cells(), counter.total_units)
    assert twin.joined_share == counter.joined_share
    for rows, units in parts:
        _add(counter, rows, units)
    assert (counter.query(ALL).astype(object) >= exact).all()


@settings(max_examples=60, deadline=None)
@given(batches, st.randoms(use_true_random=False))
def test_plain_cells_do_not_depend_on_order_nor_on_how_the_stream_is_split(parts, random):
    whole = _built(parts, conservative=False)
    shuffled = [(random.sample(rows, len(rows)), units) for rows, units in parts]
    random.shuffle(shuffled)
    cut = random.randint(0, len(parts))
    merged = _built(shuffled[:cut], conservative=False)
    merged.merge(_built(shuffled[cut:], conservative=False))
    assert np.array_equal(merged.cells(), whole.cells())
    assert merged.joined_share == whole.joined_share
    assert merged.total_units == whole.total_units


@settings(max_examples=40, deadline=None)
@given(batches, batches)
def test_conservative_merge_bounds_the_concatenation_from_above(first, second):
    merged = _built(first, conservative=True)
    merged.merge(_built(second, conservative=True))
    exact = _exact(first + second)
    assert (merged.query(ALL) >= exact).all()
    plain = _built(first + second, conservative=False)
    assert (merged.query(ALL) <= plain.query(ALL)).all()


def test_a_count_stops_at_the_top_and_never_wraps():
    counter = CountMin(ROWS, 8)
    for _ in range(12):
        _add(counter, [7], 2**60)
    assert counter.query(np.array([7])).tolist() == [2**62 - 1]
    with pytest.raises(SketchError):
        _add(counter, [7], 2**61)


@pytest.mark.parametrize("length", [1, BLOCK_IDS - 1, BLOCK_IDS, BLOCK_IDS + 1, 3 * BLOCK_IDS + 17])
def test_every_length_and_a_full_candidate_buffer_count_every_access_once(length):
    random = np.random.default_rng(length)
    rows = random.integers(-5, ROWS + 5, length)
    counter, found, start, seen = CountMin(ROWS, 8, conservative=False), [], 0, np.zeros(2, dtype=int)
    while start < length:
        # Room for a single block, so that each call stops at the first one and takes up the next.
        buffer = np.empty(BLOCK_IDS, dtype=np.int64)
        start, below, beyond, reported = counter.add(rows, start, 1, np.zeros(16, np.uint8), 0, buffer, 0)
        found += buffer[:reported].tolist()
        seen += below, beyond
    inside = rows[(rows >= 0) & (rows < ROWS)]
    assert seen.tolist() == [(rows < 0).sum(), (rows >= ROWS).sum()]
    assert counter.values().sum(axis=1).tolist() == [len(inside)] * 4
    assert set(found) <= set(inside.tolist())
    # A row's first access is within the band, whatever was counted in its cells before, unless all four are taken.
    fresh = CountMin(ROWS, 16, conservative=False)
    buffer = np.empty(4 * BLOCK_IDS + length, dtype=np.int64)
    *_, reported = fresh.add(rows, 0, 1, np.zeros(16, np.uint8), 0, buffer, 0)
    assert set(buffer[:reported].tolist()) == set(inside.tolist())


def test_a_crowded_decayed_count_min_takes_a_coarser_unit():
    sketches = SketchSet([TableSpec("t", 10**6, 4)], 400_000, 1000.0, 1e9, 100, logarithmic=False)
    table = sketches._tables[0]
    rows = np.zeros(1, dtype=np.int64)
    sketches.ingest("t", rows, 0, 1.7e9)
    before, counter = table.exponent, table._counter
    width = 1 << counter.log2_width
    # As after a long stream: every fourth cell is twice what a word holds.
    values = np.zeros((4, width), dtype=np.uint64)
    values[:, ::4] = 2**32
    counter.load_values(values, 2**40)
    assert counter.joined_share == 0.5
    weight = 2**32 * sketches._decay.unit_weight(before)
    sketches.ingest("t", rows, 0, 1.7e9)
    assert table.exponent > before
    assert table.access_units(1.7e9, sketches._decay) >= 2**8
    assert table._counter.joined_share <= 1 / 8
    cells = counter.values().astype(float) * sketches._decay.unit_weight(table.exponent)
    assert np.allclose(cells[:, ::4], weight, rtol=1e-3, atol=2.0)
    assert sketches.nbytes <= sketches.choices()[0].bytes


@pytest.mark.parametrize("memory", [64 * 2**20, 512 * 2**20])
def test_a_table_of_a_billion_rows_within_the_budget(memory):
    table = TableSpec("huge", 10**9, 64)
    sketches = SketchSet([table], memory, 3600.0, logarithmic=False)
    choice = sketches.choices()[0]
    assert choice.kind == "count_min"
    assert choice.bytes <= memory
    assert choice.error_share == math.e / 2**choice.log2_width
    # Wide enough: twice as wide would not fit.
    assert budget._count_min_bytes(table, choice.log2_width + 1, 10**6) > memory
    random = np.random.default_rng(1)
    for i in range(20):
        ids = random.integers(0, 10**9, 8192)
        ids[:100] = 999_999_999 - np.arange(100)
        sketches.ingest("huge", ids, 0, 1.7e9 + i)
        assert sketches.nbytes <= choice.bytes
    assert (sketches.query("huge", 999_999_999 - np.arange(100)) >= 19.9).all()
    profile = sketches.profile().tables[0]
    assert np.isin(999_999_999 - np.arange(100), profile.hot_rows[:100]).all()
    assert profile.distinct_rows == pytest.approx(20 * 8092 + 100, rel=0.08)
