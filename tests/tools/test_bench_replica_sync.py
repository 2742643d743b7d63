"""The two ways to sum gradients of replicated rows, as the cost model prices them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench_replica_sync import assumed, way_prices

from flexd.core.layout import RankLayout
from flexd.planner.model.cost import group_cost
from flexd.planner.model.row_bytes import TrafficLink
from flexd.topology.files import load_preset
from tests.support.planner_cases import cluster, load

LAYOUT = RankLayout(2, 8)


def test_sums_at_the_home_win_where_both_collectives_have_the_bandwidth_of_the_wire() -> None:
    found = way_prices(assumed(LAYOUT.nodes, 25e6, 1e-4), LAYOUT, 1.2, 1_000, 4)
    assert min(found.copied) > 0
    assert found.by_home < found.all_reduced < found.home
    assert found.won == found.all_reduced - found.by_home


def test_the_all_reduce_wins_where_it_is_measured_as_the_faster_collective() -> None:
    found = way_prices(load_preset("azure-a100-200g"), LAYOUT, 1.2, 100_000, 4)
    assert min(found.copied) > 0
    assert found.all_reduced < found.by_home < found.home
    assert found.won == 0


@pytest.mark.parametrize(("passes", "merged", "fewer"), [(1, False, True), (4, True, True), (4, False, False)])
def test_sums_at_the_home_send_fewer_bytes_unless_every_pass_is_pushed(passes: int, merged: bool, fewer: bool) -> None:
    """A node touches a row no more often than anyone does in a step, but can in each of several pushes."""
    wide = replace(load(np.array([0.7])), micro_batches=passes, merged_backward=merged)
    reduced, at_home = (
        group_cost(each, np.array([1], np.uint8), LAYOUT, cluster()).bytes[..., TrafficLink.INTER_NODE].sum()
        for each in (wide, replace(wide, sums_at_home=True))
    )
    assert bool(at_home < reduced) is fewer
