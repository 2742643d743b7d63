"""The Kafka source under failure: unreachable and hanging brokers, lost logs, rebalances, refused commits."""

import os
import signal
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaTimeoutError, LogTruncationError, OffsetOutOfRangeError
from kafka.structs import TopicPartition

from flexd.core.errors import StreamError
from flexd.stream.kafka import source as source_module
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.source import GAP_SECONDS, TRUSTED_GAPS, GroupPositions, KafkaSource, sampled_partitions
from flexd.stream.types import StreamMessage
from tests.support.reading import kafka_source, poll_until
from tests.support.until import Clock

pytestmark = pytest.mark.slow


def topic_on(broker) -> str:
    topic = f"topic-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic, 1)
    return topic


def open_source(broker, topic: str, group: str = "", **options) -> KafkaSource:
    group = group or f"group-{uuid.uuid4().hex[:8]}"
    own = getattr(broker, "client_options", {})
    return kafka_source(
        broker.bootstrap_servers, topic, group, session_timeout_seconds=2.0, client_options=own, **options
    )


def produce(broker, topic: str, first: int, count: int) -> None:
    options = getattr(broker, "client_options", {})
    sink = KafkaSink(broker.bootstrap_servers, topic, max_wait_seconds=30.0, client_options=options)
    for i in range(first, first + count):
        sink.send(b"%d" % i)
    sink.flush(30.0)
    assert sink.messages_failed == 0
    sink.close()


def test_an_unreachable_broker_is_a_problem_not_an_error():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    source = kafka_source(address, "t", "g", connect_timeout_seconds=0.3)
    poll_until(source, lambda _: source.problem is not None and "connecting" not in source.problem)
    assert address in source.problem
    assert source.lag() == 0
    assert source.commit({"t/0": 1}) is not None
    source.restore({"t/0": 1})
    assert source.positions() == {"t/0": 1}
    source.close()
    sink = KafkaSink(address, "t", connect_timeout_seconds=0.3, max_wait_seconds=0.5)
    with pytest.raises(StreamError):
        sink.send(b"x")
    sink.close()


def test_a_broker_that_lost_its_log_is_noticed(own_tansu):
    """The client itself would wait at its old position for ever.

    The broker creates any requested topic, with three partitions: the reader's request may come before this test's.
    """
    topic = topic_on(own_tansu)
    produce(own_tansu, topic, 0, 10)
    source = open_source(own_tansu, topic)
    source.restore({f"{topic}/0": 4})
    first = poll_until(source, lambda got: len(got) == 6)
    assert [m.offset for m in first] == list(range(4, 10))
    own_tansu.kill()
    own_tansu.start()
    produce(own_tansu, topic, 100, 3)
    again = poll_until(source, lambda got: len(got) == 3)
    assert sorted(bytes(m.payload) for m in again) == [b"100", b"101", b"102"]
    assert (sum(source.losses().positions.values()), sum(source.positions().values())) == (1, 3)
    source.close()


def test_a_topic_that_was_made_again_is_noticed_by_its_id_also_after_a_restart(tansu):
    """It has grown beyond the old position: nothing else tells it from the old one. Two partitions more are new."""
    topic, client = topic_on(tansu), KafkaAdminClient(bootstrap_servers=tansu.bootstrap_servers)
    produce(tansu, topic, 0, 3)
    source = open_source(tansu, topic)
    poll_until(source, lambda got: len(got) == 3)
    positions = source.positions()
    source.close()
    for first in (100, 200):
        client.delete_topics([topic])
        tansu.create_topic(topic, 3)
        produce(tansu, topic, first, 5)
        source = open_source(tansu, topic)
        source.restore(positions)
        got = poll_until(source, lambda got: len(got) == 5)
        assert sorted(int(bytes(m.payload)) for m in got) == list(range(first, first + 5))
        assert source.losses().positions == {"recreated": len(positions) - 1}
        positions = source.positions()
        source.close()
    again = open_source(tansu, topic)
    again.restore(positions)
    produce(tansu, topic, 300, 1)
    assert [bytes(m.payload) for m in poll_until(again, lambda got: len(got) == 1)] == [b"300"]
    assert again.losses().positions == {}
    again.close()
    client.close()


