"""From a broker to the planner: a share of the partitions gives the rates, and the plan, of the whole stream."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from kafka import KafkaProducer

from flexd.ingest import Ingestor
from flexd.sketch.types import SketchSettings
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.kafka.source import KafkaSource
from flexd.stream.types import AccessBatch
from tests.support.bursty_steps import ACCESSES, LAYOUT, TABLE, planned, sent_between_nodes
from tests.support.until import until

pytestmark = pytest.mark.slow

PARTITIONS, SHARE, STEPS = 8, 0.5, 100


def ingestor_of(servers: str, topic: str, share: float) -> Ingestor:
    source = KafkaSource(servers, topic, f"group-{uuid.uuid4().hex[:8]}", share=share, job="j")
    settings = SketchSettings(half_life_seconds=None, max_future_seconds=1e9, share=share)
    return Ingestor(source, [TABLE], settings, None)


def test_rates_and_the_plan_of_a_share_are_those_of_the_stream() -> None:
    from tansu_broker import TansuBroker

    random = np.random.default_rng(8)
    popularity = 1.0 / np.arange(1, TABLE.rows + 1)
    popularity /= popularity.sum()
    steps = [
        [random.choice(TABLE.rows, ACCESSES, p=popularity) for _ in range(LAYOUT.world_size)] for _ in range(STEPS)
    ]
    with TansuBroker() as broker:
        servers, topic = broker.bootstrap_servers, "accesses"
        broker.create_topic(topic, PARTITIONS)
        producer = KafkaProducer(bootstrap_servers=servers)
        for step, of_ranks in enumerate(steps):
            for rank, rows in enumerate(of_ranks):
                message = encode_arrow([AccessBatch(TABLE.name, rows, rank, float(step), step=step)])
                producer.send(topic, message, partition=int(random.integers(PARTITIONS)))
        producer.flush(20.0)
        whole, half = (ingestor_of(servers, topic, share) for share in (1.0, SHARE))
        for ingestor in (whole, half):
            ingestor.profile(layout=LAYOUT)
            ingestor.start()
        total = STEPS * LAYOUT.world_size * ACCESSES
        until(lambda: whole.stats().accesses == total, 60, lambda: str(whole.stats()))
        until(lambda: half.stats().messages and half.stats().idle_seconds > 0, 60, lambda: str(half.stats()))
        all_of_it, part = (each.profile(ACCESSES * LAYOUT.world_size, LAYOUT) for each in (whole, half))
        counted = half.query(TABLE.name, np.arange(TABLE.rows))
        assert half.stats().read_share == SHARE
        for ingestor in (whole, half):
            assert ingestor.stop(20.0)
        producer.close()
    # Which messages lie in the partitions that are read is chance: 200 of 400, give or take 10.
    assert 0.35 * total < part.samples < 0.65 * total
    assert part.tables[0].weight == pytest.approx(part.samples / SHARE)
    assert part.tables[0].weight == pytest.approx(total, rel=0.25)
    expected = popularity * part.samples
    hottest = slice(0, 200)
    off = np.abs(SHARE * counted - expected)[hottest] / np.sqrt(expected[hottest])
    assert off.max() < 5, "beyond sampling error"
    touched = part.tables[0].touches
    assert touched is None or np.isnan(touched.per_node).all(), "no step is seen whole"
    assert all_of_it.tables[0].touches is not None
    assert sent_between_nodes(steps, planned(part)) < 1.05 * sent_between_nodes(steps, planned(all_of_it))
