"""The librdkafka source under failure: what the kafka-python one is tested for, where the client decides it."""

from __future__ import annotations

import builtins
import importlib
import socket
import sys
import time
import uuid

import pytest

from flexd.core.errors import PositionLostError, StreamError
from flexd.stream.kafka.confluent import ConfluentSource
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.types import Message


def topic_on(broker) -> str:
    topic = f"topic-{uuid.uuid4().hex[:8]}"
    broker.create_topic(topic, 1)
    return topic


def open_source(broker, topic: str, **options) -> ConfluentSource:
    group = f"group-{uuid.uuid4().hex[:8]}"
    return ConfluentSource(broker.bootstrap_servers, topic, group, session_timeout_seconds=3.0, **options)


def produce(broker, topic: str, first: int, count: int) -> None:
    sink = KafkaSink(broker.bootstrap_servers, topic)
    for i in range(first, first + count):
        sink.send(b"%d" % i)
    sink.flush(10.0)
    sink.close()


def poll_until(source: ConfluentSource, condition, seconds: float = 40.0) -> list[Message]:
    messages: list[Message] = []
    deadline = time.monotonic() + seconds
    while not condition(messages):
        assert time.monotonic() < deadline, f"{len(messages)} messages; problem: {source.problem}"
        messages += source.poll(0.1)
    return messages


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def no_confluent(name, *args, **more):
        if name.startswith("confluent_kafka"):
            raise ImportError("No module named 'confluent_kafka'")
        return real(name, *args, **more)

    monkeypatch.delitem(sys.modules, "flexd.stream.kafka.confluent")
    monkeypatch.setattr(builtins, "__import__", no_confluent)
    with pytest.raises(StreamError, match=r"flexd\[confluent\]"):
        importlib.import_module("flexd.stream.kafka.confluent")


@pytest.mark.parametrize("options", [{"no.such.option": 1}, {"group.id": "mine"}, {"security.protocol": "NONSENSE"}])
def test_wrong_options_of_librdkafka_are_errors(options):
    with pytest.raises(StreamError):
        ConfluentSource("127.0.0.1:1", "t", "g", client_options=options).poll(5.0)


def test_an_unreachable_broker_is_a_problem():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    source = ConfluentSource(address, "t", "g", connect_timeout_seconds=0.3)
    source.restore({"t/0": 1})
    poll_until(source, lambda _: source.problem is not None and "connecting" not in source.problem)
    assert address in source.problem
    assert source.lag() == 0
    assert source.positions() == {"t/0": 1}
    source.close()


@pytest.mark.parametrize("policy", ["earliest", "latest", "fail"])
def test_a_lost_memory_is_noticed_by_librdkafka_too(own_tansu, policy):
    topic = topic_on(own_tansu)
    produce(own_tansu, topic, 0, 10)
    source = open_source(own_tansu, topic, on_position_lost=policy)
    source.restore({f"{topic}/0": 4})
    assert [m.offset for m in poll_until(source, lambda got: len(got) == 6)] == list(range(4, 10))
    own_tansu.kill()
    poll_until(source, lambda _: source.problem is not None)
    own_tansu.start()
    produce(own_tansu, topic, 100, 3)
    if policy == "fail":
        with pytest.raises(PositionLostError):
            poll_until(source, lambda _: False)
    elif policy == "earliest":
        again = poll_until(source, lambda got: len(got) == 3)
        assert [bytes(m.payload) for m in again] == [b"100", b"101", b"102"]
        assert source.positions() == {f"{topic}/0": 3}
    else:
        poll_until(source, lambda _: source.positions_lost == 1)
        produce(own_tansu, topic, 103, 1)
        # The end at the moment of the loss: the client, which fetches on its own, may have seen the log still empty.
        got = poll_until(source, lambda got: got and got[-1].offset == 3)
        assert bytes(got[-1].payload) == b"103"
        assert [m.offset for m in got] == list(range(4 - len(got), 4))
    assert source.positions_lost == 1 or policy == "fail"
    source.close()


def test_out_of_range_is_reported_by_the_client(mock_broker):
    address, make_topic = mock_broker
    topic = make_topic()
    sink = KafkaSink(address, topic, client_options={"api_version": "2.3"})
    for i in range(40):
        sink.send(b"%d" % i)
    sink.flush(10.0)
    sink.close()
    source = ConfluentSource(address, topic, "g", session_timeout_seconds=6.0)
    source.restore({f"{topic}/{i}": 1000 for i in range(4)})
    got = poll_until(source, lambda got: len(got) == 40)
    assert sorted(int(bytes(m.payload)) for m in got) == list(range(40))
    assert 1 <= source.positions_lost <= 4
    assert source.messages_lost == 0
    source.close()
