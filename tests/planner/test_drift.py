"""Drift: two placements under one profile."""

from dataclasses import replace

import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.placement import Placement, RankLayout
from flexd.planner.drift import LIVE, Drift, compare_placements
from flexd.planner.model.prices import Exchange, exposed_share
from flexd.planner.model.workload import TrainingShape, make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.sketch.profile import Profile
from flexd.topology.cluster import INTER
from tests.support.planner_cases import ORIGIN, cluster, profile

KEYSPACE = KeySpace([TableSpec("item", 4_000, 64), TableSpec("shop", 900, 64), TableSpec("user", 2_000, 16)])
LAYOUT = RankLayout(2, 4)
CLUSTER = cluster(latency=1e-7)
ACCESSES = 40_000.0


def _planned(seen: Profile) -> Placement:
    return make_plan(seen, KEYSPACE, LAYOUT, CLUSTER, (300, 100), Placement.empty(), ORIGIN, horizon_steps=1e9).target


def _compared(seen: Profile, plan: Placement, live: Placement, *more: object) -> Drift:
    return compare_placements(seen, KEYSPACE, LAYOUT, CLUSTER, plan, live, *more)  # type: ignore[arg-type]


def test_the_total_is_the_price_of_the_placement_and_bytes_of_tables_sum_to_it() -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=500)
    placement = _planned(seen)
    drift = _compared(seen, Placement.empty(), placement)
    cost = placement_cost(make_loads(seen, KEYSPACE, LAYOUT), placement, KEYSPACE, CLUSTER)
    assert drift.exposed_seconds[LIVE] == cost.exposed_seconds
    assert drift.inter_node_bytes[LIVE] == pytest.approx(cost.all_to_all_bytes(INTER) + cost.sync_bytes(INTER))
    assert drift.table_bytes.sum(axis=1) == pytest.approx(drift.inter_node_bytes)
    latency = float(exposed_share(cost.exposed) @ cost.latency_seconds.sum(axis=1))
    assert latency > 0
    without = drift.table_seconds[LIVE].sum()
    assert without == pytest.approx(cost.exposed_seconds - latency), "flat bandwidths: sizes do not matter"


def test_moved_popularity_is_drift() -> None:
    then, now = profile(KEYSPACE, ACCESSES, hot=500), profile(KEYSPACE, ACCESSES, hot=500, shift=200)
    old, fresh = _planned(then), _planned(now)
    drift = _compared(now, fresh, old)
    assert drift.ratio > 1.02
    loads = make_loads(now, KEYSPACE, LAYOUT)
    plan, live = (placement_cost(loads, each, KEYSPACE, CLUSTER).exposed_seconds for each in (fresh, old))
    assert drift.ratio == pytest.approx(live / plan)
    assert drift.reason_to_plan(1.02).startswith(f"drift {drift.ratio:.2f} > 1.02 (table ")
    assert drift.reason_to_plan(10.0) is None


def _mixed(weights: dict[str, float], shifts: dict[str, int]) -> Profile:
    """Accesses and popularity of each table by itself."""
    tables = [
        replace(
            profile(KEYSPACE, ACCESSES, hot=500, shift=shifts.get(spec.name, 0)).tables[i],
            accesses_per_step=ACCESSES * weights.get(spec.name, 1.0),
        )
        for i, spec in enumerate(KEYSPACE.tables)
    ]
    return Profile(tables=tuple(tables), samples=10**6)


def test_the_table_that_would_gain_the_most_is_named() -> None:
    old, now = _planned(_mixed({}, {})), _mixed({}, {"shop": 300})
    drift = _compared(now, _planned(now), old)
    assert drift.table_ratios["shop"] > 1.02
    assert "(table shop)" in str(drift.reason_to_plan(1.001))


def test_priced_as_the_plan_was_with_the_same_shape_and_exchange() -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=500)
    placement = _planned(seen)
    shape = TrainingShape(micro_batches=4, frozen_tables=frozenset({"shop"}))
    for exchange in (Exchange.CHAIN, Exchange.DIRECT_DEDUP):
        drift = _compared(seen, placement, placement, shape, exchange)
        cost = placement_cost(make_loads(seen, KEYSPACE, LAYOUT, shape), placement, KEYSPACE, CLUSTER, exchange)
        assert drift.exposed_seconds[LIVE] == cost.exposed_seconds
        assert drift.exposed_seconds[LIVE] != _compared(seen, placement, placement).exposed_seconds[LIVE]
        assert drift.table_bytes.sum(axis=1) == pytest.approx(drift.inter_node_bytes)