def test_an_out_of_range_error_of_the_broker_resets_the_position(mock_broker):
    topic = mock_broker.create_topic(4)
    produce(mock_broker, topic, 0, 40)
    source = open_source(mock_broker, topic)
    source.restore({f"{topic}/{i}": 1000 for i in range(4)})
    got = poll_until(source, lambda got: len(got) == 40)
    assert sorted(int(bytes(m.payload)) for m in got) == list(range(40))
    assert 1 <= sum(source.losses().positions.values()) <= 4
    assert source.losses().messages == {}
    source.close()


PART = TopicPartition("t", 0)


class ScriptedConsumer:
    """A consumer that returns offsets or raises exceptions from a script, for cases that no test broker has."""

    def __init__(self, *script: list[int] | Exception) -> None:
        self.script = list(script)
        self.seeks: list[tuple[str, int | None]] = []
        self.id: uuid.UUID | None = None

    @property
    def _cluster(self) -> "ScriptedConsumer":
        return self

    def topic_id(self, topic: str) -> uuid.UUID | None:
        return self.id

    def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[StreamMessage]]:
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return {PART: [StreamMessage("t/0", offset, b"%d" % offset) for offset in step]} if step else {}

    def assignment(self) -> set[TopicPartition]:
        return {PART}

    def highwater(self, partition: TopicPartition) -> None:
        return None

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.seeks.append(("to", offset))

    def seek_to_beginning(self, partition: TopicPartition) -> None:
        self.seeks.append(("beginning", None))


def scripted(*script: list[int] | Exception) -> tuple[KafkaSource, ScriptedConsumer]:
    source = kafka_source("nowhere:1", "t", "g")
    consumer = ScriptedConsumer(*script)
    source._connector.client = consumer
    return source, consumer


@pytest.mark.parametrize("error", [OffsetOutOfRangeError({PART: 3}), LogTruncationError({PART: None})])
def test_after_retention_and_truncation_the_earliest_message_is_next(error):
    source, consumer = scripted([0, 1, 2], error, [10, 11])
    source.poll(0.0)
    assert (source.poll(0.0), sum(source.losses().positions.values())) == ([], 1)
    assert consumer.seeks == [("beginning", None)]
    # A rebalance before the first message must not undo it.
    source._seek(consumer, [PART])
    assert consumer.seeks[0] == consumer.seeks[1]
    assert [m.offset for m in source.poll(0.0)] == [10, 11]
    assert (sum(source.losses().messages.values()), source.positions()) == (7, {"t/0": 12})


def test_messages_of_a_topic_made_again_are_fetched_anew_from_every_partition():
    """Those of a partition that the old topic lacked are fetched before the new id is known, and have no position."""
    source, consumer = scripted([0, 1], [0, 1, 2])
    consumer.id = uuid.uuid4()
    source.restore({f"t@{uuid.uuid4()}": 0})
    consumer.seeks.clear()
    assert source.poll(0.0) == []
    assert consumer.seeks == [("beginning", None)]
    assert [m.offset for m in source.poll(0.0)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fetched", "delivered", "seeks"),
    [
        ([[0, 1, 2], [1, 2, 3], [2, 3], [4]], [[0, 1, 2], [3], [], [4]], []),
        ([[0, 1], [3], [2, 3]], [[0, 1], [], [2, 3]], [("to", 2)]),
    ],
    ids=["from before a rebalance", "missing"],
)
def test_every_offset_is_delivered_once_whatever_is_fetched(fetched, delivered, seeks):
    source, consumer = scripted(*fetched)
    assert [[m.offset for m in source.poll(0.0)] for _ in fetched] == delivered
    assert consumer.seeks == seeks


