"""The Kafka sink: a producer is replaced if the broker forgot it, and only then; every message is counted once."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    UnknownProducerIdError,
)
from kafka.future import Future

import flexd.stream.kafka.sink as kafka_sink
from flexd.core.errors import StreamError
from flexd.stream.kafka.sink import KafkaSink


def log_of(broker, topic: str) -> list[bytes]:
    """Read all messages of partition 0."""
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, group_id=None)
    try:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        consumer.seek_to_beginning()
        end = consumer.end_offsets([partition])[partition]
        found: list[bytes] = []
        while consumer.position(partition) < end:
            found += [record.value for records in consumer.poll(timeout_ms=500).values() for record in records]
    finally:
        consumer.close()
    return found


def test_a_broker_that_lost_its_memory_is_delivered_to_again(own_tansu):
    topic = "accesses"
    own_tansu.create_topic(topic)
    sink = KafkaSink(own_tansu.bootstrap_servers, topic, client_options={"linger_ms": 0})
    try:
        sink.send(b"before")
        sink.flush(10.0)
        own_tansu.kill()
        own_tansu.start()
        taken: list[bytes] = []
        delivered: list[bytes] = []
        deadline = time.monotonic() + 60
        while len(delivered) < 3:
            assert time.monotonic() < deadline, (sink.messages_failed, len(taken))
            message = f"after {len(taken)}".encode()
            try:
                sink.send(message)
                taken.append(message)
            except StreamError:
                pass
            time.sleep(0.05)
            if sink.producers_replaced:
                sink.flush(10.0)
                delivered = log_of(own_tansu, topic)
        assert sink.producers_replaced == 1
        assert len(set(delivered)) == len(delivered)
        assert set(delivered) <= set(taken)
        # Messages of the lost producer were not sent again.
        assert sink.messages_failed + len(delivered) == len(taken)
        assert sink.messages_failed > 0
    finally:
        sink.close()


class Broker:
    """A fake of the producer class and the clock: every producer resolves messages at once, with ``answer``."""

    def __init__(self) -> None:
        self.answer: KafkaError | None = None
        self.made = 0
        self.now = 100.0

    def producer(self, **options: object) -> Mock:
        self.made += 1
        return Mock(send=self.send)

    def send(self, topic: str, value: bytes) -> Future:
        return Future().success(None) if self.answer is None else Future().failure(self.answer)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def broker(monkeypatch) -> Broker:
    broker = Broker()
    monkeypatch.setattr(kafka_sink, "_Producer", broker.producer)
    monkeypatch.setattr(kafka_sink, "time", broker)
    return broker


def replaced_after(sink: KafkaSink, broker: Broker, seconds: float) -> int:
    """Send four messages a second for ``seconds``; return the number of replaced producers."""
    before = sink.producers_replaced
    for _ in range(int(4 * seconds)):
        sink.send(b"x")
        broker.now += 0.25
    return sink.producers_replaced - before


@pytest.mark.parametrize("error", [UnknownProducerIdError(), KafkaError("fatal"), ClusterAuthorizationFailedError()])
def test_a_producer_that_delivers_nothing_is_replaced_with_back_off(broker, error):
    sink = KafkaSink("nowhere:1", "t")
    broker.answer = error
    assert replaced_after(sink, broker, 1.0) == 0
    assert replaced_after(sink, broker, 0.75) == 1
    assert replaced_after(sink, broker, 600.0) in range(12, 16)
    assert broker.made == sink.producers_replaced + 1
    assert sink.messages_failed == 4 + 3 + 2400
    # A delivered message resets the back-off.
    broker.answer = None
    assert replaced_after(sink, broker, 0.5) in (0, 1)
    broker.answer = error
    assert replaced_after(sink, broker, 1.75) == 1
    sink.close()


@pytest.mark.parametrize("error", [KafkaTimeoutError(), MessageSizeTooLargeError(), None])
def test_other_failures_do_not_replace_the_producer(broker, error):
    sink = KafkaSink("nowhere:1", "t")
    broker.answer = error
    assert replaced_after(sink, broker, 100.0) == 0
    assert sink.messages_failed == (0 if error is None else 400)
    sink.close()
