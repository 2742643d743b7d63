"""Exact choices within slots of ranks and among the few rows that prices leave in doubt; the Lagrangian bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.core.placement import RankLayout, Tier
from flexd.planner.solver import assign
from flexd.planner.solver.assign import (
    FREE,
    Assignment,
    GroupLimits,
    best_core,
    best_price,
    best_within_slots,
    single_tier_bound,
)


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


LAYOUTS = [RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 3), RankLayout(3, 1)]
BOTH = (Tier.NODE, Tier.DEVICE)


def gains_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    """float64[3, n]: skewed, DEVICE above NODE for some rows, below for others, some tiers closed."""
    node = rng.pareto(1.0, rows) - 0.1
    gains = np.stack([np.zeros(rows), node, node * rng.uniform(0.5, 4.0, rows)])
    gains[1:][rng.random((2, rows)) < 0.1] = -np.inf
    return gains


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(LAYOUTS))
def test_against_brute_force(seed: int, layout: RankLayout) -> None:
    rng, rows = np.random.default_rng(seed), 6
    keys = np.sort(rng.choice(40, rows, replace=False)).astype(np.int64)
    gains = gains_of(rng, rows)
    slots = rng.integers(0, 5, layout.world_size)
    best = 0.0
    for each in itertools.product(Tier, repeat=rows):
        tiers = np.array(each, np.uint8)
        if (layout.replica_slots_used(keys, tiers) <= slots).all():
            best = max(best, float(gains[tiers, np.arange(rows)].sum()))
    found = best_core(layout, keys, gains, slots)
    assert found is not None
    tiers, most = found
    assert (layout.replica_slots_used(keys, tiers) <= slots).all()
    assert gains[tiers, np.arange(rows)].sum() == pytest.approx(best, rel=1e-9)
    assert best * (1 - 1e-12) <= most <= best * (1 + 1e-6)


@pytest.mark.parametrize("core", [24, 60])
def test_more_rows_than_the_core_takes(monkeypatch: pytest.MonkeyPatch, core: int) -> None:
    better = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        keys = np.sort(rng.choice(1200, 300, replace=False)).astype(np.int64)
        gains = gains_of(rng, 300)
        limits = GroupLimits(rng.integers(5, 15, 6), np.full(300, FREE, np.uint8))
        problem = Assignment(RankLayout(3, 2), keys, gains, limits, BOTH)
        monkeypatch.setattr(assign, "_MAX_CORE_ROWS", core)
        tiers, bound = problem.best(gains)
        monkeypatch.setattr(assign, "_MAX_CORE_ROWS", 0)
        plain, plain_bound = problem.best(gains)
        ours, without = (float(gains[each, np.arange(300)].sum()) for each in (tiers, plain))
        assert limits.fits(keys, tiers, RankLayout(3, 2))
        assert without <= ours <= bound
        assert bound == pytest.approx(plain_bound), "a core says nothing about all the rows"
        better += without < ours
        # The order of the rows is no matter.
        order = rng.permutation(300)
        monkeypatch.setattr(assign, "_MAX_CORE_ROWS", core)
        again, _ = Assignment(RankLayout(3, 2), keys[order], gains[:, order], limits, BOTH).best(gains[:, order])
        assert gains[tiers, np.arange(300)].sum() == pytest.approx(gains[:, order][again, np.arange(300)].sum())
    assert better >= 1
