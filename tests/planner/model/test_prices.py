"""Seconds of bytes and collectives: which are counted, and at which curve."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexd.core.layout import RankLayout
from flexd.planner.model.prices import prices
from flexd.planner.model.row_bytes import EXCHANGE_PHASES, Exchange, Phase, TrafficLink
from flexd.topology.cluster import Cluster, CollectiveCurve, Exposed, LinkModel
from tests.support.planner_cases import cluster, group_cost, load, zipf

A = 0.7
LAYOUT = RankLayout(3, 4)


@pytest.mark.parametrize(
    ("layout", "tiers", "collectives"),
    [
        (RankLayout(2, 2), [0], 8),
        (RankLayout(2, 2), [0, 1], 9),
        (RankLayout(2, 2), [0, 2], 10),
        (RankLayout(2, 2), [0, 1, 2], 10),
        (RankLayout(1, 4), [0], 4),
        (RankLayout(1, 4), [0, 2], 5),
        (RankLayout(4, 1), [0, 1], 5),
        (RankLayout(1, 1), [0], 0),
    ],
)
@pytest.mark.parametrize("narrow", [False, True])
def test_latency_counts_the_collectives(layout: RankLayout, tiers: list[int], collectives: int, narrow: bool) -> None:
    problem = replace(load(np.full(len(tiers), A)), sums_at_home=narrow)
    cost = group_cost(problem, np.array(tiers, np.uint8), layout, cluster(latency=1.0))
    assert cost.latency_seconds.sum() == pytest.approx(collectives)


@pytest.mark.parametrize(
    ("micro_batches", "merged", "frozen", "backward"),
    [(4, True, False, 1), (4, False, False, 4), (1, True, False, 1), (4, True, True, 0), (4, False, True, 0)],
)
@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(4, 1)], ids=["2x2", "4x1"])
def test_micro_batches_count_each_forward_pass_and_merged_gradients_once(
    layout: RankLayout, micro_batches: int, merged: bool, frozen: bool, backward: int
) -> None:
    """Sizes, ids and rows travel in every forward pass, gradients once a backward pass, sums once per step."""
    problem = replace(
        load(np.full(2, A)), micro_batches=micro_batches, merged_backward=merged,
        trained=np.zeros(2) if frozen else None,
    )  # fmt: skip
    latency = group_cost(problem, np.array([0, 1], np.uint8), layout, cluster(latency=1.0)).latency_seconds
    hops = [TrafficLink.INTER_NODE] if layout.local_ranks == 1 else [TrafficLink.INTRA_NODE, TrafficLink.INTER_NODE]
    for link in hops:
        assert latency[Phase.FORWARD_IDS, link] == 2 * micro_batches
        assert latency[Phase.FORWARD_ROWS, link] == micro_batches
        assert latency[Phase.BACKWARD_ROWS, link] == backward
    assert latency[Phase.SYNC_ROWS, TrafficLink.INTER_NODE] == (0 if frozen else 1)
    assert latency.sum() == len(hops) * (3 * micro_batches + backward) + (not frozen)


def test_a_direct_all_to_all_takes_as_long_as_its_slower_link() -> None:
    problem = load(zipf(50, 1.0, 50.0))
    machine = cluster(all_to_all=10e9, intra=100e9)
    cost = group_cost(problem, np.zeros(50, np.uint8), LAYOUT, machine, Exchange.DIRECT_DEDUP)
    assert cost.transfer_seconds[:, :, TrafficLink.INTRA_NODE].sum() == 0
    assert cost.transfer_seconds[:, :, TrafficLink.INTER_NODE].sum() == pytest.approx(
        cost.bytes[:, :, TrafficLink.INTER_NODE].sum() / 10e9
    )
    assert cost.bytes[:, :, TrafficLink.INTRA_NODE].sum() > 0


def test_a_message_is_that_of_one_micro_batch_and_of_all_tiers() -> None:
    rising = CollectiveCurve(0.0, ((1.0, 1e6), (1e9, 1e11)))
    link = LinkModel(1e12, rising, rising, rising)
    machine = Cluster("m", "s", link, link)
    sent = np.random.default_rng(1).uniform(1e5, 1e6, (3, 6, 3))
    price = prices(sent, machine, 4)
    for phase in Phase:
        sizes = sent[:, phase, TrafficLink.INTER_NODE].sum()
        if phase in EXCHANGE_PHASES:
            sizes /= 4
        if phase == Phase.SYNC_MASK:  # travels with the rows
            sizes = sent[:, Phase.FORWARD_ROWS, TrafficLink.INTER_NODE].sum() / 4
        np.testing.assert_allclose(price[:, phase, TrafficLink.INTER_NODE], rising.seconds_per_byte(sizes))
    assert (price[:, :, TrafficLink.SELF] == 0).all()


def test_what_can_run_beside_compute_is_exposed_beyond_it() -> None:
    problem, tiers = load(np.full(4, A)), np.array([0, 1, 2, 2], np.uint8)
    beside = Exposed(1.0, 0.5, 0.25)
    all_hidden = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6, exposed=beside))
    hidden = 0.5 * all_hidden.backward_seconds + 0.75 * all_hidden.sync_seconds
    for cover in (0.0, 0.25 * hidden, hidden, 2 * hidden):
        exposed = replace(beside, cover_seconds=cover)
        cost = group_cost(problem, tiers, LAYOUT, cluster(latency=1e-6, exposed=exposed))
        assert cost.exposed_seconds == pytest.approx(all_hidden.exposed_seconds + max(0.0, hidden - cover))
