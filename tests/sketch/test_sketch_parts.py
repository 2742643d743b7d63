"""Distinct rows, hot set, sample, quantiles, read-out, and the memory budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import budget
from flexd.sketch.counters.countmin import BLOCK_IDS, CountMin
from flexd.sketch.counters.hot_set import HotSet
from flexd.sketch.curve import enumerate_rows, tail_curve
from flexd.sketch.distinct import RELATIVE_STANDARD_ERROR, DistinctRows
from flexd.sketch.quantiles import KllQuantiles
from flexd.sketch.sample import AccessSample

NONE = np.empty(0, dtype=np.int64)


def _fill(counter: CountMin, distinct: DistinctRows, rows: np.ndarray, hot: HotSet | None = None) -> None:
    start = 0
    while start < len(rows):
        buffer = np.empty(len(rows) + BLOCK_IDS, dtype=np.int64) if hot is None else hot.buffer
        taken = 0 if hot is None else hot.buffered
        threshold = 2**62 if hot is None else hot.threshold
        start, _, _, taken = counter.add(rows, start, 1, distinct.registers, threshold, buffer, taken)
        if hot is not None:
            hot.buffered = taken
            hot.absorb(counter.query)


@pytest.mark.parametrize("rows", [0, 1, 10, 1000, 30_000, 1_000_000])
def test_distinct_rows_within_its_error(rows):
    distinct, half = DistinctRows(), DistinctRows()
    ids = np.arange(rows, dtype=np.int64) * 7919 + 13
    for _ in range(2):
        _fill(CountMin(2**40, 8), distinct, ids)
    assert abs(distinct.estimate() - rows) <= 5 * RELATIVE_STANDARD_ERROR * rows
    _fill(CountMin(2**40, 8), half, ids[::2])
    other = DistinctRows()
    _fill(CountMin(2**40, 8), other, ids[1::2])
    half.merge(other)
    assert np.array_equal(half.registers, distinct.registers)


def test_distinct_rows_over_many_id_sets_is_unbiased():
    estimates = []
    for seed in range(40):
        distinct = DistinctRows()
        _fill(CountMin(2**40, 8), distinct, np.arange(20_000, dtype=np.int64) + seed * 10**7)
        estimates.append(distinct.estimate() / 20_000 - 1)
    assert abs(np.mean(estimates)) < 4 * RELATIVE_STANDARD_ERROR / np.sqrt(40)
    assert 0.5 < np.std(estimates) / RELATIVE_STANDARD_ERROR < 1.6


def test_hot_set_finds_the_hot_rows_of_a_skewed_stream_and_stays_bounded():
    random = np.random.default_rng(3)
    rows = 200_000
    weights = 1 / np.arange(1, rows + 1) ** 1.05
    names = random.permutation(rows)
    hot, counter = HotSet(2000), CountMin(rows, 16)
    seen = np.zeros(rows, dtype=np.int64)
    for _ in range(40):
        batch = names[np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(20_000))]
        seen += np.bincount(batch, minlength=rows)
        _fill(counter, DistinctRows(), batch, hot)
        assert len(hot.rows()) <= 2 * hot.capacity + len(hot.buffer)
    hot.absorb(counter.query)
    assert np.isin(np.argsort(-seen)[:1000], hot.rows()).all()
    assert np.isin(np.argsort(-seen)[:2000], hot.rows()).mean() > 0.95


def test_hot_set_follows_drift():
    hot, counter = HotSet(100), CountMin(10_000, 12)
    for first in (0, 5000):
        for _ in range(50):
            _fill(counter, DistinctRows(), np.arange(first, first + 300, dtype=np.int32), hot)
        counter.rescale(6)
        hot.rescale(6)
    _fill(counter, DistinctRows(), np.tile(np.arange(5000, 5100, dtype=np.int32), 60), hot)
    hot.absorb(counter.query)
    assert np.isin(np.arange(5000, 5100), hot.rows()).all()


def test_hot_set_admits_by_the_rescaled_threshold():
    hot, counter = HotSet(100), CountMin(10_000, 14)
    _fill(counter, DistinctRows(), np.repeat(np.arange(300, dtype=np.int64), 64), hot)
    hot.absorb(counter.query)
    assert hot.threshold >= 64
    counter.rescale(5)
    hot.rescale(5)
    _fill(counter, DistinctRows(), np.full(5, 9999, dtype=np.int64), hot)
    hot.absorb(counter.query)
    assert 9999 in hot.rows().tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 500)), st.lists(st.integers(0, 500)))
def test_hot_set_admits_each_row_once(first, second):
    hot = HotSet(1000)
    for rows in (first, second):
        hot._admit(np.unique(np.array(rows, dtype=np.int64)))
    assert hot.rows().tolist() == sorted(set(first) | set(second))


def test_sample_share_is_the_decayed_share_in_any_order_and_merged():
    streams = [(0.0, 1), (np.log(8.0), 2)]

    def sampled(order: list[int], seed: int) -> AccessSample:
        sample = AccessSample(4000, seed)
        for part in order:
            log_weight, row = streams[part]
            for _ in range(100):
                sample.add(np.full(2000, row, dtype=np.int32), 0, log_weight, 10)
        return sample

    merged = sampled([0], 5)
    merged.merge(sampled([1], 6))
    for sample in (sampled([0, 1], 1), sampled([1, 0], 2), merged):
        assert len(sample.rows()) <= 8000
        share = (sample.rows() == 2).mean()
        assert abs(share - 8 / 9) < 5 * np.sqrt(8 / 81 / 4000)


def test_sample_is_repeatable_and_resumes_bit_by_bit():
    batches = [np.random.default_rng(i).integers(-5, 300, 777).astype(np.int32) for i in range(30)]
    whole, first = AccessSample(50, 9), AccessSample(50, 9)
    for batch in batches:
        whole.add(batch, int(batch[0]), 0.1, 290)
    for batch in batches[:13]:
        first.add(batch, int(batch[0]), 0.1, 290)
    meta, arrays = first.state()
    resumed = AccessSample(50, 0)
    resumed.load(meta, arrays, 290)
    for batch in batches[13:]:
        resumed.add(batch, int(batch[0]), 0.1, 290)
    assert np.array_equal(resumed._keys, whole._keys)
    assert np.array_equal(resumed.rows(), whole.rows())
    assert np.array_equal(resumed.source_ranks(), whole.source_ranks())
    assert resumed._gap == whole._gap
    assert whole.rows().min() >= 0
    assert whole.rows().max() < 290


def test_kll_takes_arrays_in_bulk_and_not_as_one_item():
    lengths = KllQuantiles()
    lengths.add(np.arange(10_001, dtype=np.int32))
    assert lengths.count == 10_001
    got = lengths.quantiles([0.1, 0.5, 0.9])
    assert np.allclose(got / 10_000, [0.1, 0.5, 0.9], atol=2 * lengths.rank_error)
    twin = KllQuantiles()
    twin.load(lengths.serialized())
    assert np.array_equal(twin.serialized(), lengths.serialized())
    with pytest.raises(SketchError):
        lengths.add(np.array([["a"]]))
    with pytest.raises(SketchError):
        twin.load(lengths.serialized()[:9])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**31 - 1)), min_size=1, max_size=60),
    st.integers(0, 5),
    st.one_of(st.integers(1, 10), st.just(100)),
)
def test_read_out_lists_the_hottest_rows_and_accounts_for_the_rest(low, spilled, max_hot):
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


def test_read_out_of_nothing():
    curve = enumerate_rows(np.zeros(5, dtype=np.uint32), NONE, NONE, 3)
    assert (len(curve.hot_rows), len(curve.bin_rows), curve.total_units) == (0, 0, 0.0)


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


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=30),
    st.integers(2**16, 2**32),
    st.sampled_from([1, 1000, 10**6]),
    st.booleans(),
)
def test_budget_is_kept_and_small_tables_are_exact_first(rows, memory, max_hot, logarithmic):
    tables = [TableSpec(f"t{i}", n, 4) for i, n in enumerate(rows)]
    try:
        choices = budget.choose(tables, memory, max_hot, logarithmic=logarithmic)
    except SketchError:
        fewest = [min(budget._dense_bytes(t), budget._count_min_bytes(t, 8, max_hot)) for t in tables]
        if logarithmic:
            fewest = [min(least, budget._log_bytes(t, 3)) for least, t in zip(fewest, tables, strict=True)]
        narrowest = sum(fewest)
        assert narrowest > memory
        return
    assert sum(choice.bytes for choice in choices) <= memory
    dense = [table.rows for table, choice in zip(tables, choices, strict=True) if choice.kind == "dense"]
    sketched = [table.rows for table, choice in zip(tables, choices, strict=True) if choice.kind != "dense"]
    assert not dense or not sketched or max(dense) <= min(sketched)
    for table, choice in zip(tables, choices, strict=True):
        assert (choice.error_share > 0) == (choice.kind == "count_min") == (choice.log2_width > 0)
        assert (choice.relative_error > 0) == (choice.kind == "logarithmic") == (choice.counter_bits > 0)
        assert logarithmic or choice.kind != "logarithmic"
        # A sketch larger than exact counters would be absurd, but for the narrowest one.
        assert choice.kind != "count_min" or choice.log2_width == 8 or choice.bytes <= budget._dense_bytes(table)
    # No table has a counter for every row while a smaller one that would take less has none.
    bits = [choice.counter_bits or 32 * (choice.kind == "dense") for choice in choices]
    without = [table.rows for table, size in zip(tables, bits, strict=True) if not size]
    logs = [table.rows for table, choice in zip(tables, choices, strict=True) if choice.counter_bits]
    assert not without or not logs or max(logs) <= min(without)


def test_a_billion_rows_fit_the_default_budget():
    (choice,) = budget.choose([TableSpec("huge", 10**9, 4)], 512 * 2**20, 10**6)
    assert (choice.kind, choice.counter_bits) == ("logarithmic", 4)
    assert 500_000_001 < choice.bytes <= 512 * 2**20
    (choice,) = budget.choose([TableSpec("huge", 10**9, 4)], 350_000_000, 10**6)
    assert choice.kind == "count_min"
    assert choice.log2_width >= 23
    assert choice.hot_rows == 10**6
