"""Frequency curves read from counters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.sketch.curve import enumerate_rows


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
    curve = enumerate_rows(low, high_rows, high_units, max_hot)
    exact = low.astype(np.int64)
    exact[high_rows] = high_units
    order = np.lexsort((np.arange(len(low)), -exact))
    listed = order[: min(max_hot, int((exact > 0).sum()))]
    assert curve.hot_units.tolist() == exact[listed].tolist()
    assert exact[curve.hot_rows].tolist() == exact[listed].tolist()
    assert len(set(curve.hot_rows.tolist())) == len(listed)
    assert curve.total_units == pytest.approx(exact.sum())
    assert curve.distinct_rows == (exact > 0).sum()
    assert curve.bin_rows.sum() == (exact > 0).sum() - len(listed)
    assert (curve.bin_rows * curve.bin_units).sum() + curve.hot_units.sum() == pytest.approx(exact.sum())
    assert (np.diff(curve.bin_units) <= 0).all()
    rest = np.delete(exact, listed)
    for row_units in rest[rest > 0]:
        assert np.abs(curve.bin_units / row_units - 1).min() <= 0.125
