"""The expected bytes of the cost model against counted bytes of drawn id sets."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import group_cost
from flexd.planner.model.row_bytes import ID_BYTES, Phase, TrafficLink
from tests.support.planner_cases import cluster, load, zipf

ROWS, ROW_BYTES, STEPS = 600, 96, 60


def count_chain(layout: RankLayout, tiers: np.ndarray, accesses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Bytes sent per rank by (tier, phase, link), counted as the running exchange sends them."""
    nodes, local, world = layout.nodes, layout.local_ranks, layout.world_size
    keys = np.arange(ROWS)
    home, owner = layout.home_rank(keys), keys % local
    counted = np.zeros((3, 6, 3))
    sets = rng.poisson(accesses, (nodes, local, ROWS)) > 0
    anywhere = sets.any(axis=(0, 1))
    is_tier = [tiers == t for t in Tier]

    def add(tier: int, phase: Phase, link: TrafficLink, count: float, size: float) -> None:
        counted[tier, phase, link] += count * size

    for node in range(nodes):
        asked_of_owner = np.zeros(ROWS, bool)
        for rank in range(local):
            mine = sets[node, rank]
            global_rank = layout.rank_of(node, rank)
            held = (home == global_rank) | layout.holds_replica(global_rank, keys, tiers)
            go = mine & ~held & (owner != rank)
            asked_of_owner |= mine & ~held
            for t in Tier:
                n = np.count_nonzero(go & is_tier[t])
                add(t, Phase.FORWARD_IDS, TrafficLink.INTRA_NODE, n, ID_BYTES)
                add(t, Phase.FORWARD_ROWS, TrafficLink.INTRA_NODE, n, ROW_BYTES)
                back = n if t != Tier.DEVICE else np.count_nonzero(mine & (owner != rank) & is_tier[t])
                add(t, Phase.BACKWARD_ROWS, TrafficLink.INTRA_NODE, back, ROW_BYTES)
                add(t, Phase.FORWARD_ROWS, TrafficLink.SELF, np.count_nonzero(mine & held & is_tier[t]), ROW_BYTES)
        owner_rank = node * local + owner
        at_owner = (home == owner_rank) | np.array(
            [layout.holds_replica(r, keys[i : i + 1], tiers[i : i + 1])[0] for i, r in enumerate(owner_rank)]
        )
        for t in Tier:
            n = np.count_nonzero(asked_of_owner & ~at_owner & is_tier[t])
            add(t, Phase.FORWARD_IDS, TrafficLink.INTER_NODE, n, ID_BYTES)
            add(t, Phase.FORWARD_ROWS, TrafficLink.INTER_NODE, n, ROW_BYTES)
            add(t, Phase.BACKWARD_ROWS, TrafficLink.INTER_NODE, n, ROW_BYTES)
    # An all-reduce of s bytes over g ranks sends 2 (g-1) s in all. The owner in each node tells its ranks the sums.
    for t in (Tier.NODE, Tier.DEVICE):
        touched = np.count_nonzero(anywhere & is_tier[t])
        add(t, Phase.SYNC_ROWS, TrafficLink.INTER_NODE, touched, 2 * (nodes - 1) * ROW_BYTES)
        add(t, Phase.SYNC_MASK, TrafficLink.INTER_NODE, is_tier[t].sum(), 2 * (nodes - 1) / 8)
        if t == Tier.DEVICE:
            add(t, Phase.SYNC_SUMS, TrafficLink.INTRA_NODE, touched, nodes * (local - 1) * ROW_BYTES)
            add(t, Phase.SYNC_MASK, TrafficLink.INTRA_NODE, is_tier[t].sum(), 2 * nodes * (local - 1) / 8)
    return counted / world


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(3, 2), RankLayout(1, 3), RankLayout(3, 1)], ids=str)
def test_chain_bytes(layout: RankLayout) -> None:
    rng = np.random.default_rng(layout.world_size)
    accesses = rng.permutation(zipf(ROWS, 0.8, 400.0))
    tiers = rng.integers(0, 3, ROWS).astype(np.uint8)
    if layout.nodes == 1:
        tiers[tiers == Tier.NODE] = Tier.HOME
    if layout.local_ranks == 1:
        tiers[tiers == Tier.DEVICE] = Tier.NODE
    counted = np.mean([count_chain(layout, tiers, accesses, rng) for _ in range(STEPS)], axis=0)
    problem = load(accesses, row_bytes=ROW_BYTES)
    expected = group_cost(problem, tiers, layout, cluster()).bytes
    assert counted.sum() > 0
    # 600 rows, 60 steps: rows' homes are a sample too, hence a few per cent.
    np.testing.assert_allclose(expected, counted, rtol=0.08, atol=ROW_BYTES * 0.3)
    assert expected.sum() == pytest.approx(counted.sum(), rel=0.015)
