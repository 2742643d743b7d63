"""Count-min cells against a scalar reference; estimates, rescaling and noise against plain counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.sketch.counters import hashing
from flexd.sketch.counters.countmin import BLOCK_IDS, CountMin
from tests.support.count_min import cell_values

ROWS = 300
ALL = np.arange(ROWS, dtype=np.int64)
ids = st.lists(st.integers(-2, ROWS + 2), max_size=80)
units = st.one_of(st.integers(0, 2**18), st.integers(2**30 - 2, 2**33))
batches = st.lists(st.tuples(ids, units), max_size=8)


class Reference:
    """Counts one access at a time, cell by cell, with Python integers."""

    def __init__(self) -> None:
        self.cells, self.joined = [0] * 1024, [False] * 512
        position = np.empty((4, ROWS), np.uint32)
        hashing.cell_positions(ALL, ROWS, 8, position)
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


def _built(parts: list[tuple[list[int], int]]) -> CountMin:
    counter = CountMin(ROWS, 8)
    for rows, units in parts:
        _add(counter, rows, units)
    return counter


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 34))
def test_estimates_are_never_too_low_across_joined_pairs(parts, bits):
    exact, counter = _exact(parts), _built(parts)
    assert counter.total_units == sum(exact)
    assert (counter.query(ALL) >= exact).all()
    counter.rescale(bits)
    assert (counter.query(ALL).astype(object) * 2**bits >= exact).all()
    twin = CountMin(ROWS, 8)
    twin.load(counter.cells(), counter.total_units)
    assert twin.joined_share == counter.joined_share
    for rows, units in parts:
        _add(counter, rows, units)
    assert (counter.query(ALL).astype(object) >= exact).all()


def _count(counter: CountMin, rows: np.ndarray, units: int, registers: np.ndarray | None = None) -> tuple[int, int]:
    start, negative, outside = 0, 0, 0
    registers = np.zeros(16, dtype=np.uint8) if registers is None else registers
    while start < len(rows):
        candidates = np.empty(BLOCK_IDS, dtype=np.int64)
        start, below, beyond, _ = counter.add(rows, start, units, registers, 0, candidates, 0)
        negative += below
        outside += beyond
    return negative, outside


def test_count_min_error_stays_within_its_bound():
    random = np.random.default_rng(1)
    rows = 100_000
    accesses = (random.zipf(1.3, 300_000) % rows).astype(np.int32)
    exact = np.bincount(accesses, minlength=rows)
    counter = CountMin(rows, 12)
    _count(counter, accesses, 3)
    error = counter.query(np.arange(rows)) - 3 * exact
    assert error.min() >= 0
    over = (error > counter.error_share * counter.total_units).mean()
    assert over <= np.exp(-4)
    mean_noise, bound = counter.noise()
    assert 0 < mean_noise <= bound <= counter.error_share * counter.total_units
    assert (error > bound).mean() <= 2 * np.exp(-4)


def test_the_noise_bound_grows_with_the_share_of_joined_cells():
    """Half of the pairs of every row are joined and hold everything: absent rows have 4 / width of the total."""
    width, value = 1 << 12, 2**32
    random = np.random.default_rng(0)
    words = np.zeros((4, width // 2, 2), dtype=np.uint32)
    for row in words:
        row[random.permutation(width // 2)[: width // 4]] = 2**31, 2**31 | value >> 31
    counter = CountMin(10**6, 12)
    counter.load(words.reshape(-1), width // 4 * value)
    assert counter.joined_share == 0.5
    absent = counter.query(np.arange(2 * 10**6, 2 * 10**6 + 50_000))
    assert (absent == value).mean() == pytest.approx(1 / 16, abs=0.01)
    _, bound = counter.noise()
    assert counter.error_share * counter.total_units < value, "the bound without joined cells is too low here"
    assert bound == value
    assert (absent > bound).mean() <= np.exp(-4)


@settings(max_examples=60, deadline=None)
@given(batches)
def test_cells_are_those_of_the_reference_one_access_a_call(parts):
    reference, counter = Reference(), CountMin(ROWS, 8)
    for rows, units in parts:
        for row in rows:
            _add(counter, [row], units)
            if 0 <= row < ROWS:
                reference.add(row, units)
    assert cell_values(counter).reshape(-1).tolist() == reference.cells
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
    counter, found, start, seen = CountMin(ROWS, 8), [], 0, np.zeros(2, dtype=int)
    while start < length:
        # Room for a single block, so that each call counts one block.
        buffer = np.empty(BLOCK_IDS, dtype=np.int64)
        start, below, beyond, reported = counter.add(rows, start, 1, np.zeros(16, np.uint8), 0, buffer, 0)
        found += buffer[:reported].tolist()
        seen += below, beyond
    inside = rows[(rows >= 0) & (rows < ROWS)]
    assert seen.tolist() == [(rows < 0).sum(), (rows >= ROWS).sum()]
    assert counter.total_units == len(inside)
    assert (counter.query(ALL) >= np.bincount(inside, minlength=ROWS)).all()
    assert set(found) <= set(inside.tolist())
    # A row's first access is within the band, whatever was counted in its cells before, unless all four are taken.
    fresh = CountMin(ROWS, 16)
    buffer = np.empty(4 * BLOCK_IDS + length, dtype=np.int64)
    *_, reported = fresh.add(rows, 0, 1, np.zeros(16, np.uint8), 0, buffer, 0)
    assert set(buffer[:reported].tolist()) == set(inside.tolist())
