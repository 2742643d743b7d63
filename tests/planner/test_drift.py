"""Drift: two placements under one profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.drift import Drift, PlacementCommunication, placement_communication
from flexd.planner.model.row_bytes import Exchange, TrafficLink
from flexd.planner.model.training_shape import TrainingShape
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.sketch.profile import Profile
from tests.support.planner_cases import cluster, profile

KEYSPACE = KeySpace([TableSpec("item", 4_000, 64), TableSpec("shop", 900, 64), TableSpec("user", 2_000, 16)])
LAYOUT = RankLayout(2, 4)
CLUSTER = cluster(latency=1e-7)
ACCESSES = 40_000.0


def _planned(seen: Profile) -> Placement:
    return make_plan(
        seen, KEYSPACE, LAYOUT, CLUSTER, (300, 100), Placement.empty(), plan_id="p", parent_id="",
        topology_generation=1, horizon_steps=1e9, now_unix_seconds=0.0, reason="test",
    ).target  # fmt: skip


def _priced(seen: Profile, placement: Placement) -> PlacementCommunication:
    return placement_communication(seen, KEYSPACE, LAYOUT, CLUSTER, placement)


def test_the_total_is_the_price_of_the_placement_and_bytes_of_tables_sum_to_it() -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=500)
    placement = _planned(seen)
    traffic = _priced(seen, placement)
    cost = placement_cost(make_loads(seen, KEYSPACE, LAYOUT), placement, KEYSPACE, LAYOUT, CLUSTER)
    assert traffic.total.exposed_seconds == cost.exposed_seconds
    assert traffic.total.inter_node_bytes == pytest.approx(
        cost.all_to_all_bytes(TrafficLink.INTER_NODE) + cost.sync_bytes(TrafficLink.INTER_NODE)
    )
    assert sum(t.inter_node_bytes for t in traffic.tables.values()) == pytest.approx(traffic.total.inter_node_bytes)
    latency = float(cost.exposed_share @ cost.latency_seconds.sum(axis=1))
    assert latency > 0
    without = sum(t.exposed_seconds for t in traffic.tables.values())
    assert without == pytest.approx(traffic.total.exposed_seconds - latency), "flat bandwidths: sizes do not matter"


def test_moved_popularity_is_drift() -> None:
    then, now = profile(KEYSPACE, ACCESSES, hot=500), profile(KEYSPACE, ACCESSES, hot=500, shift=200)
    old, fresh = _planned(then), _planned(now)
    drift = Drift(_priced(now, fresh), _priced(now, old))
    assert drift.ratio > 1.02
    loads = make_loads(now, KEYSPACE, LAYOUT)
    plan, live = (placement_cost(loads, each, KEYSPACE, LAYOUT, CLUSTER).exposed_seconds for each in (fresh, old))
    assert drift.ratio == pytest.approx(live / plan)
    reason = drift.reason_to_plan(1.02)
    assert reason is not None
    assert reason.startswith(f"drift {drift.ratio:.2f} > 1.02 (table ")
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
    drift = Drift(_priced(now, _planned(now)), _priced(now, old))
    assert drift.table_ratios["shop"] > 1.02
    assert "(table shop)" in str(drift.reason_to_plan(1.001))


def test_priced_as_the_plan_was_with_the_same_shape_and_exchange() -> None:
    seen = profile(KEYSPACE, ACCESSES, hot=500)
    placement = _planned(seen)
    shape = TrainingShape(micro_batches=4, frozen_tables=frozenset({"shop"}))
    for exchange in (Exchange.CHAIN, Exchange.DIRECT_DEDUP):
        traffic = placement_communication(seen, KEYSPACE, LAYOUT, CLUSTER, placement, shape, exchange)
        loads = make_loads(seen, KEYSPACE, LAYOUT, shape)
        cost = placement_cost(loads, placement, KEYSPACE, LAYOUT, CLUSTER, exchange)
        assert traffic.total.exposed_seconds == cost.exposed_seconds
        assert traffic.total.exposed_seconds != _priced(seen, placement).total.exposed_seconds
        assert sum(t.inter_node_bytes for t in traffic.tables.values()) == pytest.approx(traffic.total.inter_node_bytes)
