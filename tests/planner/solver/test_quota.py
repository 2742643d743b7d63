"""The exact choice under per-rank slots, against every subset."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.planner.solver.quota import best_within_slots


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 10), st.integers(2, 4), st.integers(0, 6))
def test_equals_the_best_subset(seed: int, rows: int, ranks: int, most_slots: int) -> None:
    rng = np.random.default_rng(seed)
    gains = rng.exponential(1.0, rows)
    homes = rng.integers(0, ranks, rows)
    slots = rng.integers(0, most_slots + 1, ranks)
    best = 0.0
    for subset in itertools.product((False, True), repeat=rows):
        chosen = np.array(subset)
        if (chosen.sum() - np.bincount(homes[chosen], minlength=ranks) <= slots).all():
            best = max(best, float(gains[chosen].sum()))
    chosen = best_within_slots(gains, homes, slots)
    assert (chosen.sum() - np.bincount(homes[chosen], minlength=ranks) <= slots).all()
    assert gains[chosen].sum() == pytest.approx(best)


def test_many_equal_gains_fill_the_slots() -> None:
    homes = np.arange(1000) % 4
    chosen = best_within_slots(np.ones(1000), homes, np.full(4, 300))
    assert chosen.sum() == 400
    assert chosen[:400].all()


def test_no_rows() -> None:
    assert len(best_within_slots(np.empty(0), np.empty(0, np.int64), np.array([3, 3]))) == 0
