"""Logarithmic counters: unbiased, bounded, bit-equal on replay, merged, decayed, saved."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.core.tap_counts import LengthCounts, TableCounts, TapCounts
from flexd.sketch.counters.logarithmic import BASES, TOP_SHARE, LogCounter, level_values, packed_bytes, relative_error
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.weighted import ingest_counts

T0 = 1.7e9
ALL_BITS = sorted(BASES)


def _estimates(counter: LogCounter) -> np.ndarray:
    return counter.values[counter.levels(np.arange(counter.rows))]


def _mean_within(values: np.ndarray, expected: float) -> None:
    """Five standard errors."""
    assert abs(values.mean() - expected) <= 5 * values.std() / math.sqrt(len(values)) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL_BITS), st.integers(1, 300), st.integers(0, 2**32), st.booleans())
def test_levels_are_packed_without_touching_their_neighbours(bits, rows, seed, narrow):
    """Against one level a row in a plain array: 0 accesses of most rows, the first access of the others."""
    counter = LogCounter(rows, bits, 3)
    random = np.random.default_rng(seed)
    ids = random.permutation(np.arange(-3, rows + 4))[: rows // 2 + 1].astype(np.int32 if narrow else np.int64)
    negative, outside = counter.add(ids, 1)
    assert (negative, outside) == ((ids < 0).sum(), (ids >= rows).sum())
    inside = ids[(ids >= 0) & (ids < rows)]
    wanted = np.zeros(rows, dtype=np.uint8)
    wanted[inside] = 1
    levels = counter.levels(np.arange(rows))
    # The first step is as wide as one access, so it is always taken; a doubled step takes half of them back.
    assert np.array_equal(levels, wanted) if counter.step == 1 else (levels <= wanted).all()
    assert counter.histogram().tolist() == np.bincount(levels, minlength=1 << bits).tolist()
    assert counter.total_units == len(inside)
    assert counter.nbytes == packed_bytes(rows, bits)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize(("times", "units"), [(1, 1), (2, 1), (7, 1), (20, 1), (5, 3), (3, 70_000)])
def test_every_count_is_right_on_average(bits, times, units):
    rows = 20_000
    counter = LogCounter(64 * rows, bits, 1)
    for _ in range(times):
        counter.add(np.arange(rows), units)
    estimates = _estimates(counter)
    expected = times * units
    if level_values(bits)[-2] * counter.step > 4 * expected:
        _mean_within(estimates[:rows], expected)
        spread = estimates[:rows].std() / expected
        assert spread <= 1.1 * relative_error(bits)
    assert not estimates[rows:].any()
    assert counter.total_units == rows * expected


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_stated_error_of_a_level_is_the_error_of_counts_as_large(bits):
    rows, times = 40_000, 7
    counter = LogCounter(64 * rows, bits, 5)
    for _ in range(times):
        counter.add(np.arange(rows), 1)
    estimates = _estimates(counter)[:rows]
    errors = counter.level_errors(1, equal=True)
    stated = float(np.interp(times, counter.values, errors))
    assert estimates.std() / times == pytest.approx(stated, rel=0.15)
    assert errors[1] == 0, "one access is one step"
    assert errors[-1] <= 1.2 * relative_error(bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_doubled_step_keeps_the_mean_and_the_top_stays_rare(bits):
    rows = 20_000
    counter = LogCounter(rows, bits, 1)
    random = np.random.default_rng(0)
    for _ in range(120):
        counter.add(random.integers(0, rows, rows), 1)
    assert counter.top_rows == counter.histogram()[-1] <= rows * TOP_SHARE
    assert counter.step > 1 or bits != 3
    _mean_within(_estimates(counter), 120)
    before = _estimates(counter).mean()
    for _ in range(3):
        counter._relevel(2 * counter.step)
    assert _estimates(counter).mean() == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_weights_and_merging_are_right_on_average(bits):
    rows = 20_000
    a, b = LogCounter(64 * rows, bits, 1), LogCounter(64 * rows, bits, 2)
    a.add_weights(np.arange(rows), np.full(rows, 3.7), 3 * rows)
    a.add_weights(np.arange(rows), np.full(rows, 2.0), 2 * rows)
    b.add(np.arange(rows), 8)
    untouched = b.state()[1]["levels"]
    a.merge(b)
    _mean_within(_estimates(a)[:rows], 3.7 + 2 + 8)
    assert np.array_equal(b.state()[1]["levels"], untouched)
    assert a.total_units == 13 * rows
    with pytest.raises(SketchError):
        a.merge(LogCounter(rows, bits, 1))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL_BITS), st.integers(0, 2**32), st.integers(1, 6))
def test_a_restored_counter_goes_on_bit_by_bit(bits, seed, cut):
    random = np.random.default_rng(seed)
    batches = [random.zipf(1.2, 3000) % 5000 for _ in range(7)]
    whole, first = LogCounter(5000, bits, 9), LogCounter(5000, bits, 9)
    for ids in batches:
        whole.add(ids, 1)
    for ids in batches[:cut]:
        first.add(ids, 1)
    meta, arrays = first.state()
    second = LogCounter(5000, bits, 0)
    second.load(json.loads(json.dumps(meta)), arrays)
    for ids in batches[cut:]:
        second.add(ids, 1)
    for a, b in zip(whole.state(), second.state(), strict=True):
        assert a.keys() == b.keys()
    assert whole.state()[0] == second.state()[0]
    assert np.array_equal(whole.state()[1]["levels"], second.state()[1]["levels"])


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 4},
        {"step": "nan"},
        {"step": "-0x1p0"},
        {"total_units": -1},
        {"draws": "10000000000000000"},
        {"step": "0x0p0"},
    ],
)
def test_damaged_state_is_refused(change):
    counter = LogCounter(50, 3, 1)
    counter.add(np.arange(20), 1)
    meta, arrays = counter.state()
    with pytest.raises(SketchError):
        LogCounter(50, 3, 1).load({**meta, **change}, arrays)
    for levels in (arrays["levels"][:-1], arrays["levels"].astype(np.int16)):
        with pytest.raises(SketchError):
            LogCounter(50, 3, 1).load(meta, {"levels": levels})
    with pytest.raises(SketchError):
        LogCounter(50, 5, 1)


ROWS = 200_000
TABLE = [TableSpec("t", ROWS, 4)]


def _zipf_set(memory: int, half_life: float | None = None, max_hot_rows: int = 10**6, seed: int = 0):
    sketches = SketchSet(TABLE, memory, half_life, 1e9, max_hot_rows)
    assert sketches.choices()[0].kind == "logarithmic"
    random = np.random.default_rng(seed)
    exact = np.zeros(ROWS)
    for i in range(20):
        rows = random.permutation(ROWS)[:1] * 0 + random.zipf(1.15, 50_000) % ROWS
        sketches.ingest("t", rows, i % 4, T0 + 10 * i)
        weight = 1.0 if half_life is None else 2.0 ** ((10 * i - 190) / half_life)
        exact += weight * np.bincount(rows, minlength=ROWS)
    return sketches, exact


@pytest.mark.parametrize("half_life", [None, 60.0])
@pytest.mark.parametrize(("memory", "bits"), [(80_000, 3), (110_000, 4), (300_000, 8)])
def test_a_profile_lists_rows_that_exact_counts_would_list(memory, bits, half_life):
    sketches, exact = _zipf_set(memory, half_life)
    assert sketches.choices()[0].counter_bits == bits
    assert sketches.nbytes == sketches.choices()[0].bytes <= memory
    table = sketches.profile().tables[0]
    assert table.weight == pytest.approx(exact.sum(), rel=1e-3)
    assert table.hot_share.sum() + table.bin_share @ table.bin_rows <= 1 + 1e-9
    assert (np.diff(table.hot_share) <= 1e-12).all()
    assert (table.hot_lower <= table.hot_share).all()
    assert (table.hot_share <= table.hot_upper).all()
    assert len(np.unique(table.hot_rows)) == len(table.hot_rows) > 1000
    hottest = np.argsort(-exact)[:5]
    assert set(hottest.tolist()) <= set(table.hot_rows[: int(ROWS * TOP_SHARE)].tolist())
    estimates = sketches.query("t", np.arange(ROWS))
    listed = estimates[table.hot_rows] / max(estimates.sum(), table.weight)
    assert np.allclose(listed, table.hot_share, rtol=1e-6)
    # Half of the rows that are not at the top lie within the quartiles, or more where the low levels are exact.
    middle = (exact[table.hot_rows] > 0) & (table.hot_share < table.hot_share.max() / 100)
    share = exact[table.hot_rows] / exact.sum()
    within = (table.hot_lower <= share * 1.001) & (share * 0.999 <= table.hot_upper)
    assert within[middle].mean() > 0.3


def test_what_is_not_listed_is_in_bins():
    all_rows, _ = _zipf_set(80_000)
    few, _ = _zipf_set(80_000, max_hot_rows=100)
    a, b = all_rows.profile().tables[0], few.profile().tables[0]
    assert len(b.hot_rows) == 100
    assert np.allclose(b.hot_share, a.hot_share[:100])
    assert b.hot_share.sum() + b.bin_share @ b.bin_rows == pytest.approx(a.hot_share.sum() + a.bin_share @ a.bin_rows)
    assert b.bin_rows.sum() + 100 == len(a.hot_rows) == a.distinct_rows == b.distinct_rows


def test_rows_at_the_top_share_what_is_beyond_it_as_the_sample_says():
    sketches = SketchSet(TABLE, 90_000, None)
    rows = np.concatenate([np.full(60_000, 7), np.full(30_000, 8), np.arange(1000, 3000)])
    np.random.default_rng(0).shuffle(rows)
    sketches.ingest("t", rows, 0, T0)
    got = sketches.query("t", np.array([7, 8, 9]))
    assert got[:2] == pytest.approx([60_000, 30_000], rel=0.25)
    assert got[2] == 0
    assert sketches.profile().tables[0].hot_rows[:2].tolist() == [7, 8]


def test_an_idle_table_decays_by_the_formula_and_levels_stay():
    sketches, _ = _zipf_set(80_000, 60.0)
    before = sketches.query("t", np.arange(ROWS))
    levels = sketches.state()[1]["0/levels"]
    sketches.advance(T0 + 190 + 120)
    assert np.allclose(sketches.query("t", np.arange(ROWS)), before / 4)
    # Ten half-lives on, an access of another row makes the unit coarser: nothing is forgotten but by time.
    sketches.ingest("t", np.array([ROWS - 1]), 0, T0 + 190 + 600)
    later = sketches.state()[1]["0/levels"]
    assert (np.flatnonzero(levels != later) >= (ROWS - 1) * 3 // 8).all()
    below = np.flatnonzero(sketches._tables[0]._counter.levels(np.arange(ROWS - 1000)) < 7)
    assert len(below) > ROWS / 2
    assert np.allclose(sketches.query("t", below), before[below] / 2**10, rtol=1e-6)


def test_merged_sets_and_snapshots_are_one_stream():
    a, b = (SketchSet(TABLE, 80_000, 60.0, 1e9) for _ in range(2))
    touched = np.arange(ROWS // 2)
    for sketches, times, when in ((a, 2, T0), (b, 3, T0 + 180)):
        for _ in range(times):
            sketches.ingest("t", touched, 0, when)
    meta, arrays = b.state()
    b = SketchSet.from_state(TABLE, b.settings, json.loads(json.dumps(meta)), arrays)
    for first, second in ((copy.deepcopy(a), b), (copy.deepcopy(b), a)):
        first.merge(second)
        _mean_within(first.query("t", touched), 2 / 8 + 3)
        assert first.profile().tables[0].weight == pytest.approx((2 / 8 + 3) * len(touched), rel=1e-3)
        assert not first.query("t", np.arange(ROWS // 2, ROWS)).any()


def test_rows_near_the_top_are_not_cut_off_by_merging():
    rows = 20_000
    a, b = LogCounter(rows, 3, 1), LogCounter(rows, 3, 2)
    for counter in (a, b):
        for _ in range(12):
            counter.add(np.arange(rows // 4), 1)
    assert a.values[-1] < 24 * 1.5
    a.merge(b)
    assert _estimates(a)[: rows // 4].mean() == pytest.approx(24, rel=0.05)


def test_counts_of_a_tap_are_right_on_average():
    sketches = SketchSet(TABLE, 80_000, None)
    rows = np.arange(5_000)
    counts = TableCounts("t", rows, np.full(5_000, 9), LengthCounts.none())
    assert ingest_counts(sketches, TapCounts(0, T0, (counts,))).accepted == 45_000
    _mean_within(sketches.query("t", rows), 9)
    assert sketches.profile().tables[0].weight == 45_000
