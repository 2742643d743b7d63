"""Inspecting a topic: its newest messages, and errors with a remedy."""

from __future__ import annotations

import pytest

from flexd.core.errors import StreamError
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.topic_admin import inspect_topic


def test_the_newest_messages_of_every_partition(tansu):
    topic = "inspected"
    tansu.create_topic(topic, partitions=2)
    sink = KafkaSink(tansu.bootstrap_servers, topic)
    for number in range(12):
        sink.send(f"{number}".encode())
        # One batch each: this broker counts offsets by batches.
        sink.flush(20)
    sink.close()
    found = inspect_topic(tansu.bootstrap_servers, topic, {}, messages=4, timeout_seconds=20)
    assert (found.partitions, found.messages) == (2, 12)
    everything = inspect_topic(tansu.bootstrap_servers, topic, {}, messages=100, timeout_seconds=20)
    assert sorted(int(payload) for payload in everything.payloads) == list(range(12))
    assert 1 <= len(found.payloads) <= 4
    assert 11 in [int(payload) for payload in found.payloads]
    missing = inspect_topic(tansu.bootstrap_servers, "not-there", {}, messages=10, timeout_seconds=20)
    assert (missing.partitions, missing.payloads) == (0, ())


def test_an_unreachable_broker_is_named_within_the_deadline():
    with pytest.raises(StreamError, match=r"127\.0\.0\.1:1"):
        inspect_topic("127.0.0.1:1", "t", {}, messages=1, timeout_seconds=1.5)


def test_unknown_client_options_are_an_error_with_a_remedy(tansu):
    with pytest.raises(StreamError) as refused:
        inspect_topic(tansu.bootstrap_servers, "t", {"nonsense": 1}, messages=1, timeout_seconds=5)
    assert "client_options" in refused.value.remedy
