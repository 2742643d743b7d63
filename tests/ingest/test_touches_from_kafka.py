"""From a broker to the planner: batches with step numbers predict the bytes that ranks send."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from flexd.core.keyspace import KeySpace, TableSpec
from flexd.core.layout import RankLayout
from flexd.core.placement import Placement
from flexd.ingest import Ingestor
from flexd.planner.model.row_bytes import Exchange, TrafficLink
from flexd.planner.model.workload import make_loads
from flexd.planner.plan import make_plan, placement_cost
from flexd.simulate.byte_counter import ALL_TO_ALL_PARTS, INTER, SYNC_PARTS, StepByteCounter
from flexd.simulate.step_keys import StepPasses
from flexd.sketch.profile import Profile
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.source import KafkaSource
from flexd.stream.publisher import Publisher
from flexd.topology.files import load_preset
from tests.support.until import until

pytestmark = pytest.mark.slow

LAYOUT = RankLayout(2, 2)
TABLE = TableSpec("items", 2000, 128)
KEYSPACE = KeySpace([TABLE])
CLUSTER = load_preset("azure-a100-200g").bandwidth_only()
STEPS, ACCESSES = 120, 300


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    from tansu_broker import TansuBroker

    with TansuBroker() as broker:
        broker.create_topic("accesses", 2)
        yield broker.bootstrap_servers


def batches() -> list[list[np.ndarray]]:
    """Batches by step and rank. The ranks of a step look up what is fashionable in it, as in bursty traces."""
    random = np.random.default_rng(4)
    share = 1.0 / np.arange(1, TABLE.rows + 1)
    made = []
    for _ in range(STEPS):
        weights = share * random.exponential(size=TABLE.rows) ** 6
        made.append([random.choice(TABLE.rows, ACCESSES, p=weights / weights.sum()) for _ in range(LAYOUT.world_size)])
    return made


def sent_between_nodes(steps: list[list[np.ndarray]], placement: Placement) -> float:
    """Return bytes a rank and step, as ranks send them."""
    counter = StepByteCounter(KEYSPACE, LAYOUT)
    total = 0
    for ranks in steps:
        for part in counter.step(StepPasses.of([ranks], LAYOUT), placement, Exchange.CHAIN):
            if part.part in (*ALL_TO_ALL_PARTS, *SYNC_PARTS):
                total += int(part.sent[:, INTER].sum())
    return total / len(steps) / LAYOUT.world_size


def predicted_between_nodes(profile: Profile, placement: Placement) -> float:
    cost = placement_cost(make_loads(profile, KEYSPACE, LAYOUT), placement, KEYSPACE, LAYOUT, CLUSTER)
    return cost.all_to_all_bytes(TrafficLink.INTER_NODE) + cost.sync_bytes(TrafficLink.INTER_NODE)


def ingestor_of(servers: str, store: SnapshotStore | None) -> Ingestor:
    source = KafkaSource(servers, "accesses", f"group-{uuid.uuid4().hex[:8]}")
    return Ingestor(source, [TABLE], SketchSettings(half_life_seconds=None, max_future_seconds=1e9), store)


def test_a_plan_from_a_log_of_correlated_batches_predicts_the_bytes_between_nodes(servers, tmp_path):
    steps = batches()
    store = SnapshotStore(tmp_path, 2)
    ingestor = ingestor_of(servers, store)
    ingestor.profile(layout=LAYOUT)
    ingestor.start()
    ranks = [Publisher(KafkaSink(servers, "accesses"), source_rank=rank) for rank in range(LAYOUT.world_size)]
    for step, of_ranks in enumerate(steps):
        for publisher, rows in zip(ranks, of_ranks, strict=True):
            assert publisher.publish(TABLE.name, rows, step=step)
    for publisher in ranks:
        assert publisher.close(20.0)
    total = STEPS * LAYOUT.world_size * ACCESSES
    until(lambda: ingestor.stats().accesses == total, 30, lambda: str(ingestor.stats()))
    profile = ingestor.profile(ACCESSES * LAYOUT.world_size, LAYOUT)
    plan = make_plan(
        profile, KEYSPACE, LAYOUT, CLUSTER, [200], Placement.empty(), plan_id="p", parent_id="", topology_generation=1,
        horizon_steps=1e9, now_unix_seconds=0.0, reason="test",
    )  # fmt: skip
    assert len(plan.target) > 0
    sent = sent_between_nodes(steps, plan.target)
    assert predicted_between_nodes(profile, plan.target) == pytest.approx(sent, rel=0.03)
    bare = Profile(tuple(_without_touches(table) for table in profile.tables))
    assert predicted_between_nodes(bare, plan.target) > 1.2 * sent

    assert ingestor.stop(20.0)
    again = ingestor_of(servers, store)
    restored = again.profile(ACCESSES * LAYOUT.world_size, LAYOUT)
    assert predicted_between_nodes(restored, plan.target) == pytest.approx(sent, rel=0.03)


def _without_touches(table):
    from dataclasses import replace

    return replace(table, touches=None)
