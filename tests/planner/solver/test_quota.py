"""The exact choice under per-rank slots, against every subset."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.planner.solver.exact import best_within_slots


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
