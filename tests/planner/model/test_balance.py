"""Bytes of every rank: their mean is the mean cost, and the busiest rank counts in its busier direction."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.balance import RankBytes, rank_bytes, sums_by_home
from flexd.planner.model.row_bytes import Exchange, Phase, TrafficLink, byte_factors
from flexd.planner.model.workload import PER_RANK, STATISTICS
from tests.support.planner_cases import load

LAYOUTS = [RankLayout(3, 2), RankLayout(1, 4), RankLayout(4, 1), RankLayout(2, 3)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.nodes}x{layout.local_ranks}")
@pytest.mark.parametrize("exchange", list(Exchange), ids=lambda each: each.value)
def test_the_mean_over_the_ranks_is_the_factors_of_the_exchange(layout: RankLayout, exchange: Exchange) -> None:
    rng = np.random.default_rng(0)
    problem = load(rng.pareto(1.0, 40), rng.choice(300, 40, replace=False).astype(np.int64))
    tiers = rng.integers(0, 3, 40).astype(np.uint8)
    tiers[tiers == Tier.NODE] *= layout.nodes > 1
    if layout.local_ranks == 1:
        tiers[tiers == Tier.DEVICE] = Tier.NODE
    statistics, even = problem.listed_statistics(layout), rng.uniform(0, 1, (3, STATISTICS))
    even[1:] = 0
    factors = byte_factors(layout, 64, exchange)
    by_home = sums_by_home(statistics, tiers, layout.home_rank(problem.keys), even, layout, range(STATISTICS))
    ranks = rank_bytes(by_home, factors, layout, exchange)
    np.testing.assert_allclose(by_home.sum(axis=(0, 2)), statistics.sum(axis=1) + even.sum(axis=0))
    expected = np.einsum("tpls,ts->tpl", factors, by_home.sum(axis=2))
    links = slice(TrafficLink.INTRA_NODE, None)
    for each in (ranks.sent, ranks.received):
        np.testing.assert_allclose(each.mean(axis=3)[..., links], expected[..., links], atol=1e-9)


def test_the_busier_direction_of_the_busiest_rank_counts() -> None:
    sent, received = np.zeros((2, 3, 6, 3, 4))
    at = (Phase.FORWARD_ROWS, TrafficLink.INTER_NODE)
    sent[Tier.HOME, *at] = [1, 2, 3, 4]
    received[Tier.HOME, *at] = [9, 1, 1, 1]
    sent[Tier.NODE, *at] = [0, 0, 0, 7]
    busiest = RankBytes(sent, received).busiest()
    assert busiest[Tier.HOME, *at] == 4, "rank 3 sends 11 in all, rank 0 receives 9"
    assert busiest[Tier.NODE, *at] == 7
    received[Tier.HOME, *at] = [20, 1, 1, 1]
    busiest = RankBytes(sent, received).busiest()
    assert busiest[Tier.HOME, *at] == 20
    assert busiest[Tier.NODE, *at] == 0
    double = RankBytes(sent, received) + RankBytes(sent, received)
    np.testing.assert_array_equal(double.busiest(), 2 * busiest)


def test_statistics_that_are_not_wanted_stay_zero() -> None:
    layout = RankLayout(2, 2)
    listed = np.ones((STATISTICS, 4))
    sums = sums_by_home(listed, np.zeros(4, np.uint8), np.arange(4), np.ones((3, STATISTICS)), layout, [PER_RANK])
    assert sums[Tier.HOME, PER_RANK].tolist() == [1.25] * 4
    assert np.delete(sums, PER_RANK, axis=1).sum() == 0
