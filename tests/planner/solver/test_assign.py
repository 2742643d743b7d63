"""The Lagrangian bound: never below the best choice, tight where slots may be shared, prices that use the slots."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.planner.solver.assign import best_price, single_tier_bound

NODE_SLOTS, DEVICE_SLOTS = 2.0, 5.0


def best_gain(node: np.ndarray, device: np.ndarray, slots: float) -> tuple[float, float]:
    """(most gain within all slots together, the Lagrangian dual by a grid of prices)."""
    gains, cost = np.stack([np.zeros(len(node)), node, device]), np.array([0.0, NODE_SLOTS, DEVICE_SLOTS])
    best = 0.0
    for tiers in itertools.product(range(3), repeat=len(node)):
        if cost[list(tiers)].sum() <= slots:
            best = max(best, float(gains[tiers, np.arange(len(node))].sum()))
    grid = np.unique(np.concatenate([[0.0], node / NODE_SLOTS, device / NODE_SLOTS]))
    grid = np.unique(np.concatenate([grid, np.linspace(0, grid.max(), 60)]))
    dual = min(float(price * slots + (gains - price * cost[:, None]).max(axis=0).sum()) for price in grid)
    return best, dual


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_bound_holds_and_is_the_least_dual(seed: int) -> None:
    rng = np.random.default_rng(seed)
    node = rng.pareto(1.0, 6)
    device = node * rng.uniform(0.5, 4.0, 6)
    slots = float(rng.integers(0, 25))
    price, bound = best_price(node, device, NODE_SLOTS, DEVICE_SLOTS, slots)
    best, dual = best_gain(node, device, slots)
    assert best <= bound * (1 + 1e-9) + 1e-12
    assert bound <= dual * (1 + 1e-6) + 1e-6 * device.max(), "no grid of prices gives a tighter bound"
    assert price >= 0


@pytest.mark.parametrize(("rows", "most"), [(0.0, 0.0), (1.0, 5.0), (1.5, 7.0), (2.25, 9.5), (3.0, 11.0), (9.0, 11.0)])
def test_the_last_row_of_a_single_tier_may_be_a_fraction(rows: float, most: float) -> None:
    assert single_tier_bound(np.array([2.0, -3.0, 5.0, 4.0]), rows) == pytest.approx(most)
