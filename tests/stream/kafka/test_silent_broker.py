"""A quiet topic is not a dead broker, and a dead broker is noticed, however short a poll is."""

from __future__ import annotations

import os
import signal
import time

import pytest

from flexd.stream.kafka import source as source_module
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.source import KafkaSource
from tests.support.reading import kafka_source, poll_until

pytestmark = pytest.mark.slow

POLL_SECONDS = 0.05


def source_at(address: str, topic: str, options: dict[str, str] | None = None):
    return kafka_source(address, topic, "g", session_timeout_seconds=2.0, client_options=options or {})


def send(address: str, topic: str, payloads: list[bytes], options: dict[str, str] | None = None) -> None:
    sink = KafkaSink(address, topic, max_wait_seconds=30.0, client_options=options)
    for payload in payloads:
        sink.send(payload)
    sink.flush(30.0)
    assert sink.messages_failed == 0
    sink.close()


def read_one(source: KafkaSource) -> list[bytes]:
    return [bytes(message.payload) for message in poll_until(source, len, poll_seconds=POLL_SECONDS)]


def test_a_quiet_topic_of_a_slow_broker_is_no_problem(slow_broker, monkeypatch):
    """The broker holds a fetch back for half a second and delays each response, longer than a poll lasts."""
    monkeypatch.setattr(source_module, "SILENT_SECONDS", 0.2)
    address, topic, options = slow_broker.bootstrap_servers, slow_broker.create_topic(4), slow_broker.client_options
    send(address, topic, [b"first"], options)
    source = source_at(address, topic, options)
    try:
        assert read_one(source) == [b"first"]
        assert source.problem is None
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            assert source.poll(POLL_SECONDS) == []
            assert source.problem is None
        send(address, topic, [b"second"], options)
        assert read_one(source) == [b"second"]
    finally:
        source.close()


def test_a_stopped_broker_is_noticed_and_the_source_can_be_closed(own_tansu, monkeypatch):
    own_tansu.create_topic("quiet", 1)
    send(own_tansu.bootstrap_servers, "quiet", [b"first"])
    source = source_at(own_tansu.bootstrap_servers, "quiet")
    assert read_one(source) == [b"first"]
    assert source.problem is None
    monkeypatch.setattr(source_module, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(source_module, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(source_module, "_CLOSE_SECONDS", 2.0)
    os.kill(own_tansu.pid, signal.SIGSTOP)
    try:
        poll_until(source, lambda _: source.problem is not None, poll_seconds=POLL_SECONDS)
        assert "broker does not answer" in source.problem
        began = time.monotonic()
        source.close()
        assert time.monotonic() - began < 10.0
    finally:
        os.kill(own_tansu.pid, signal.SIGCONT)
