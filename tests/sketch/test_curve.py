"""Frequency curves read from counters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.sketch.curve import enumerate_rows, tail_curve


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
