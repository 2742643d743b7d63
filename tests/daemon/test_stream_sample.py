"""A bounded reading of a topic leaves the daemon's group alone."""

import numpy as np
from kafka import KafkaConsumer, KafkaProducer

from flexd.config.model import parse_config
from flexd.daemon.stream_sample import read_sample
from flexd.stream.codec import encode_arrow
from flexd.stream.types import AccessBatch
from tests.support.mock_kafka import MockKafka
from tests.support.until import until


def test_a_topic_is_read_to_its_end_in_a_group_of_its_own() -> None:
    with MockKafka() as broker:
        topic = broker.create_topic(2)
        config = parse_config(
            {
                "job": "j",
                "tables": [{"name": "item", "rows": 100, "dim": 4}],
                "stream": {
                    "source": {
                        "kind": "kafka", "bootstrap_servers": broker.bootstrap_servers, "topic": topic,
                        "client_options": {"api_version": "2.3"},
                    },
                    "poll_seconds": 0.05,
                },
            }
        )  # fmt: skip
        producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, api_version=(2, 3))
        for number in range(10):
            batch = AccessBatch("item", np.arange(10, dtype=np.int64), 0, 1.7e9)
            producer.send(topic, encode_arrow([batch]), partition=number % 2)
        producer.flush(20)
        producer.close()
        daemon = KafkaConsumer(
            topic, bootstrap_servers=broker.bootstrap_servers, api_version=(2, 3), group_id="flexd",
            enable_auto_commit=False, auto_offset_reset="latest",
        )  # fmt: skip
        until(lambda: daemon.poll(500) or len(daemon.assignment()) == 2, 120)
        partitions = daemon.assignment()
        profile = read_sample(config, 60.0).profile
        assert profile.samples == 100
        assert profile.tables[0].weight > 0
        daemon.poll(50)
        assert daemon.assignment() == partitions, "the daemon keeps its partitions"
        assert all(daemon.committed(partition) is None for partition in partitions)
        daemon.close()
