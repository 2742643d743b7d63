"""From the taps of four ranks to the planner: what they send predicts the bytes that ranks send."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import flexd
from flexd.core import tap_counts
from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.ingest.message_counter import _ingest
from flexd.planner.model.row_bytes import Exchange, TrafficLink
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.simulate.byte_counter import ALL_TO_ALL_PARTS, INTER, SYNC_PARTS, StepByteCounter
from flexd.simulate.step_keys import StepPasses
from flexd.sketch.profile import Profile
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings
from flexd.topology.files import load_preset
from tests.support.until import until

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


STEPS = 60


def counted_by_a_tap(passes: list[np.ndarray], touch_steps: int) -> tap_counts.TapCounts:
    """Return the message of a tap that has seen these look-ups."""
    collection = flexd.EmbeddingCollection([flexd.EmbeddingTable(TABLE.name, TABLE.rows, 1)])
    tap = flexd.Tap(
        collection, interval_seconds=1e9, interval_steps=len(passes), touch_steps=touch_steps, clock=lambda: 1e9
    )
    tap.start()
    for rows in passes:
        collection({TABLE.name: flexd.Jagged(torch.from_numpy(rows), torch.tensor([len(rows)]))})
        collection.optimizer.step()
    message = until(tap.outbox.current, 20)
    tap._stopping = True
    return tap_counts.decode(message.payload)


def profile_of(steps: list[list[np.ndarray]], touch_steps: int) -> Profile:
    sketches = SketchSet([TABLE], SketchSettings(half_life_seconds=None))
    sketches.profile(layout=LAYOUT)
    for rank in range(LAYOUT.world_size):
        message = counted_by_a_tap([ranks[rank] for ranks in steps], touch_steps)
        _ingest(sketches, replace(message, source_rank=rank), 1e9, "")
    next(iter(sketches._tables.values())).touches.flush(sketches._decay)
    return sketches.profile(ACCESSES * LAYOUT.world_size, layout=LAYOUT)


def test_a_plan_from_taps_predicts_the_bytes_between_nodes():
    steps = batches(STEPS)
    profile = profile_of(steps, touch_steps=1)
    target = planned(profile)
    sent = sent_between_nodes(steps, target)
    assert predicted_between_nodes(profile, target) == pytest.approx(sent, rel=0.01)
    without = profile_of(steps, touch_steps=0)
    assert without.tables[0].touches is None
    assert predicted_between_nodes(without, target) > 1.2 * sent
