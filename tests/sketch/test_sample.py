"""The weighted sample of accesses."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.sketch.table_sketch import AccessSample


def test_sample_share_is_the_decayed_share_in_any_order():
    streams = [(0.0, 1), (np.log(8.0), 2)]

    def sampled(order: list[int], seed: int) -> AccessSample:
        sample = AccessSample(4000, seed)
        for part in order:
            log_weight, row = streams[part]
            for _ in range(100):
                sample.add(np.full(2000, row, dtype=np.int32), 0, log_weight, 10)
        return sample

    for sample in (sampled([0, 1], 1), sampled([1, 0], 2)):
        assert len(sample.rows()) <= 8000
        share = (sample.rows() == 2).mean()
        assert abs(share - 8 / 9) < 5 * np.sqrt(8 / 81 / 4000)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from([1, 7, 40, 1_000]), st.floats(-2.0, 2.0))
def test_sampled_keys_have_the_distribution_of_the_lowest(seed: int, capacity: int, log_weight: float) -> None:
    """Of n equal accesses the k-th lowest of n exponentials / weight is near k / n / weight, with and without jumps."""
    sample = AccessSample(capacity, seed)
    n = 40_000
    for start in range(0, n, 500):
        sample.add(np.arange(start, start + 500), 1, log_weight, n)
    rows = sample.rows()
    assert len(np.unique(rows)) == len(rows) <= 2 * capacity
    keys = np.sort(sample._keys[: len(rows)])
    assert (keys <= sample._limit).all()
    expected = len(rows) / n * np.exp(-log_weight)
    assert abs(np.exp(keys[-1]) / expected - 1) < 6 / np.sqrt(len(rows)) + 0.1 or len(rows) < 4
    if capacity == 1_000:
        # Every part of the stream is sampled equally.
        assert abs((rows < n / 4).mean() - 0.25) < 6 * np.sqrt(0.1875 / len(rows))
        draws = np.exp(keys) / np.exp(sample._limit)
        assert abs(draws.mean() - 0.5) < 6 / np.sqrt(12 * len(rows)) + 0.02