def test_marks_of_transactions_are_no_lag_and_cause_no_wait(tansu):
    """A position that stayed before the last mark would lag for ever, and be lost when retention deletes the mark."""
    topic = topic_on(tansu)
    producer = Producer({"bootstrap.servers": tansu.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(30)
    for number in range(3):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number, partition=0)
        producer.commit_transaction(30)
    source = open_source(tansu, topic)
    got = poll_until(source, lambda got: len(got) == 3 and source.lag() == 0)
    assert [(each.offset, bytes(each.payload)) for each in got] == [(0, b"0"), (2, b"1"), (4, b"2")]
    assert source.positions()[f"{topic}/0"] == 6
    assert source.commit(source.positions()) is None
    assert not source._positions._lasting_gaps, "an offset that a batch covers was waited for"
    assert (source.losses().messages, source.losses().positions) == ({}, {})
    source.close()


def test_a_rebalance_repeats_and_loses_nothing(mock_broker):
    """A second member joins and leaves while messages arrive; each member continues at its position."""
    topic, began = mock_broker.create_topic(2), time.time()
    group = f"group-{uuid.uuid4().hex[:8]}"
    produce(mock_broker, topic, 0, 10)
    first = open_source(mock_broker, topic, group)
    got = poll_until(first, lambda got: len(got) == 10)
    second = open_source(mock_broker, topic, group)
    # The second must not read again what the first has read: the daemon would hand these positions over.
    second.restore(first.positions())
    stop = threading.Event()
    from_second: list[StreamMessage] = []

    def run() -> None:
        while not stop.is_set():
            from_second.extend(second.poll(0.1))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(run)
        try:
            poll_until(first, lambda _: reading.done() or len(first._connector.client.assignment()) == 1)
            # Each says what the other reads, and since when. A member that does not poll holds up a rebalance.
            each = (first, second)
            poll_until(first, lambda _: reading.done() or all(len(one.missing_partitions) == 1 for one in each))
            assert {*first.missing_partitions, *second.missing_partitions} == {f"{topic}/0", f"{topic}/1"}
            (since,) = first.missing_partitions.values()
            assert began < since < time.time()
            first.commit(first.positions())
        finally:
            stop.set()
        reading.result(60)
    second.close()
    handed_over = second.positions()
    poll_until(first, lambda _: len(first._connector.client.assignment()) == 2 and not first.missing_partitions)
    produce(mock_broker, topic, 10, 6)
    rest = poll_until(first, lambda more: len(more) + len(from_second) >= 6)
    first.close()
    everything = [(m.partition, m.offset) for m in got + from_second + rest]
    assert len(set(everything)) == len(everything) == 16
    assert handed_over.keys() <= first.positions().keys()


def test_a_share_of_the_partitions_is_read(mock_broker):
    topic = mock_broker.create_topic(8)
    producer = KafkaProducer(bootstrap_servers=mock_broker.bootstrap_servers, api_version=(2, 3))

    for n in range(80):
        producer.send(topic, b"%d" % n, partition=n % 8)
    producer.flush(10.0)
    chosen = {f"{topic}/{number}" for number in sampled_partitions("job", topic, range(8), 0.4)}
    first = open_source(mock_broker, topic, share=0.4, job="job")
    assert first.read_share == 0.4, "of the configuration, until the partitions are known"
    poll_until(first, lambda got: len(got) == 30 and first.lag() == 0)
    assert (first.read_share, first.positions()) == (3 / 8, dict.fromkeys(chosen, 10))
    assert first.commit(first.positions()) is None
    first.close()
    producer.close()


def test_a_member_without_partitions_has_the_share_of_the_configuration():
    source = kafka_source("nowhere:1", "t", "g", share=0.4, job="job")
    consumer = ScriptedConsumer()
    consumer.assignment = set
    assert source._choose(consumer, set()) == set()
    assert source.read_share == 0.4, "weights are divided by it"


def test_messages_that_retention_deleted_before_the_first_was_read_are_no_lag():
    source, consumer = scripted()
    consumer.highwater = lambda partition: 1000
    consumer.position = lambda partition, timeout_ms: 990
    assert source.lag() == 10
    source.restore({"t/0": 995})
    assert source.lag() == 5


def test_an_added_partition_changes_the_sample_by_one_at_most():
    for count in range(1, 40):
        before, after = (sampled_partitions("job", "t", range(n), 0.3) for n in (count, count + 1))
        assert len(after) == max(1, round(0.3 * (count + 1)))
        assert len(before - after) <= 1
    assert sampled_partitions("job", "t", range(3), 0.01)
    assert sampled_partitions("job", "t", range(3), 1.0) == {0, 1, 2}


KEY = "t/0"


@given(
    hidden=st.dictionaries(st.integers(0, 39), st.floats(0.0, 0.9 * GAP_SECONDS), max_size=12),
    missing=st.sets(st.integers(1, 39), max_size=TRUSTED_GAPS - 1),
    fetch=st.integers(1, 40),
    start=st.sampled_from([None, 0]),
)
@settings(max_examples=200, deadline=None)
def test_every_message_is_delivered_once_and_in_order(
    hidden: dict[int, float], missing: set[int], fetch: int, start: int | None
) -> None:
    """``hidden``: seconds after which an offset becomes visible; ``missing``: offsets that hold no message."""
    clock = Clock()
    positions = GroupPositions("t", clock)
    if start is not None:
        positions.restore({KEY: start})
    else:
        # Without a position the first message that arrives is the beginning.
        hidden = {offset: seconds for offset, seconds in hidden.items() if offset > 0}
    log = [offset for offset in range(40) if offset not in missing]
    got: list[int] = []
    while positions.next.get(KEY, 0) <= log[-1]:
        since = clock.now - 100.0
        position = positions.next.get(KEY, 0)
        offsets = [offset for offset in log if offset >= position and hidden.get(offset, 0.0) <= since][:fetch]
        taken = positions.count_to_gap(KEY, offsets) if offsets else 0
        if taken:
            positions.accept(KEY, offsets[0], offsets[taken - 1])
            got += offsets[:taken]
        clock.now += 0.01
        assert clock.now < 100 + 0.3 * 40
    assert got == log


def test_gaps_of_a_partition_that_has_many_cause_no_waiting() -> None:
    clock = Clock()
    positions = GroupPositions("t", clock)
    positions.restore({KEY: 0})
    for number in range(TRUSTED_GAPS):
        assert positions.count_to_gap(KEY, [10 * number + 5]) == 0
        clock.now += GAP_SECONDS + 0.01
        assert positions.count_to_gap(KEY, [10 * number + 5]) == 1
        positions.accept(KEY, 10 * number + 5, 10 * number + 5)
    assert positions.count_to_gap(KEY, [200, 210, 220]) == 3
    assert positions.count_to_gap("t/1", [5, 7]) == 1, "another partition may have no gaps"


POLL_SECONDS = 0.05


def read_one(source: KafkaSource) -> list[bytes]:
    return [bytes(message.payload) for message in poll_until(source, len, poll_seconds=POLL_SECONDS)]


@pytest.mark.parametrize("error", [None, KafkaTimeoutError()])
def test_a_silent_topic_is_a_problem_if_the_broker_does_not_answer_in_time(monkeypatch, error):
    """A slow broker holds a fetch back for half a second, so its answer may take longer than a poll lasts."""
    monkeypatch.setattr(source_module, "SILENT_SECONDS", 0.0)
    source, consumer = scripted([], [])
    consumer.end_offsets = Mock(side_effect=error, return_value={})
    assert source.poll(0.0) == []
    assert source.problem == (error and "Kafka topic 't' at nowhere:1: broker does not answer (nothing within 3 s)")
    consumer.end_offsets.assert_called_once_with([PART], timeout_ms=3000)


@pytest.mark.parametrize(
    ("ends", "mark", "lost"), [((3, 3), 3, 1), ((3, 10, 3), 3, 0), ((3, 3), 10, 0), ((3, 3), None, 0)]
)
def test_a_position_is_lost_when_the_log_ends_before_it_twice(monkeypatch, ends, mark, lost):
    """By one answer, or by answers without marks of fetches, it is not: a new leader and tansu name an earlier end."""
    monkeypatch.setattr(source_module, "SILENT_SECONDS", 0.0)
    source, consumer = scripted(*[[]] * len(ends))
    source.restore({"t/0": 10})
    consumer.seeks.clear()
    consumer.highwater = lambda partition: mark
    consumer.end_offsets = Mock(side_effect=[{PART: end} for end in ends])
    for _ in ends:
        source.poll(0.0)
    assert sum(source.losses().positions.values()) == lost
    assert consumer.seeks == [("beginning", None)] * lost


def test_a_stopped_broker_is_noticed_and_the_source_can_be_closed(own_tansu, monkeypatch):
    topic = topic_on(own_tansu)
    produce(own_tansu, topic, 1, 1)
    source = open_source(own_tansu, topic)
    assert read_one(source) == [b"1"]
    assert source.problem is None
    monkeypatch.setattr(source_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(source_module, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(source_module, "_CLOSE_SECONDS", 2.0)
    os.kill(own_tansu.pid, signal.SIGSTOP)
    try:
        poll_until(source, lambda _: source.problem is not None, poll_seconds=POLL_SECONDS)
        assert "broker does not answer" in source.problem
        source.close()
    finally:
        os.kill(own_tansu.pid, signal.SIGCONT)
