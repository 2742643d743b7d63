"""What stream tests share: batches to send and brokers to send them to."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from flexd.stream.types import AccessBatch


@pytest.fixture
def make_batch():
    """A batch whose row ids tell its number apart."""

    def make(number: int, ids: int = 16, dtype: type = np.int32) -> AccessBatch:
        return AccessBatch("items", np.arange(ids, dtype=dtype) + number * 1000, number % 4, float(number))

    return make


@pytest.fixture(scope="session")
def tansu():
    """One broker for all tests that do not stop it."""
    from tansu_broker import TansuBroker

    with TansuBroker() as broker:
        yield broker


@pytest.fixture
def own_tansu():
    """A broker that a test may kill, stop and restart."""
    from tansu_broker import TansuBroker

    with TansuBroker() as broker:
        yield broker


@pytest.fixture
def mock_broker():
    """librdkafka's mock cluster, which answers as Kafka does where tansu does not: (address, make a topic)."""
    return mock_cluster()


@pytest.fixture
def slow_broker():
    """A mock cluster that takes longer for every answer than the tests' polls last."""
    return mock_cluster({"test.mock.broker.rtt": 150})


def mock_cluster(options=None):
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", **(options or {})})
    broker = next(iter(admin.list_topics(timeout=30).brokers.values()))

    def make_topic() -> str:
        topic = f"topic-{uuid.uuid4().hex[:8]}"
        # Asking for a topic makes it.
        admin.list_topics(topic, timeout=30)
        return topic

    return f"{broker.host}:{broker.port}", make_topic
