"""Logarithmic counters: packed levels, unbiased rounding, steps, errors; profiles and decay."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.keyspace import TableSpec
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.logarithmic_table import BASES, TOP_SHARE, LogTable, level_values, packed_bytes, relative_error
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.table_sketch import SketchSettings, TableChoice

ALL_BITS = sorted(BASES)


def log_table(rows: int, bits: int, seed: int) -> LogTable:
    choice = TableChoice("t", "logarithmic", 0, 0.0, 0.0, 0, rows, 16, bits)
    return LogTable(TableSpec("t", rows, 4), choice, seed)


def _estimates(counter: LogTable) -> np.ndarray:
    return counter.values[counter.levels(np.arange(counter.spec.rows))]


def _mean_within(values: np.ndarray, expected: float) -> None:
    """Assert that the mean is within five standard errors of ``expected``."""
    assert abs(values.mean() - expected) <= 5 * values.std() / math.sqrt(len(values)) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL_BITS), st.integers(1, 300), st.integers(0, 2**32), st.booleans())
def test_levels_are_packed_without_touching_their_neighbours(bits, rows, seed, narrow):
    """Compare with a plain array of levels after one access of half of the rows."""
    counter = log_table(rows, bits, 3)
    random = np.random.default_rng(seed)
    ids = random.permutation(np.arange(-3, rows + 4))[: rows // 2 + 1].astype(np.int32 if narrow else np.int64)
    negative, outside = counter.add_units(ids, 1)
    assert (negative, outside) == ((ids < 0).sum(), (ids >= rows).sum())
    inside = ids[(ids >= 0) & (ids < rows)]
    wanted = np.zeros(rows, dtype=np.uint8)
    wanted[inside] = 1
    levels = counter.levels(np.arange(rows))
    # The first step is as wide as one access, so it is always reached; doubling the step takes half of them back.
    assert np.array_equal(levels, wanted) if counter.step == 1 else (levels <= wanted).all()
    assert counter.level_rows.tolist() == np.bincount(levels, minlength=1 << bits).tolist()
    assert (counter.total_units, counter._packed.nbytes) == (len(inside), packed_bytes(rows, bits))


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize(("times", "units"), [(1, 1), (2, 1), (7, 1), (20, 1), (5, 3), (3, 70_000)])
def test_every_count_is_right_on_average(bits, times, units):
    rows = 20_000
    counter = log_table(64 * rows, bits, 1)
    for _ in range(times):
        counter.add_units(np.arange(rows), units)
    estimates = _estimates(counter)
    expected = times * units
    if level_values(bits)[-2] * counter.step > 4 * expected:
        _mean_within(estimates[:rows], expected)
        assert estimates[:rows].std() / expected <= 1.1 * relative_error(bits)
    assert not estimates[rows:].any()
    assert counter.total_units == rows * expected


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_stated_error_of_a_level_is_the_error_of_counts_as_large(bits):
    rows, times = 40_000, 7
    counter = log_table(64 * rows, bits, 5)
    for _ in range(times):
        counter.add_units(np.arange(rows), 1)
    estimates = _estimates(counter)[:rows]
    counter.exponent = 0
    errors = counter._level_errors(ForwardDecay(None, 0.0))
    assert estimates.std() / times == pytest.approx(float(np.interp(times, counter.values, errors)), rel=0.15)
    assert errors[1] == 0, "one access is one step"
    assert errors[-1] <= 1.2 * relative_error(bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_doubled_step_keeps_the_mean_and_the_top_stays_rare(bits):
    rows = 20_000
    counter = log_table(rows, bits, 1)
    random = np.random.default_rng(0)
    for _ in range(120):
        counter.add_units(random.integers(0, rows, rows), 1)
    assert counter.level_rows[-1] <= rows * TOP_SHARE
    assert (counter.step > 1) == (level_values(bits)[-1] < 120)
    _mean_within(_estimates(counter), 120)
    for doubled in range(1, 4):
        values, step = _estimates(counter), counter.step
        counter._set_step(2 * step)
        assert counter.step == 2 * step
        after = _estimates(counter)
        # Every row lands on a level beside its old value, and rounding up or down balances.
        below = np.searchsorted(counter.values, values, side="right") - 1
        assert np.isin(after - counter.values[below], [0, *np.diff(counter.values)]).all()
        changes = after - values
        assert abs(changes.mean()) <= 5 * changes.std() / math.sqrt(rows) + 1e-9, doubled
        levels = counter.levels(np.arange(rows))
        assert counter.level_rows.tolist() == np.bincount(levels, minlength=1 << bits).tolist()
    assert counter.total_units == 120 * rows


@pytest.mark.parametrize("bits", ALL_BITS)
def test_accesses_after_the_step_has_doubled_within_one_call_have_their_weight(bits):
    rows, times = 500, 200
    units = max(1, int(level_values(bits)[-1] / 50))
    counter = log_table(rows, bits, 1)
    counter.add_units(np.array([rows - 1]), 1)
    counter.add_units(np.random.default_rng(0).permuted(np.tile(np.arange(rows - 1), times)), units)
    assert counter.step >= 4, "the step has doubled more than once"
    assert counter.level_rows[-1] <= rows * TOP_SHARE
    estimates = _estimates(counter)[: rows - 1]
    _mean_within(estimates, times * units)
    assert estimates.mean() == pytest.approx(times * units, rel=0.1)
    assert counter.total_units == (rows - 1) * times * units + 1


@pytest.mark.parametrize("bits", ALL_BITS)
def test_weights_are_right_on_average(bits):
    rows = 20_000
    a = log_table(64 * rows, bits, 1)
    a.add_weights(np.arange(rows), np.full(rows, 3.7), 3 * rows)
    a.add_weights(np.arange(rows), np.full(rows, 2.0), 2 * rows)
    _mean_within(_estimates(a)[:rows], 3.7 + 2)
    assert a.total_units == 5 * rows


T0 = 1.7e9


ROWS = 200_000
TABLE = [TableSpec("t", ROWS, 4)]


@pytest.mark.parametrize("half_life", [None, 60.0])
@pytest.mark.parametrize(("memory", "bits"), [(80_000, 3), (110_000, 4), (300_000, 8)])
def test_a_profile_lists_rows_that_exact_counts_would_list(memory, bits, half_life):
    sketches = SketchSet(TABLE, SketchSettings(memory, half_life, 1e9, 10**6))
    (choice,) = sketches.choices()
    assert (choice.kind, choice.counter_bits) == ("logarithmic", bits)
    assert choice.bytes <= memory
    random, exact = np.random.default_rng(0), np.zeros(ROWS)
    for i in range(20):
        rows = random.zipf(1.15, 50_000) % ROWS
        sketches.ingest("t", rows, i % 4, T0 + 10 * i)
        weight = 1.0 if half_life is None else 2.0 ** ((10 * i - 190) / half_life)
        exact += weight * np.bincount(rows, minlength=ROWS)
    table = sketches.profile().tables[0]
    assert table.weight == pytest.approx(exact.sum(), rel=1e-3)
    assert table.hot_share.sum() + table.bin_share @ table.bin_rows <= 1 + 1e-9
    assert (np.diff(table.hot_share) <= 1e-12).all()
    assert (table.hot_lower <= table.hot_share).all()
    assert (table.hot_share <= table.hot_upper).all()
    assert len(np.unique(table.hot_rows)) == len(table.hot_rows) > 1000
    assert set(np.argsort(-exact)[:5].tolist()) <= set(table.hot_rows[: int(ROWS * TOP_SHARE)].tolist())
    estimates = sketches.query("t", np.arange(ROWS))
    listed = estimates[table.hot_rows] / max(estimates.sum(), table.weight)
    assert np.allclose(listed, table.hot_share, rtol=1e-6)
    # Half of the rows that are not at the top lie within the quartiles, or more where the low levels are exact.
    middle = (exact[table.hot_rows] > 0) & (table.hot_share < table.hot_share.max() / 100)
    share = exact[table.hot_rows] / exact.sum()
    assert ((table.hot_lower <= share * 1.001) & (share * 0.999 <= table.hot_upper))[middle].mean() > 0.3


def test_rows_at_the_top_level_share_the_excess_in_proportion_to_the_sample():
    sketches = SketchSet(TABLE, SketchSettings(90_000, None))
    rows = np.concatenate([np.full(60_000, 7), np.full(30_000, 8), np.arange(1000, 3000)])
    np.random.default_rng(0).shuffle(rows)
    sketches.ingest("t", rows, 0, T0)
    got = sketches.query("t", np.array([7, 8, 9]))
    assert (got[:2], got[2]) == (pytest.approx([60_000, 30_000], rel=0.25), 0)
    assert sketches.profile().tables[0].hot_rows[:2].tolist() == [7, 8]
