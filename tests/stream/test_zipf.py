"""Zipf samples and the scatter bijection."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.stream.trace import ZipfSampler, scatter, scatter_multiplier


@pytest.mark.parametrize(
    ("ranks", "exponent"), [(1, 1.2), (2, 1.0), (10, 1.0), (50, 0.5), (1000, 1.05), (7, 3.0), (300, 1.0 + 1e-9)]
)
def test_zipf_has_its_distribution(ranks, exponent):
    count = 200_000
    sampled = ZipfSampler(ranks, exponent).sample(count, np.random.default_rng(7))
    weights = np.arange(1, ranks + 1) ** -exponent
    expected = count * weights / weights.sum()
    observed = np.bincount(sampled, minlength=ranks)
    assert len(observed) == ranks
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # Chi-square with ranks - 1 degrees of freedom: mean plus six standard deviations.
    assert statistic < (ranks - 1) + 6 * np.sqrt(2 * max(ranks - 1, 1))


def test_zipf_of_a_billion_ranks():
    sampled = ZipfSampler(10**9, 1.05).sample(100_000, np.random.default_rng(0))
    assert sampled.min() == 0
    assert 10**7 < sampled.max() < 10**9
    # P(rank 0) = 1 / H(1e9, 1.05); the sum by Euler-Maclaurin.
    harmonic = (1 - 1e9**-0.05) / 0.05 + 0.5 + 1.05 / 12
    assert abs((sampled == 0).mean() - 1 / harmonic) < 0.005


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 97, 1000, 2**16])
def test_scatter_is_a_bijection(rows):
    ids = scatter(np.arange(rows), rows, scatter_multiplier(rows))
    assert np.array_equal(np.sort(ids), np.arange(rows))
