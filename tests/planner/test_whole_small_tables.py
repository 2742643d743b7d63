"""Plans copy whole small tables to every rank where that pays: what the home rule "every rank" gives, in training."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout, Tier
from flexd.core.placement import Placement
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import Plan, make_plan, placement_cost
from flexd.sketch.profile import Profile
from flexd.topology.cluster import Cluster
from tests.support.planner_cases import cluster, profile

ROWS = 60
KEYSPACE = KeySpace([TableSpec("items", 50_000, 16), TableSpec("country", ROWS, 16)])
FIRST = int(KEYSPACE.first_key[1])
BY_RULE = Placement.of(np.arange(FIRST, FIRST + ROWS), np.full(ROWS, Tier.DEVICE, np.uint8))


def planned(seen: Profile, layout: RankLayout, machine: Cluster, live: Placement | None = None) -> Plan:
    return make_plan(
        seen, KEYSPACE, layout, machine, (2_000,), live or Placement.empty(), plan_id="p", parent_id="",
        topology_generation=1, horizon_steps=1e6, now_unix_seconds=0.0, reason="test",
    )  # fmt: skip


def tiers_of_the_small_table(placement: Placement) -> np.ndarray:
    return placement.tiers[(placement.keys >= FIRST) & (placement.keys < FIRST + ROWS)]


@pytest.mark.parametrize("layout", [RankLayout(2, 2), RankLayout(4, 2), RankLayout(2, 1), RankLayout(1, 4)], ids=str)
@pytest.mark.parametrize("latency", [0.0, 1e-6, 2e-5])
def test_no_plan_is_worse_than_the_small_table_copied_to_every_rank(layout: RankLayout, latency: float) -> None:
    """At any skew and load: rows are listed where copies pay, and only those that pay."""
    machine, whole = cluster(latency=latency), 0
    for accesses in (2e3, 2e4, 2e5):
        for exponent in (0.5, 1.2):
            seen = profile(KEYSPACE, accesses, hot=ROWS, exponent=exponent)
            made = planned(seen, layout, machine)
            loads = make_loads(seen, KEYSPACE, layout, TrainingShape())
            by_rule = placement_cost(loads, BY_RULE, KEYSPACE, layout, made.cluster)
            whole += len(tiers_of_the_small_table(made.target)) == ROWS
            assert made.after.exposed_seconds <= by_rule.exposed_seconds * (1 + 1e-9)
    assert whole >= (0 if latency else 5)


def test_a_small_table_is_copied_whole_while_it_is_hot_and_dropped_after_that() -> None:
    layout, machine = RankLayout(2, 2), cluster()
    hot = planned(profile(KEYSPACE, 2e4, hot=ROWS, exponent=0.5), layout, machine)
    np.testing.assert_array_equal(tiers_of_the_small_table(hot.target), np.full(ROWS, Tier.DEVICE))
    cold = planned(profile(KEYSPACE, 4.0, hot=ROWS, exponent=0.5), layout, cluster(all_reduce=5e9), hot.target)
    assert len(tiers_of_the_small_table(cold.target)) == 0
