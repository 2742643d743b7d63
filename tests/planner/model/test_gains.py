"""Gains of a row at each tier: equal to differences of whole costs, with bounds, migration and hysteresis."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.gains import decision_gains, migration_seconds, row_seconds, usable_tiers
from flexd.planner.model.row_bytes import Exchange
from flexd.topology.cluster import Cluster
from tests.support.planner_cases import cluster, group_cost, load

LAYOUT = RankLayout(3, 2)
SENT = np.zeros((3, 6, 3))
NONE = np.inf


@pytest.mark.parametrize("exchange", list(Exchange), ids=lambda each: each.value)
@pytest.mark.parametrize("intra", [0.5e9, 100e9], ids=["slow node", "fast node"])
@pytest.mark.parametrize("layout", [LAYOUT, RankLayout(1, 4), RankLayout(4, 1)], ids=["3x2", "1x4", "4x1"])
def test_a_gain_is_the_difference_of_two_whole_costs(layout: RankLayout, exchange: Exchange, intra: float) -> None:
    """Whichever link of a direct all-to-all is the slower one, and whatever else is at HOME."""
    problem, machine = load(np.random.default_rng(0).pareto(1.0, 30)), cluster(intra=intra)
    seconds = row_seconds(problem, layout, machine, SENT, exchange) @ problem.listed_statistics(layout)
    home = np.zeros(30, np.uint8)
    base = group_cost(problem, home, layout, machine, exchange).exposed_seconds
    for tier in usable_tiers(layout, exchange):
        every = np.full(30, tier, np.uint8)
        whole = group_cost(problem, every, layout, machine, exchange).exposed_seconds
        assert (seconds[Tier.HOME] - seconds[tier]).sum() == pytest.approx(base - whole, rel=1e-9)


def decided(
    accesses: float, live: Tier, *, error: float = 0.0, horizon: float = NONE, machine: Cluster | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """float64[tier] twice, of one row: gains to decide by, gains of the estimate."""
    sums = LoadSums(load(np.array([accesses]), relative_error=error), LAYOUT)
    live_tiers = np.array([live], np.uint8)
    decision, plain = decision_gains(sums, live_tiers, machine or cluster(), SENT, Exchange.CHAIN, horizon)
    return decision[:, 0], plain[:, 0]


def test_bounds_hold_where_a_gain_falls_with_the_accesses() -> None:
    """With two nodes the gain of NODE is largest between few and many accesses: neither bound alone is the worst."""
    slow = cluster(all_reduce=9e9)
    grid = [decided(a, Tier.HOME, machine=slow)[1][Tier.NODE] for a in (0.05, 0.2, 5.0)]
    assert min(grid[0], grid[1]) < grid[2]
    decision, plain = decided(0.2, Tier.HOME, error=0.75, machine=slow)
    low = decided(0.05, Tier.HOME, machine=slow)[1]
    assert low[Tier.NODE] > plain[Tier.NODE], "the estimate is below the gain at the lower bound"
    assert decision[Tier.NODE] == pytest.approx(plain[Tier.NODE])
    kept, _ = decided(0.2, Tier.NODE, error=0.75, machine=slow)
    assert kept[Tier.NODE] >= plain[Tier.NODE]


def test_a_further_copy_is_paid_for_and_the_first_is_not() -> None:
    decision, plain = decided(3.0, Tier.NODE, horizon=50.0)
    paid = migration_seconds(load(np.ones(1)), LAYOUT, cluster()) / 50.0
    np.testing.assert_allclose(decision[:2], plain[:2])
    assert decision[Tier.DEVICE] == pytest.approx(plain[Tier.DEVICE] - paid[Tier.DEVICE])
