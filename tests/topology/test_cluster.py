"""Curves fitted to synthetic and to disturbed times."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.topology.cluster import CollectiveCurve, CollectiveTimes, fit_curve

SIZES = 1024.0 * 4.0 ** np.arange(9)


def times_of(seconds: np.ndarray, repeats: int = 1) -> CollectiveTimes:
    return CollectiveTimes(SIZES[: len(seconds)], tuple(np.full(repeats, value) for value in seconds))


def seconds_of(curve: CollectiveCurve) -> np.ndarray:
    return np.array([curve.seconds(size) for size in SIZES])


def largest_error(fitted: CollectiveCurve, true: CollectiveCurve, sizes: np.ndarray = SIZES) -> float:
    return max(abs(fitted.seconds(size) / true.seconds(size) - 1) for size in sizes)


@settings(deadline=None)
@given(st.floats(1e-7, 1e-2), st.floats(1e7, 4e11))
def test_a_constant_bandwidth_is_recovered_exactly(latency: float, bandwidth: float) -> None:
    true = CollectiveCurve(latency, ((1e6, bandwidth),))
    fitted = fit_curve(times_of(seconds_of(true)))
    assert largest_error(fitted, true, np.geomspace(64, SIZES[-1], 60)) < 0.06
    # Where all is latency, the bytes of a size beyond those measured are priced by the bound that they gave.
    assert largest_error(fitted, true, np.array([2 * SIZES[-1]])) < 0.11
    if SIZES[-1] / bandwidth > 0.1 * latency:  # else all of it is latency, and the bandwidth cannot be known
        assert fitted.latency_seconds == pytest.approx(latency, rel=1e-5, abs=1e-9)
        assert fitted.bandwidth(2**27) == pytest.approx(bandwidth, rel=1e-4)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_noise_and_outliers_change_the_fit_little(latency: float, bandwidth: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    true = CollectiveCurve(latency, ((1e6, bandwidth),))
    samples = []
    for seconds in seconds_of(true):
        noisy = seconds * (1 + 0.05 * rng.standard_normal(9).clip(-2, 2))
        noisy[rng.integers(9)] *= 50  # another process had the machine
        samples.append(noisy)
    fitted = fit_curve(CollectiveTimes(SIZES, tuple(samples)))
    assert largest_error(fitted, true) < 0.16


@settings(deadline=None)
@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=9))
def test_any_positive_times_give_a_valid_curve(seconds: list[float]) -> None:
    fitted = fit_curve(times_of(np.array(seconds)))
    fitted.check_points("curve")
    assert fitted.latency_seconds >= 0
    assert 0 <= fitted.latency_seconds <= min(seconds) * (1 + 1e-6)
    grid = [fitted.seconds(size) for size in np.geomspace(1, 2**30, 100)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(grid))
