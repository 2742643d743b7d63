"""FlexShard's rule: the best two cuts in the order of accesses, within a cap on memory in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import LoadSums
from flexd.planner.model.workload import GroupLoad
from flexd.simulate.flexshard_tiers import FlexShardTiers, _Cuts, _Problem, _Rows, flexshard_tiers
from flexd.topology.cluster import Cluster
from tests.support.planner_cases import cluster, load, zipf

LAYOUT = RankLayout(2, 2)
CLUSTER = cluster(latency=1e-7)
PLACES = np.arange(31)


SLOW_NODES = cluster(all_reduce=1e12, intra=1e9)
"""A copy in the node is worth little."""


def problem(cluster: Cluster, *loads: GroupLoad) -> _Problem:
    return _Problem(tuple(_Rows(LoadSums(each, LAYOUT), LAYOUT) for each in loads), LAYOUT, cluster)


def of(replica_bytes: float, *loads: GroupLoad) -> FlexShardTiers:
    return flexshard_tiers([LoadSums(each, LAYOUT) for each in loads], LAYOUT, CLUSTER, replica_bytes)


@pytest.mark.parametrize("on", [CLUSTER, SLOW_NODES], ids=["both tiers", "slow nodes"])
def test_cuts_are_the_best_of_all(on: Cluster) -> None:
    """Against every pair of cuts, to the saving of one row: rows are whole, the cuts of one price need not be."""
    rng = np.random.default_rng(0)
    mine = problem(on, load(np.sort(rng.pareto(1.0, 30))[::-1], rng.permutation(200)[:30]))
    (saved,) = mine.saved_seconds(mine.tiers([_Cuts(0.0, 0.0)]).cost, (Tier.NODE, Tier.DEVICE))
    size = mine.rows[0].copy_bytes
    both = 0
    for rows in (0, 1, 3, 7, 20, 60, 200):
        cap = rows * size[Tier.NODE]
        pairs = [(d, n) for n in range(31) for d in range(n + 1)]
        fitting = [(d, n) for d, n in pairs if size[Tier.DEVICE] * d + size[Tier.NODE] * (n - d) <= cap + 1e-9]
        best = max(saved[Tier.DEVICE, d] + saved[Tier.NODE, n] - saved[Tier.NODE, d] for d, n in fitting)
        (cuts,) = mine.best_cuts([saved], cap)
        assert mine._mean_bytes([cuts]) <= cap * (1 + 1e-9)
        got = np.interp(cuts.device, PLACES, saved[Tier.DEVICE] - saved[Tier.NODE])
        got += np.interp(cuts.end, PLACES, saved[Tier.NODE])
        one_row = np.diff(saved[1:]).max()
        assert best - one_row <= got <= best + one_row, rows
        assert cuts.device <= cuts.end
        both += 0 < cuts.device < cuts.end
    assert (both > 0) == (on is CLUSTER)


def test_replicas_fill_the_cap_of_the_fullest_rank_and_no_more() -> None:
    hot = load(zipf(3000, 1.1, 5e4), np.random.default_rng(1).permutation(9000)[:3000])
    free = of(1e9, hot)
    assert 0 < free.replica_bytes.max() < 1e9, "what does not pay is not copied"
    for part in (0.1, 0.5, 0.9):
        cap = part * float(free.replica_bytes.max())
        found = of(cap, hot)
        assert 0.97 * cap < found.replica_bytes.max() <= cap * (1 + 1e-9)
        used = LAYOUT.replica_slots_used(hot.keys, found.listed[0]) * hot.row_bytes
        assert (used == found.replica_bytes).all()
        assert free.cost.peak_exposed_seconds < found.cost.peak_exposed_seconds
