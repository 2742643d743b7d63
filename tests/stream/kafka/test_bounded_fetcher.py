"""Hostile batches on a real broker are refused, and the rest of the partition is read, in bounded memory."""

from __future__ import annotations

import uuid

import pytest
from kafka.consumer.fetcher import Fetcher

from flexd.core.errors import StreamError
from flexd.stream.kafka import bounded_fetcher
from flexd.stream.kafka.bounded_fetcher import BatchLimits
from flexd.stream.kafka.source import KafkaSource
from flexd.stream.types import RefusedMessages, StreamMessage
from tests.support.raw_kafka import CODECS, batch, produce
from tests.support.reading import kafka_source, poll_until

pytestmark = pytest.mark.slow


def a_topic(broker) -> str:
    topic = f"topic-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic, 1)
    return topic


def open_source(broker, topic: str, **options) -> KafkaSource:
    return kafka_source(broker.bootstrap_servers, topic, f"group-{topic}", session_timeout_seconds=6.0, **options)


def offsets(item) -> range:
    return range(item.offset, item.last_offset + 1)


def test_poison_batches_are_refused_in_their_place_and_read_past_again_after_a_restart(tansu):
    topic = a_topic(tansu)
    values = []
    for codec in CODECS:
        produce(tansu.bootstrap_servers, topic, batch([b"before " + codec.encode()], codec=codec))
        produce(tansu.bootstrap_servers, topic, batch([bytes(200_000)], codec=codec))
        values.append(b"before " + codec.encode())
    produce(tansu.bootstrap_servers, topic, batch([b"bad checksum"], crc=5))
    produce(tansu.bootstrap_servers, topic, batch([b"bad gzip"], codec="gzip", compressed=b"garbage"))
    produce(tansu.bootstrap_servers, topic, batch([b"last"]))
    values.append(b"last")

    for position in (None, 1):
        source = open_source(tansu, topic, limits=BatchLimits(max_batch_bytes=100_000))
        if position is not None:
            source.restore({f"{topic}/0": position})
        items = poll_until(source, lambda got: any(bytes(item.payload) == b"last" for item in got))
        assert source.problem is None
        assert source.positions() == {f"{topic}/0": 13}
        source.close()
        begin = position or 0
        assert [bytes(item.payload) for item in items if isinstance(item, StreamMessage)] == values[begin:]
        refused = [item for item in items if isinstance(item, RefusedMessages)]
        assert [item.reason for item in refused] == ["batch_too_large"] * 5 + ["corrupt_batch"] * 2
        assert [offset for item in items for offset in offsets(item)] == list(range(begin, 13))


def test_a_poll_ends_at_a_number_of_decompressed_bytes(tansu):
    topic = a_topic(tansu)
    produce(tansu.bootstrap_servers, topic, batch([bytes(10_000)] * 50, codec="gzip"))
    source = open_source(tansu, topic, limits=BatchLimits(max_poll_bytes=100_000))
    polls: list[int] = []
    got: list[StreamMessage] = []
    while len(got) < 50:
        items = source.poll(1.0)
        polls.append(len(items))
        got += items
    source.close()
    assert [item.offset for item in got] == list(range(50))
    assert max(polls) <= 11


def test_a_changed_client_is_refused_at_the_start(monkeypatch):
    bounded_fetcher.check_client()
    changed = type("Changed", (Fetcher.PartitionRecords,), {"take": lambda self, n=None, more=None: []})
    monkeypatch.setattr(Fetcher, "PartitionRecords", changed)
    with pytest.raises(StreamError, match=r"kafka-python .* cannot be bounded: Changed.take changed"):
        kafka_source("127.0.0.1:1", "t", "g")
