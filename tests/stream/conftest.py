"""Brokers of the stream tests."""

import pytest


@pytest.fixture(scope="session")
def tansu():
    """A broker for all tests that do not stop it."""
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
    """librdkafka's mock cluster, which behaves as Kafka does where tansu does not."""
    from tests.support.mock_kafka import MockKafka

    with MockKafka() as broker:
        yield broker
