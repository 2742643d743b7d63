"""A job whose ranks look up what is fashionable in a step, as in bursty traces: touches are far from independence."""

from __future__ import annotations

import numpy as np

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.planner.model.row_bytes import Exchange, TrafficLink
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.simulate.byte_counter import ALL_TO_ALL_PARTS, INTER, SYNC_PARTS, StepByteCounter
from flexd.simulate.step_keys import StepPasses
from flexd.sketch.profile import Profile
from flexd.topology.files import load_preset

LAYOUT = RankLayout(2, 2)
TABLE = TableSpec("items", 2000, 128)
KEYSPACE = KeySpace([TABLE])
CLUSTER = load_preset("azure-a100-200g").bandwidth_only()
ACCESSES = 300
"""Of a rank in a step."""


def batches(steps: int) -> list[list[np.ndarray]]:
    """Batches by step and rank."""
    random = np.random.default_rng(4)
    share = 1.0 / np.arange(1, TABLE.rows + 1)
    made = []
    for _ in range(steps):
        weights = share * random.exponential(size=TABLE.rows) ** 6
        made.append([random.choice(TABLE.rows, ACCESSES, p=weights / weights.sum()) for _ in range(LAYOUT.world_size)])
    return made


def planned(profile: Profile) -> Placement:
    """Return a plan's placement, which has copies."""
    target = make_plan(
        profile, KEYSPACE, LAYOUT, CLUSTER, [200], Placement.empty(), plan_id="p", parent_id="", topology_generation=1,
        horizon_steps=1e9, now_unix_seconds=0.0, reason="test",
    ).target  # fmt: skip
    assert len(target) > 0
    return target


def sent_between_nodes(steps: list[list[np.ndarray]], placement: Placement) -> float:
    """Return bytes a rank and step, as ranks send them."""
    counter = StepByteCounter(KEYSPACE, LAYOUT)
    parts = [
        part for ranks in steps for part in counter.step(StepPasses.of([ranks], LAYOUT), placement, Exchange.CHAIN)
    ]
    kinds = (*ALL_TO_ALL_PARTS, *SYNC_PARTS)
    return sum(int(part.sent[:, INTER].sum()) for part in parts if part.part in kinds) / len(steps) / LAYOUT.world_size


def predicted_between_nodes(profile: Profile, placement: Placement) -> float:
    """Return bytes a rank and step, as the planner prices them."""
    cost = placement_cost(make_loads(profile, KEYSPACE, LAYOUT), placement, KEYSPACE, LAYOUT, CLUSTER)
    return cost.all_to_all_bytes(TrafficLink.INTER_NODE) + cost.sync_bytes(TrafficLink.INTER_NODE)
