"""The loops of the count-min counters against a scalar reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.sketch.counters import hashing
from flexd.sketch.counters.countmin import BLOCK_IDS, CountMin

ROWS = 300
ALL = np.arange(ROWS, dtype=np.int64)
ids = st.lists(st.integers(-2, ROWS + 2), max_size=80)
units = st.one_of(st.integers(0, 2**18), st.integers(2**30 - 2, 2**33))
batches = st.lists(st.tuples(ids, units), max_size=8)


class Reference:
    """Counts one access at a time, cell by cell, with Python integers."""

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


def test_a_cell_saturates_and_never_wraps():
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
        # Room for a single block, so that each call counts one block.
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
