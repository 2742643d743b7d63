"""Dense counters against plain counting; curves read from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import TableSpec
from flexd.sketch import dense_table
from flexd.sketch.dense_table import CARRY_BITS, DenseTable, enumerate_rows
from flexd.sketch.sketch_set import SketchSet, choose
from flexd.sketch.table_sketch import SketchSettings
from tests.support.saved_sketches import counter_bytes

ROWS = 50


def dense(rows: int) -> DenseTable:
    spec = TableSpec("t", rows, 4)
    return DenseTable(spec, choose([spec], 2**30, 1)[0], 0)


ids = st.lists(st.integers(-3, ROWS + 3), max_size=200)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(ids, st.integers(0, 2**19)), max_size=6),
    st.sampled_from([np.int32, np.int64]),
    st.integers(0, 2**CARRY_BITS - 1),
)
def test_dense_equals_exact_counting_across_the_carry(batches, dtype, head_start):
    counter = dense(ROWS)
    # As after a long stream: some rows are just below the word's end.
    counter._low[::2] = head_start
    exact = np.zeros(ROWS, dtype=object)
    exact[::2] = head_start
    for batch, units in batches:
        rows = np.array(batch, dtype=dtype)
        np.add.at(exact, rows[(rows >= 0) & (rows < ROWS)], units)
        negative, outside = counter.add_units(rows, units)
        assert (negative, outside) == (int((rows < 0).sum()), int((rows >= ROWS).sum()))
    assert counter.row_units(np.arange(ROWS)).tolist() == exact.tolist()


def test_dense_with_more_carries_than_the_buffer_holds(monkeypatch):
    rows = 3 * dense_table._PENDING_CARRIES
    counter = dense(rows)
    counter._low[:] = 2**31 - 1
    counter.add_units(np.arange(rows, dtype=np.int32), 1)
    counter.add_units(np.arange(rows, dtype=np.int32), 5)
    assert set(counter.row_units(np.arange(rows)).tolist()) == {2**31 + 5}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=4, max_size=4), st.integers(1, 70))
def test_dense_rescale_is_to_the_nearest_unit(units, bits):
    counter = dense(4)
    counter._set_high(np.arange(4), np.array(units, dtype=np.int64))
    counter.rescale(bits)
    for got, before in zip(counter.row_units(np.arange(4)).tolist(), units, strict=True):
        assert abs(got * 2**bits - before) <= 2**bits // 2


def test_heavy_decayed_tables_get_a_coarser_unit_instead_of_more_memory():
    rows = 200_000
    sketches = SketchSet([TableSpec("heavy", rows, 4)], SketchSettings(3 * 2**19, 1000.0, 1e9, 10))
    sketches.ingest("heavy", np.zeros(1, dtype=np.int32), 0, 1.7e9)
    # As after a long stream; counting up to here would take billions of accesses.
    counter = sketches._tables["heavy"].sketch
    unit = sketches._decay.unit_weight(counter.exponent)
    counter._low[:] = 2**31 - 1
    largest = 0
    for _ in range(4):
        for start in range(0, rows, 5000):
            sketches.ingest("heavy", np.arange(start, start + 5000, dtype=np.int64), 0, 1.7e9)
            largest = max(largest, counter_bytes(sketches))
    got = sketches.query("heavy", np.arange(rows))
    assert np.allclose(got, 2**31 * unit + 4, atol=1e-2)
    assert largest <= sketches.choices()[0].bytes
    assert sketches.profile().tables[0].weight == pytest.approx(got.sum())


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**31 - 1)), min_size=1, max_size=60),
    st.integers(0, 5),
    st.one_of(st.integers(1, 10), st.just(100)),
)
def test_a_curve_lists_the_hottest_rows_and_accounts_for_the_rest(low, spilled, max_hot):
    low = np.array(low, dtype=np.uint32)
    high_rows = np.arange(min(spilled, len(low)), dtype=np.int64)
    low[high_rows] = 0
    high_units = (2**31 + 10 * high_rows).astype(np.int64)
    hot_rows, hot_units, bin_units, bin_rows, distinct = enumerate_rows(low, high_rows, high_units, max_hot)
    exact = low.astype(np.int64)
    exact[high_rows] = high_units
    listed = np.lexsort((np.arange(len(low)), -exact))[: min(max_hot, int((exact > 0).sum()))]
    assert hot_units.tolist() == exact[listed].tolist()
    assert exact[hot_rows].tolist() == exact[listed].tolist()
    assert len(set(hot_rows.tolist())) == len(listed)
    assert distinct == (exact > 0).sum()
    assert bin_rows.sum() == (exact > 0).sum() - len(listed)
    assert (bin_rows * bin_units).sum() + hot_units.sum() == pytest.approx(exact.sum())
    assert (np.diff(bin_units) <= 0).all()
    rest = np.delete(exact, listed)
    for row_units in rest[rest > 0]:
        assert np.abs(bin_units / row_units - 1).min() <= 0.125
