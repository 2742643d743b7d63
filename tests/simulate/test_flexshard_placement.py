"""FlexShard in the replay has the tiers that its prices have."""

from __future__ import annotations

import numpy as np

from flexd.core.layout import RankLayout
from flexd.planner.model.cost import joint_cost
from flexd.planner.model.row_bytes import Exchange
from flexd.simulate.accesses import RowFormat, ZipfAccesses
from flexd.simulate.exact_profile import exact_profile
from flexd.simulate.flexshard_placement import flexshard_placement
from flexd.simulate.simulation import SimulationSettings
from flexd.topology.files import load_preset
from flexd.topology.scale import scale_model
from tools.bench.peers.problem import PlanningProblem
from tools.bench.peers.row_peers import FLEXSHARD_SLOTS

LAYOUT = RankLayout(2, 2)
CLUSTER = scale_model(load_preset("azure-a100-200g"), 10_000)


def test_the_replay_places_the_rows_that_are_priced() -> None:
    accesses = ZipfAccesses(
        LAYOUT, RowFormat(), table_rows=2_000, exponent=1.05, drift_rows=6.0, accesses_per_rank=3_000, steps=5, seed=1
    )
    profile = exact_profile([accesses.passes(step)[0] for step in range(5)], accesses.keyspace, LAYOUT)
    slots = SimulationSettings().slots(accesses.keyspace, 0.04)
    placement = flexshard_placement(profile, accesses.keyspace, LAYOUT, CLUSTER, slots)
    used = LAYOUT.replica_slots_used(placement.keys, placement.tiers)
    assert 0.9 * slots[0] < used.max() <= slots[0]

    case = PlanningProblem(profile, accesses.keyspace, LAYOUT, CLUSTER, 1e9, slots)
    priced = FLEXSHARD_SLOTS.evaluate(case)
    (table,) = accesses.keyspace.tables
    assert np.array_equal(priced.memory_bytes - case.home_memory(), used * (table.row_bytes + table.state_bytes))
    tiers = [placement.tiers_of(group.load.keys) for group in case.sums]
    assert joint_cost(case.sums, tiers, CLUSTER, Exchange.DIRECT).peak_exposed_seconds == priced.predicted_seconds
