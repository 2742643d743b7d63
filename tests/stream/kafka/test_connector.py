"""The connector: outages are retried, and a client that nobody waits for any more is disposed of."""

from __future__ import annotations

import threading

import pytest

from flexd.core.errors import StreamError
from flexd.stream.kafka.connector import MAX_HUNG, Connector
from tests.support.until import until


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
    assert connector.get(5.0) == 1 + MAX_HUNG
    assert connector.problem is None
    until(lambda: sorted(peer.disposed) == list(range(1, 1 + MAX_HUNG)))


def test_closing_during_an_attempt_disposes_of_its_client():
    peer = Peer()
    peer.gate.clear()
    connector = peer.connector()
    assert connector.get(0.0) is None
    connector.close(0.05)
    peer.gate.set()
    until(lambda: peer.disposed == [1])
