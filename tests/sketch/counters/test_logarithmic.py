"""Logarithmic counters: packed levels, unbiased rounding, steps, errors, state, replay bit by bit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch.logarithmic_table import BASES, TOP_SHARE, LogTable, level_values, packed_bytes, relative_error
from flexd.sketch.types import TableChoice

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
    assert counter.histogram().tolist() == np.bincount(levels, minlength=1 << bits).tolist()
    assert counter.total_units == len(inside)
    assert counter.counter_bytes == packed_bytes(rows, bits)


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
        spread = estimates[:rows].std() / expected
        assert spread <= 1.1 * relative_error(bits)
    assert not estimates[rows:].any()
    assert counter.total_units == rows * expected


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_stated_error_of_a_level_is_the_error_of_counts_as_large(bits):
    rows, times = 40_000, 7
    counter = log_table(64 * rows, bits, 5)
    for _ in range(times):
        counter.add_units(np.arange(rows), 1)
    estimates = _estimates(counter)[:rows]
    errors = counter.level_errors(1, equal=True)
    stated = float(np.interp(times, counter.values, errors))
    assert estimates.std() / times == pytest.approx(stated, rel=0.15)
    assert errors[1] == 0, "one access is one step"
    assert errors[-1] <= 1.2 * relative_error(bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_doubled_step_keeps_the_mean_and_the_top_stays_rare(bits):
    rows = 20_000
    counter = log_table(rows, bits, 1)
    random = np.random.default_rng(0)
    for _ in range(120):
        counter.add_units(random.integers(0, rows, rows), 1)
    assert counter.top_rows == counter.histogram()[-1] <= rows * TOP_SHARE
    assert (counter.step > 1) == (level_values(bits)[-1] < 120)
    before = _estimates(counter)
    _mean_within(before, 120)
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
        assert (
            counter.histogram().tolist() == np.bincount(counter.levels(np.arange(rows)), minlength=1 << bits).tolist()
        )
    assert counter.total_units == 120 * rows


@pytest.mark.parametrize("bits", ALL_BITS)
def test_accesses_after_the_step_has_doubled_within_one_call_have_their_weight(bits):
    rows, times = 500, 200
    units = max(1, int(level_values(bits)[-1] / 50))
    counter = log_table(rows, bits, 1)
    counter.add_units(np.array([rows - 1]), 1)
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(rows - 1), times))
    counter.add_units(ids, units)
    assert counter.step >= 4, "the step has doubled more than once"
    assert counter.top_rows <= rows * TOP_SHARE
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


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL_BITS), st.integers(0, 2**32), st.integers(1, 6))
def test_a_restored_counter_continues_bit_by_bit(bits, seed, cut):
    random = np.random.default_rng(seed)
    batches = [random.zipf(1.2, 3000) % 5000 for _ in range(7)]
    whole, first = log_table(5000, bits, 9), log_table(5000, bits, 9)
    for ids in batches:
        whole.add_units(ids, 1)
    for ids in batches[:cut]:
        first.add_units(ids, 1)
    meta, arrays = first.state()
    second = log_table(5000, bits, 0)
    second.load(json.loads(json.dumps(meta)), arrays)
    for ids in batches[cut:]:
        second.add_units(ids, 1)
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
    counter = log_table(50, 3, 1)
    counter.add_units(np.arange(20), 1)
    meta, arrays = counter.state()
    with pytest.raises(SketchError):
        log_table(50, 3, 1).load({**meta, **change}, arrays)
    for levels in (arrays["levels"][:-1], arrays["levels"].astype(np.int16)):
        with pytest.raises(SketchError):
            log_table(50, 3, 1).load(meta, {**arrays, "levels": levels})
