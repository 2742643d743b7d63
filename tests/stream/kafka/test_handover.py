"""Handover: partitions that move between members of a group are read exactly once."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from flexd.stream.kafka.handover import Handover
from flexd.stream.kafka.sink import KafkaSink
from flexd.stream.kafka.source import KafkaSource
from flexd.stream.types import Message
from tests.support.until import until


def test_position_of_is_called_again_until_it_succeeds(monkeypatch):
    monkeypatch.setattr("flexd.stream.kafka.handover._BACKOFF_SECONDS", (0.0, 0.0))
    answers = iter([OSError("leader away"), {"t/0": -1}, {"t/0": "x"}, {"t/0": 7, "t/9": 3}])
    requests = []

    def position_of(keys):
        requests.append(list(keys))
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    handover = Handover(position_of, None, None, wait_seconds=1.0)
    assert handover.resolve() == (set(), {})
    handover.add_assigned(["t/1", "t/0"])
    assert handover.unresolved(["t/0", "t/5"]) == {"t/0"}
    assert handover.resolve() == (set(), {})
    assert "leader away" in handover.problem
    assert handover.resolve() == handover.resolve() == (set(), {})
    assert handover.failures == 3
    assert handover.resolve() == ({"t/0", "t/1"}, {"t/0": 7})
    assert handover.problem is None
    assert requests == [["t/0", "t/1"]] * 4
    assert handover.unresolved(["t/0", "t/1"]) == set()
    handover.add_assigned(["t/1"])
    assert handover.unresolved(["t/0", "t/1"]) == {"t/1"}, "every assignment calls it again"


def test_a_failed_callback_is_retried_after_a_back_off():
    requests = []

    def position_of(keys):
        requests.append(keys)
        raise OSError

    handover = Handover(position_of, None, None, wait_seconds=1.0)
    handover.add_assigned(["t/0"])
    for _ in range(5):
        handover.resolve()
    assert len(requests) == 1


def test_a_partition_revoked_during_the_callback_is_not_read():
    def position_of(keys):
        handover.add_revoked(["t/0"])
        return {"t/0": 1, "t/1": 2}

    handover = Handover(position_of, None, None, wait_seconds=1.0)
    handover.add_assigned(["t/0", "t/1"])
    assert handover.resolve()[0] == {"t/1"}


def test_callbacks_run_between_polls_and_errors_do_not_stop_them():
    called = []

    def revoked(keys):
        called.append(("revoked", list(keys), threading.current_thread()))
        raise RuntimeError

    handover = Handover(None, revoked, lambda keys: called.append(("lost", list(keys))), wait_seconds=1.0)
    events = []
    announcer = threading.Thread(target=lambda: events.append(handover.add_revoked(["t/1", "t/0"])))
    announcer.start()
    announcer.join()
    assert called == []
    assert not events[0].is_set()
    handover.run_callbacks()
    assert events[0].is_set(), "an error does not hold the group up"
    handover.add_lost(["t/2"])
    handover.run_callbacks()
    handover.run_callbacks()
    assert called == [("revoked", ["t/0", "t/1"], threading.current_thread()), ("lost", ["t/2"])]
    assert handover.failures == 1
    assert Handover(None, None, None, wait_seconds=1.0).add_revoked(["t/0"]) is None


class Ledger:
    """The positions that a leader keeps: how far each partition has been handed over."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.lock = threading.Lock()
        self.away = False

    def position_of(self, keys):
        with self.lock:
            if self.away:
                raise OSError("leader away")
            return {key: self.positions[key] for key in keys if key in self.positions}


class Member:
    """A member that polls in a thread and hands its messages over to the ledger on revocation."""

    def __init__(self, open_source, ledger: Ledger) -> None:
        self.ledger = ledger
        self.unsent: list[Message] = []
        self.sent: list[Message] = []
        self.revoked: list[str] = []
        self.stopped = threading.Event()
        self.reading = False
        self.source = open_source(position_of=ledger.position_of, on_revoked=self.hand_over, on_lost=self.drop)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stopped.is_set():
            messages = self.source.poll(0.05)
            self.reading = True
            time.sleep(0.002)
            self.unsent += messages
            self.reading = False
        self.source.close()

    def hand_over(self, keys) -> None:
        assert not self.reading, "the callback ran beside what it hands over"
        self.revoked += keys
        with self.ledger.lock:
            for message in self.unsent:
                at = self.ledger.positions.get(message.partition, 0)
                assert message.offset >= at, "read twice"
                self.ledger.positions[message.partition] = message.offset + 1
        self.sent += self.unsent
        self.unsent = []

    def drop(self, keys) -> None:
        pytest.fail(f"lost {keys}")

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join(20.0)
        assert not self.thread.is_alive()


def test_members_of_a_group_hand_partitions_over(tansu):
    topic = f"topic-{uuid.uuid4().hex[:8]}"
    tansu.create_topic(topic, 2)
    group = f"group-{uuid.uuid4().hex[:8]}"
    sink = KafkaSink(tansu.bootstrap_servers, topic)

    def produce(count: int) -> None:
        for i in range(count):
            sink.send(b"%d" % i)
        sink.flush(10.0)

    def open_source(**callbacks) -> KafkaSource:
        return KafkaSource(tansu.bootstrap_servers, topic, group, session_timeout_seconds=3.0, **callbacks)

    ledger = Ledger()
    produce(60)
    first = Member(open_source, ledger)
    until(lambda: len(first.unsent) >= 60)
    ledger.away = True
    second = Member(open_source, ledger)
    until(lambda: first.revoked and second.source.problem and "leader away" in second.source.problem)
    assert len(first.sent) == 60, "handed over before the partitions left"
    produce(40)
    time.sleep(0.3)
    assert not first.unsent
    assert not second.unsent, "a partition is not read before its position is known"
    ledger.away = False
    until(lambda: len(first.unsent) + len(second.unsent) >= 40)
    assert second.unsent, "both read"
    second.stop()
    produce(20)
    until(lambda: len(first.sent + first.unsent + second.sent) >= 120)
    first.stop()
    everything = [(m.partition, m.offset) for m in first.sent + second.sent]
    assert len(everything) == len(set(everything)) == 120
    assert sum(ledger.positions.values()) == 120
    assert not second.unsent, "closing hands over too"
    sink.close()
