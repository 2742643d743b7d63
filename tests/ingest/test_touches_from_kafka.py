"""From a broker to the planner: batches with step numbers predict the bytes that ranks send."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from flexd.ingest import Ingestor
from flexd.sketch.profile import Profile
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.source import KafkaSource
from flexd.stream.publisher import Publisher
from tests.support.bursty_steps import (
    ACCESSES,
    LAYOUT,
    TABLE,
    batches,
    planned,
    predicted_between_nodes,
    sent_between_nodes,
)
from tests.support.until import until

pytestmark = pytest.mark.slow

STEPS = 120
STEP_SECONDS = 0.02
"""As in a training: all at once, a producer would write many steps of a rank to one partition and then to the other."""


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    from tansu_broker import TansuBroker

    with TansuBroker() as broker:
        broker.create_topic("accesses", 2)
        yield broker.bootstrap_servers


def ingestor_of(servers: str, store: SnapshotStore | None) -> Ingestor:
    source = KafkaSource(servers, "accesses", f"group-{uuid.uuid4().hex[:8]}")
    return Ingestor(source, [TABLE], SketchSettings(half_life_seconds=None, max_future_seconds=1e9), store)


def test_a_plan_from_a_log_of_correlated_batches_predicts_the_bytes_between_nodes(servers, tmp_path):
    steps = batches(STEPS)
    store = SnapshotStore(tmp_path, 2)
    ingestor = ingestor_of(servers, store)
    ingestor.profile(layout=LAYOUT)
    ingestor.start()
    ranks = [Publisher(KafkaSink(servers, "accesses"), source_rank=rank) for rank in range(LAYOUT.world_size)]
    for step, of_ranks in enumerate(steps):
        for publisher, rows in zip(ranks, of_ranks, strict=True):
            assert publisher.publish(TABLE.name, rows, step=step)
        time.sleep(STEP_SECONDS)
    for publisher in ranks:
        assert publisher.close(20.0)
    total = STEPS * LAYOUT.world_size * ACCESSES
    until(lambda: ingestor.stats().accesses == total, 30, lambda: str(ingestor.stats()))
    with ingestor._sketches.lock:
        touches = ingestor._sketches.sketches._touches[0]
        # The stream ends here: no later step of both partitions closes the last ones.
        ingestor._sketches.sketches.close_steps()
        assert touches._totals[1] >= 0.95 * STEPS
    profile = ingestor.profile(ACCESSES * LAYOUT.world_size, LAYOUT)
    target = planned(profile)
    sent = sent_between_nodes(steps, target)
    assert predicted_between_nodes(profile, target) == pytest.approx(sent, rel=0.03)
    bare = Profile(tuple(replace(table, touches=None) for table in profile.tables))
    assert predicted_between_nodes(bare, target) > 1.2 * sent

    assert ingestor.stop(20.0)
    again = ingestor_of(servers, store)
    restored = again.profile(ACCESSES * LAYOUT.world_size, LAYOUT)
    assert predicted_between_nodes(restored, target) == pytest.approx(sent, rel=0.03)
