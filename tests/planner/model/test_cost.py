"""Formulas of DESIGN section 6, prices, latencies and the baselines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.core.errors import PlanError
from flexd.core.layout import RankLayout, Tier
from flexd.planner.model.cost import LoadSums, joint_cost
from flexd.planner.model.row_bytes import Exchange, Phase, TrafficLink
from flexd.topology.cluster import Cluster, LinkModel
from tests.support.planner_cases import cluster, flat, group_cost, load

N, L, B, A = 3, 4, 128, 0.7
LAYOUT = RankLayout(N, L)
W = N * L
U, V, WW = 1 - np.exp(-A), 1 - np.exp(-L * A), 1 - np.exp(-W * A)


def rows_bytes(tier: Tier, exchange: Exchange = Exchange.CHAIN, *, narrow: bool = False) -> np.ndarray:
    """Bytes of row values by link, of one row at this tier, both directions and the sync."""
    problem = replace(load(np.array([A]), row_bytes=B), sums_at_home=narrow)
    cost = group_cost(problem, np.array([tier], np.uint8), LAYOUT, cluster(), exchange)
    phases = [Phase.FORWARD_ROWS, Phase.BACKWARD_ROWS, Phase.SYNC_ROWS, Phase.SYNC_SUMS]
    return cost.bytes[:, phases].sum(axis=(0, 1))


def test_the_table_of_the_design() -> None:
    hop2 = (N - 1) / N
    assert rows_bytes(Tier.HOME, Exchange.DIRECT_DEDUP)[1:] == pytest.approx(
        [2 * U * B * (L - 1) / W, 2 * U * B * (W - L) / W]
    )
    assert rows_bytes(Tier.HOME)[1:] == pytest.approx([2 * U * B * (L - 1) / L, 2 * V / L * B * hop2])
    assert rows_bytes(Tier.NODE)[1:] == pytest.approx([2 * U * B * (L - 1) / L, 2 * WW / L * B * hop2])
    assert rows_bytes(Tier.DEVICE)[1:] == pytest.approx([(U + WW) * B * (L - 1) / L, 2 * WW / L * B * hop2])
    # Gradients that are not added as they travel go by way of the home.
    assert rows_bytes(Tier.NODE, narrow=True)[1:] == pytest.approx([2 * U * B * (L - 1) / L, (V + WW) / L * B * hop2])
    assert rows_bytes(Tier.DEVICE, narrow=True)[1:] == pytest.approx(
        [(U + WW) * B * (L - 1) / L, (V + WW) / L * B * hop2]
    )
    assert rows_bytes(Tier.DEVICE, Exchange.DIRECT_DEDUP)[1:] == pytest.approx(
        [(U + WW) * B * (L - 1) / W, (U + WW) * B * (W - L) / W]
    )
    assert rows_bytes(Tier.DEVICE)[TrafficLink.SELF] == pytest.approx(U * B)


def test_seconds_are_bytes_at_the_collective_of_the_item() -> None:
    machine = Cluster(
        "m", "s", LinkModel(9e9, flat(1e9), flat(2e9), flat(3e9)), LinkModel(9e9, flat(4e9), flat(5e9), flat(6e9))
    )
    accesses = load(np.full(3, A), row_bytes=B)
    cost = group_cost(accesses, np.array([0, 1, 2], np.uint8), LAYOUT, machine)
    speed = np.divide(cost.bytes, cost.transfer_seconds, out=np.zeros((3, 6, 3)), where=cost.transfer_seconds > 0)
    assert speed[Tier.HOME, :3, TrafficLink.INTRA_NODE] == pytest.approx([1e9] * 3)
    assert speed[Tier.HOME, :3, TrafficLink.INTER_NODE] == pytest.approx([4e9] * 3)
    for tier in (Tier.NODE, Tier.DEVICE):
        assert speed[tier, 3:, TrafficLink.INTER_NODE] == pytest.approx([4e9, 5e9, 0.0])
    assert speed[Tier.DEVICE, 3:, TrafficLink.INTRA_NODE] == pytest.approx([1e9, 0.0, 1e9])
    narrow = group_cost(replace(accesses, sums_at_home=True), np.array([0, 1, 2], np.uint8), LAYOUT, machine)
    sums = (slice(None), Phase.SYNC_SUMS, TrafficLink.INTER_NODE)
    np.testing.assert_allclose(narrow.bytes[sums][1:] / narrow.transfer_seconds[sums][1:], 4e9)
    assert narrow.bytes[:, Phase.SYNC_ROWS].sum() == 0
    assert (cost.transfer_seconds[:, :, TrafficLink.SELF] == 0).all()
    assert cost.total_seconds == pytest.approx(cost.forward_seconds + cost.backward_seconds + cost.sync_seconds)


def test_dim_groups_share_the_collectives() -> None:
    problem, tiers = load(np.full(5, A)), np.ones(5, np.uint8)
    sums = LoadSums(problem, LAYOUT)
    one = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6))
    three = joint_cost([sums] * 3, [tiers] * 3, cluster(latency=1e-6))
    assert three.ids_sent == pytest.approx(3 * one.ids_sent)
    np.testing.assert_allclose(three.transfer_seconds, 3 * one.transfer_seconds)
    np.testing.assert_array_equal(three.latency_seconds, one.latency_seconds)
    with pytest.raises(PlanError, match="no dim-group"):
        joint_cost([], [], cluster())
