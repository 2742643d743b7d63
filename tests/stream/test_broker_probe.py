"""A quiet topic is not a dead broker, and a dead broker is noticed, however short a poll is."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from flexd.core.errors import StreamError
from flexd.stream.kafka import broker_probe
from flexd.stream.kafka import source as kafka
from flexd.stream.kafka.broker_probe import BrokerProbe
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.source import KafkaSource
from tests.support.reading import poll_until
from tests.support.until import until

pytestmark = pytest.mark.slow

POLL_SECONDS = 0.05


def source_at(address: str, topic: str, options: dict[str, str] | None = None):
    return KafkaSource(address, topic, "g", session_timeout_seconds=6.0, client_options=options)


def send(address: str, topic: str, payloads: list[bytes], options: dict[str, str] | None = None) -> None:
    sink = KafkaSink(address, topic, client_options=options)
    for payload in payloads:
        sink.send(payload)
    sink.flush(30.0)
    assert sink.messages_failed == 0
    sink.close()


def test_a_quiet_topic_of_a_slow_broker_is_no_problem(slow_broker):
    address, make_topic = slow_broker
    topic, options = make_topic(), {"api_version": "2.3"}
    send(address, topic, [b"first"], options)
    source = source_at(address, topic, options)
    try:
        assert [bytes(message.payload) for message in poll_until(source, len)] == [b"first"]
        assert source.problem is None
        told, began = set(), time.monotonic()
        # Long enough for a question and its answer.
        while time.monotonic() - began < broker_probe.SILENT_SECONDS + broker_probe.ANSWER_SECONDS:
            assert source.poll(POLL_SECONDS) == []
            told.add(source.problem)
        assert told == {None}
        send(address, topic, [b"second"], options)
        assert [bytes(message.payload) for message in poll_until(source, len)] == [b"second"]
    finally:
        source.close()


def test_a_stopped_broker_is_noticed_and_the_source_can_be_closed(own_tansu):
    own_tansu.create_topic("quiet", 1)
    send(own_tansu.bootstrap_servers, "quiet", [b"first"])
    source = source_at(own_tansu.bootstrap_servers, "quiet")
    assert [bytes(message.payload) for message in poll_until(source, len)] == [b"first"]
    os.kill(own_tansu.pid, signal.SIGSTOP)
    poll_until(source, lambda _: source.problem is not None)
    assert "broker does not answer" in source.problem
    # The next question is out, or soon will be.
    poll_until(source, lambda _: source._probe._thread is not None)
    began = time.monotonic()
    source.close()
    assert time.monotonic() - began < 10.0
    os.kill(own_tansu.pid, signal.SIGCONT)


class Asked(Exception):
    pass


def outcome_of(probe: BrokerProbe):
    return until(probe.poll, 10.0)


def test_one_question_at_a_time_and_not_one_after_another(monkeypatch):
    probe, answer, asked = BrokerProbe((Asked,)), threading.Event(), []

    def ask(deadline: float) -> str:
        asked.append(deadline - time.monotonic())
        answer.wait(10.0)
        return "here"

    assert probe.poll() is None
    probe.start(ask)
    probe.start(ask)
    assert probe.poll() is None
    answer.set()
    outcome = outcome_of(probe)
    assert outcome.error is None
    assert probe.poll() is None
    probe.start(ask)
    assert probe.poll() is None
    assert len(asked) == 1
    assert 0 < asked[0] <= broker_probe.ANSWER_SECONDS
    monkeypatch.setattr(broker_probe, "SPACING_SECONDS", 0.0)
    probe.start(ask)
    assert outcome_of(probe).error is None
    assert len(asked) == 2


def test_an_expected_error_is_an_outcome_and_another_is_raised(monkeypatch):
    monkeypatch.setattr(broker_probe, "SPACING_SECONDS", 0.0)
    probe = BrokerProbe((Asked,))

    def refuse(deadline: float) -> None:
        raise Asked("no")

    def break_down(deadline: float) -> None:
        raise ZeroDivisionError

    probe.start(refuse)
    assert isinstance(outcome_of(probe).error, Asked)
    probe.start(break_down)
    with pytest.raises(ZeroDivisionError):
        outcome_of(probe)


def test_finishing_waits_for_the_question():
    probe, answer, ended = BrokerProbe((Asked,)), threading.Event(), []

    def ask(deadline: float) -> None:
        answer.wait(10.0)
        ended.append(time.monotonic())

    probe.start(ask)
    threading.Timer(0.2, answer.set).start()
    probe.join()
    assert len(ended) == 1
    assert not probe._thread.is_alive()


def test_a_client_that_came_too_late_takes_no_probe_with_it():
    """Its attempt to connect was given up; the source goes on with the client of another."""
    source, asked = source_at("127.0.0.1:1", "t"), []
    late = LateClient()
    source._disconnect(late)
    assert late.closed
    source._probe.start(asked.append)
    source._probe.join()
    assert len(asked) == 1
    source.close()


class LateClient:
    closed = False

    def close(self, **options: object) -> None:
        self.closed = True


def test_an_answer_that_a_message_overtook_says_nothing(monkeypatch):
    """No broker: the source is asked directly what it makes of an answer."""
    monkeypatch.setattr(kafka, "SILENT_SECONDS", 1e6)
    source = source_at("127.0.0.1:1", "t")
    failed = StreamError("broker gone")
    source._probe = BrokerProbe((StreamError,))

    def fail(deadline: float) -> None:
        raise failed

    def looked(last_answer: float) -> str | None:
        source._last_answer = last_answer
        source._probe_if_silent(NoPartitions())
        return source._problem

    source._probe.start(fail)
    source._probe._thread.join(10.0)
    assert looked(time.monotonic()) is None
    source._probe._started = float("-inf")
    source._probe.start(fail)
    source._probe._thread.join(10.0)
    now = source._probe._result.started
    assert "broker does not answer" in looked(now - 0.001)
    source.close()


class NoPartitions:
    def assignment(self) -> set[object]:
        return set()
