"""The loops of the logarithmic counters: packed levels, unbiased rounding."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.sketch.counters.logarithmic import BASES, LogCounter, level_values, packed_bytes, relative_error

ALL_BITS = sorted(BASES)


def _estimates(counter: LogCounter) -> np.ndarray:
    return counter.values[counter.levels(np.arange(counter.rows))]


def _mean_within(values: np.ndarray, expected: float) -> None:
    """Assert that the mean is within five standard errors of ``expected``."""
    assert abs(values.mean() - expected) <= 5 * values.std() / math.sqrt(len(values)) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL_BITS), st.integers(1, 300), st.integers(0, 2**32), st.booleans())
def test_levels_are_packed_without_touching_their_neighbours(bits, rows, seed, narrow):
    """Compare with a plain array of levels after one access of half of the rows."""
    counter = LogCounter(rows, bits, 3)
    random = np.random.default_rng(seed)
    ids = random.permutation(np.arange(-3, rows + 4))[: rows // 2 + 1].astype(np.int32 if narrow else np.int64)
    negative, outside = counter.add(ids, 1)
    assert (negative, outside) == ((ids < 0).sum(), (ids >= rows).sum())
    inside = ids[(ids >= 0) & (ids < rows)]
    wanted = np.zeros(rows, dtype=np.uint8)
    wanted[inside] = 1
    levels = counter.levels(np.arange(rows))
    # The first step is as wide as one access, so it is always reached; doubling the step takes half of them back.
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
