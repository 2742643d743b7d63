"""Inspecting a topic: its newest messages, and errors with a remedy."""

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
    assert (found.partitions, found.offsets) == (2, 12)
    everything = inspect_topic(tansu.bootstrap_servers, topic, {}, messages=100, timeout_seconds=20)
    assert sorted(int(each.payload) for each in everything.newest) == list(range(12))
    assert b"11" in [each.payload for each in found.newest]
    assert len(found.newest) == 4
    missing = inspect_topic(tansu.bootstrap_servers, "not-there", {}, messages=10, timeout_seconds=20)
    assert (missing.partitions, missing.newest) == (0, ())
