"""The Kafka sink: a producer is replaced if the broker forgot it, and only then; every message is counted once."""

import threading
from unittest.mock import Mock

import pytest
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
from flexd.stream.kafka.sink import MAX_HUNG, Connector, KafkaSink
from tests.support.until import until


class Broker:
    """A fake of the producer class and the clock: every producer resolves messages at once, with ``answer``."""

    def __init__(self) -> None:
        self.answer: KafkaError | None = None
        self.silent = False
        self.made = 0
        self.now = 100.0

    def producer(self, **options: object) -> Mock:
        self.made += 1
        return Mock(send=self.send)

    def send(self, topic: str, value: bytes) -> Future:
        if self.silent:
            return Future()
        return Future().success(None) if self.answer is None else Future().failure(self.answer)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


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
    assert (replaced_after(sink, broker, 1.0), replaced_after(sink, broker, 0.75)) == (0, 1)
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


def test_bytes_without_an_answer_are_bounded(broker):
    sink = KafkaSink("nowhere:1", "t", max_wait_seconds=0.01, max_unacknowledged_bytes=1000)
    broker.silent = True
    sink.send(b"y" * 600)
    sink.send(b"y" * 600)
    with pytest.raises(StreamError, match="1200 bytes unacknowledged"):
        sink.send(b"z")
    sink.close()


class Peer:
    """A factory of clients that hangs or fails on demand."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.made = 0
        self.disposed: list[int] = []

    def make(self) -> int:
        self.made += 1
        number = self.made
        self.gate.wait(20.0)
        if self.error is not None:
            raise self.error
        return number

    def connector(self, **options) -> Connector[int]:
        defaults = {"timeout_seconds": 20.0, "backoff_seconds": (0.01, 0.02)}
        return Connector("peer", self.make, self.disposed.append, **{**defaults, **options})


def test_outages_are_retried():
    peer = Peer()
    peer.error = ConnectionRefusedError("no listener")
    connector = peer.connector()
    assert connector.get(0.2) is None
    assert "no listener" in connector.problem
    assert 2 <= peer.made <= 21
    peer.error = None
    assert connector.get(5.0) is not None
    assert connector.problem is None


def test_wrong_arguments_are_not_retried():
    peer = Peer()
    peer.error = ValueError("no such option")
    with pytest.raises(StreamError, match="no such option"):
        peer.connector().get(5.0)
    assert peer.made == 1


def test_an_attempt_that_hangs_is_a_problem_and_is_replaced_a_few_times():
    peer = Peer()
    peer.gate.clear()
    connector = peer.connector(timeout_seconds=0.05)
    assert connector.get(0.0) is None
    assert "connecting" in connector.problem
    assert connector.get(0.1) is None
    assert "no answer within 0.05 s" in connector.problem
    until(lambda: connector.get(0.1) is not None or peer.made == 1 + MAX_HUNG)
    for _ in range(3):
        assert connector.get(0.1) is None
    assert peer.made == 1 + MAX_HUNG, "no more threads, however long the peer is silent"
    peer.gate.set()
    assert (connector.get(5.0), connector.problem) == (1 + MAX_HUNG, None)
    until(lambda: sorted(peer.disposed) == list(range(1, 1 + MAX_HUNG)))


def test_closing_during_an_attempt_disposes_of_its_client():
    peer = Peer()
    peer.gate.clear()
    connector = peer.connector()
    assert connector.get(0.0) is None
    connector.close(0.05)
    peer.gate.set()
    until(lambda: peer.disposed == [1])
