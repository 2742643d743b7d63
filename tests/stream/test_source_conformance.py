"""The contract of ``Source``, run against every implementation."""

import uuid
from collections.abc import Callable

import pytest

from flexd.config.sections import SyntheticSourceConfig
from flexd.core.errors import StreamError
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from flexd.stream.synthetic import SyntheticSource
from flexd.stream.types import Sink, Source, StreamMessage
from tests.support.reading import kafka_source, poll_until

PARTITIONS = 2


class Stream:
    """A stream under test: produces known messages and opens sources."""

    def __init__(self, open_source: Callable[[], Source], produce: Callable[[int], None] | None) -> None:
        self.open_source = open_source
        self.produce = produce or (lambda count: None)
        self.endless = produce is None


@pytest.fixture
def file_log(tmp_path):
    sinks = [FileLogSink(tmp_path, f"p{i}", segment_bytes=400) for i in range(PARTITIONS)]
    sent = [0]

    def produce(count: int) -> None:
        for _ in range(count):
            sinks[sent[0] % PARTITIONS].send(b"message %d" % sent[0])
            sent[0] += 1
        for sink in sinks:
            sink.flush(1.0)

    yield Stream(lambda: FileLogSource(tmp_path, discovery_seconds=0.01), produce)
    for sink in sinks:
        sink.close()


@pytest.fixture
def synthetic():
    tables = [("a", 1000), ("b", 50)]
    config = SyntheticSourceConfig(kind="synthetic", accesses_per_second=2000)
    return Stream(lambda: SyntheticSource(tables, config, accesses_per_message=8), None)


def kafka_stream(bootstrap: str, topic: str, session_seconds: float, **client_options: str) -> tuple[Stream, Sink]:
    from flexd.stream.kafka.sink import KafkaSink

    sink = KafkaSink(bootstrap, topic, client_options=client_options)
    group = f"group-{uuid.uuid4().hex[:8]}"
    sent = [0]

    def open_source() -> Source:
        return kafka_source(
            bootstrap, topic, group, session_timeout_seconds=session_seconds, client_options=client_options
        )

    def produce(count: int) -> None:
        for _ in range(count):
            sink.send(b"message %d" % sent[0])
            sent[0] += 1
        sink.flush(10.0)

    return Stream(open_source, produce), sink


@pytest.fixture
def kafka_tansu(tansu):
    topic = f"topic-{uuid.uuid4().hex[:8]}"
    tansu.create_topic(topic, PARTITIONS)
    stream, sink = kafka_stream(tansu.bootstrap_servers, topic, 2.0)
    yield stream
    sink.close()


@pytest.fixture
def kafka_mock(mock_broker):
    options = mock_broker.client_options
    stream, sink = kafka_stream(mock_broker.bootstrap_servers, mock_broker.create_topic(4), 2.0, **options)
    yield stream
    sink.close()


@pytest.fixture(params=["file_log", "synthetic", "kafka_tansu", "kafka_mock"])
def stream(request):
    return request.getfixturevalue(request.param)


def read_at_least(source: Source, count: int, seconds: float = 30.0) -> list[StreamMessage]:
    """Read at least ``count`` messages."""
    return poll_until(source, lambda messages: len(messages) >= count, seconds, 0.2)


def by_partition(messages: list[StreamMessage]) -> dict[str, dict[int, bytes]]:
    parts: dict[str, dict[int, bytes]] = {}
    for message in messages:
        part = parts.setdefault(message.partition, {})
        assert not part or message.offset > max(part), "offsets of a partition increase"
        part[message.offset] = bytes(message.payload)
    return parts


def test_contract(stream):
    """The whole contract in one test, because joining a group takes a second."""
    stream.produce(20)
    first = stream.open_source()
    assert isinstance(first, Source)
    assert not any(first.positions().values())
    first.restore({})
    messages = read_at_least(first, 20)
    saved = first.positions()

    # No message is missing, and the positions are those after the returned messages.
    parts = by_partition(messages)
    offsets = {name: offset for name, offset in saved.items() if "@" not in name}
    assert offsets == {name: max(part) + 1 for name, part in parts.items()}
    if not stream.endless:
        assert sorted(p for part in parts.values() for p in part.values()) == sorted(
            b"message %d" % i for i in range(20)
        )
        assert (first.lag(), first.poll(0.05), first.positions()) == (0, [], saved)
    assert (first.commit(saved), first.problem, first.losses().messages) == (None, None, {})

    # An older position repeats the same messages, and only those after it.
    halfway = {name: sorted(part)[len(part) // 2] for name, part in parts.items()}
    first.restore(halfway)
    assert first.positions() == halfway
    stream.produce(5)
    again = by_partition(
        read_at_least(first, len(messages) - sum(sorted(p).index(halfway[n]) for n, p in parts.items()) + 5)
    )
    for name, part in again.items():
        # A partition without messages so far had no position to restore.
        assert min(part) == halfway.get(name, 0)
        known = {offset: payload for offset, payload in parts.get(name, {}).items() if offset in part}
        assert known.items() <= part.items()
    latest = first.positions()
    first.close()
    first.close()
    with pytest.raises(StreamError):
        first.poll(0.01)

    # In another process the restored positions count, not those committed to the broker.
    second = stream.open_source()
    one = sorted(latest)[0]
    second.restore({one: latest[one]})
    stream.produce(4)
    rest = by_partition(
        read_at_least(second, 4 if stream.endless else 4 + sum(len(p) for n, p in parts.items() if n != one))
    )
    assert all(offset >= latest[one] for offset in rest.get(one, {}))
    for name in set(parts) - {one}:
        assert min(rest[name]) == min(parts[name]), "an unknown partition starts at its earliest message"
        assert parts[name].items() <= rest[name].items()
    second.close()
