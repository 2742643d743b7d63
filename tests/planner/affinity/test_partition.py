"""Homes learnt from a small window, against every division of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from flexd.planner.affinity.partition import (
    AffinityLimits,
    learn_homes,
)
from flexd.planner.affinity.window import RowCosts, SampleRows


def test_a_small_window_is_divided_as_well_as_an_exhaustive_search_divides_it():
    rng = np.random.default_rng(6)
    found = best = 0.0
    for _ in range(10):
        keys = rng.integers(0, 12, (10, 3))
        window = SampleRows.of(np.repeat(np.arange(10), 3), keys.reshape(-1))
        zero, rule = np.zeros(10, dtype=np.int64), np.zeros(len(window.keys), dtype=np.int64)
        limits = AffinityLimits(row_slack=9, load_slack=9)
        ones = np.ones(len(window.keys), dtype=np.float32)
        costs = RowCosts(ones, 0 * ones, ones)

        def crossing(left: tuple[int, ...], window: SampleRows = window) -> float:
            to = np.isin(np.arange(10), left).astype(np.int64)
            used = np.zeros((len(window.keys), 2), dtype=np.bool_)
            used[window.rows, to[window.samples]] = True
            return float((used.sum(axis=1) - 1).sum())

        best += min(crossing(left) for left in itertools.combinations(range(10), 5))
        found += min(
            learn_homes(window, zero, rule, 2, costs, replace(limits, seed=seed)).crossing for seed in range(8)
        )
    assert found <= 1.15 * best + 1e-3
