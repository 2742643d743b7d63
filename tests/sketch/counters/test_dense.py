"""Dense counters against plain counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.sketch.counters import dense as dense_module
from flexd.sketch.counters.dense import CARRY_BITS, DenseCounter

ROWS = 50
ids = st.lists(st.integers(-3, ROWS + 3), max_size=200)


def _exact(batches: list[tuple[list[int], int]]) -> np.ndarray:
    exact = np.zeros(ROWS, dtype=object)
    for batch, units in batches:
        for row in batch:
            if 0 <= row < ROWS:
                exact[row] += units
    return exact


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(ids, st.integers(0, 2**19)), max_size=6),
    st.sampled_from([np.int32, np.int64]),
    st.integers(0, 2**CARRY_BITS - 1),
)
def test_dense_equals_exact_counting_across_the_carry(batches, dtype, head_start):
    counter = DenseCounter(ROWS)
    # As after a long stream: some rows are just below the word's end.
    counter._low[::2] = head_start
    exact = _exact(batches)
    exact[::2] += head_start
    for batch, units in batches:
        rows = np.array(batch, dtype=dtype)
        negative, outside = counter.add(rows, units)
        assert (negative, outside) == (int((rows < 0).sum()), int((rows >= ROWS).sum()))
    assert counter.query(np.arange(ROWS)).tolist() == exact.tolist()


def test_dense_with_more_carries_than_the_buffer_holds(monkeypatch):
    rows = 3 * dense_module._PENDING_CARRIES
    counter = DenseCounter(rows)
    counter._low[:] = 2**31 - 1
    counter.add(np.arange(rows, dtype=np.int32), 1)
    counter.add(np.arange(rows, dtype=np.int32), 5)
    assert set(counter.query(np.arange(rows)).tolist()) == {2**31 + 5}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=4, max_size=4), st.integers(1, 70))
def test_dense_rescale_is_to_the_nearest_unit(units, bits):
    counter = DenseCounter(4)
    counter._set_high(np.arange(4), np.array(units, dtype=np.int64))
    counter.rescale(bits)
    for got, before in zip(counter.query(np.arange(4)).tolist(), units, strict=True):
        assert abs(got * 2**bits - before) <= 2**bits // 2


def test_dense_state_round_trip_and_damaged_state():
    counter = DenseCounter(ROWS)
    counter._low[:] = 2**31 - 2
    counter.add(np.arange(0, ROWS, 3, dtype=np.int32), 5)
    state = counter.state()
    twin = DenseCounter(ROWS)
    twin.load(state)
    assert np.array_equal(twin.query(np.arange(ROWS)), counter.query(np.arange(ROWS)))
    assert all(np.array_equal(twin.state()[name], array) for name, array in state.items())
    with pytest.raises(SketchError):
        DenseCounter(ROWS + 1).load(state)
    with pytest.raises(SketchError):
        DenseCounter(ROWS).load({**state, "high_rows": state["high_rows"][::-1].copy()})
