"""Hostile batches on a real broker are refused, and the rest of the partition is read, in bounded memory."""

from __future__ import annotations

import time

import pytest
from kafka.consumer.fetcher import Fetcher

from flexd.core.errors import StreamError
from flexd.stream.kafka import bounded_fetcher
from flexd.stream.kafka.bounded_fetcher import BatchLimits, Item
from flexd.stream.types import RefusedMessages, StreamMessage
from tests.support.raw_kafka import CODECS, batch, produce
from tests.support.reading import kafka_source

pytestmark = pytest.mark.slow


def test_poison_batches_are_refused_in_their_place_and_a_poll_ends_at_a_number_of_decompressed_bytes(mock_broker):
    topic = mock_broker.create_topic(1)
    payloads = []
    for codec in CODECS:
        produce(mock_broker.bootstrap_servers, topic, batch([b"before " + codec.encode()], codec=codec))
        produce(mock_broker.bootstrap_servers, topic, batch([bytes(600_000)], codec=codec))
        payloads.append(b"before " + codec.encode())
    produce(mock_broker.bootstrap_servers, topic, batch([b"bad checksum"], crc=5))
    produce(mock_broker.bootstrap_servers, topic, batch([b"bad gzip"], codec="gzip", compressed=b"garbage"))
    produce(mock_broker.bootstrap_servers, topic, batch([bytes(10_000)] * 50, codec="gzip"))
    payloads += [bytes(10_000)] * 50

    limits = BatchLimits(max_batch_bytes=550_000, max_poll_bytes=100_000)
    source = kafka_source(
        mock_broker.bootstrap_servers,
        topic,
        f"group-{topic}",
        session_timeout_seconds=6.0,
        limits=limits,
        client_options=mock_broker.client_options,
    )
    for begin in (0, 1):
        source.restore({f"{topic}/0": begin})
        polls: list[list[Item]] = []
        deadline = time.monotonic() + 60
        while source.positions() != {f"{topic}/0": 62}:
            assert time.monotonic() < deadline, source.problem
            polls.append(source.poll(1.0))
        assert source.problem is None
        items = [item for got in polls for item in got]
        assert [bytes(item.payload) for item in items if isinstance(item, StreamMessage)] == payloads[begin:]
        refused = [item for item in items if isinstance(item, RefusedMessages)]
        assert [item.reason for item in refused] == ["batch_too_large"] * 5 + ["corrupt_batch"] * 2
        offsets = [offset for item in items for offset in range(item.offset, item.last_offset + 1)]
        assert offsets == list(range(begin, 62))
        assert max(sum(len(item.payload) for item in got if item.offset >= 12) for got in polls) <= 110_000
    source.close()


def test_a_changed_client_is_refused_at_the_start(monkeypatch):
    bounded_fetcher.check_client()
    changed = type("Changed", (Fetcher.PartitionRecords,), {"take": lambda self, n=None, more=None: []})
    monkeypatch.setattr(Fetcher, "PartitionRecords", changed)
    with pytest.raises(StreamError, match=r"kafka-python .* cannot be bounded: Changed.take changed"):
        kafka_source("127.0.0.1:1", "t", "g")
