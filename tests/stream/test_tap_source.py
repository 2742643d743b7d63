"""The source that ranks feed themselves: what it promises its reader, and what it tells the control channel."""

from __future__ import annotations

import threading
import time

import pytest

from flexd.core.errors import StreamError
from flexd.stream.tap_source import DeltaState, TapSource, partition_of
from flexd.stream.types import Source

A, B = partition_of("a1", 0, "s0"), partition_of("a1", 1, "s1")


def opened(positions: dict[str, int] | None = None, **options: float) -> TapSource:
    source = TapSource(**options)
    source.restore(positions or {})
    assert source.poll(0.0) == []
    source.alive([A, B])
    return source


def test_nothing_is_taken_before_the_saved_positions_are_there():
    source = TapSource()
    assert isinstance(source, Source)
    assert source.offered(A, 4) is DeltaState.NOT_YET
    assert not source.deliver(A, 4, b"early")
    source.restore({A: 5})
    assert source.offered(A, 4) is DeltaState.NOT_YET
    source.poll(0.0)
    assert source.offered(A, 4) is DeltaState.DURABLE, "the snapshot holds it: it must not be counted again"


def test_a_delta_goes_from_wanted_to_taken_to_durable():
    source = opened()
    assert source.offered(A, 0) is DeltaState.WANTED
    assert source.lag() == 1
    assert source.deliver(A, 0, b"x")
    assert source.offered(A, 0) is DeltaState.TAKEN, "queued, not polled"
    assert source.queued_bytes == 1
    (message,) = source.poll(1.0)
    assert (message.partition, message.offset, message.payload) == (A, 0, b"x")
    assert source.positions() == {A: 1}
    assert source.lag() == 0
    assert source.offered(A, 0) is DeltaState.TAKEN, "polled, in no snapshot"
    assert source.durable(A) == 0
    assert source.commit({A: 1}) is None
    assert source.offered(A, 0) is DeltaState.DURABLE
    assert source.durable(A) == 1


def test_a_delta_is_delivered_once_however_often_it_comes():
    source = opened()
    assert source.deliver(A, 0, b"x")
    assert not source.deliver(A, 0, b"x")
    assert len(source.poll(1.0)) == 1
    assert not source.deliver(A, 0, b"x")
    assert source.poll(0.01) == []
    assert source.positions() == {A: 1}


def test_positions_are_those_of_what_was_polled_not_of_what_is_queued():
    source = opened()
    source.deliver(A, 0, b"x")
    source.deliver(B, 0, b"y")
    assert source.positions().get(A, 0) == 0
    source.poll(1.0)
    assert source.positions() == {A: 1, B: 0}


def test_a_restart_before_the_snapshot_asks_again_and_after_it_does_not():
    source = opened({A: 3, B: 8})
    assert source.offered(A, 3) is DeltaState.WANTED
    assert source.offered(B, 7) is DeltaState.DURABLE
    assert source.messages_lost == 0


def test_going_back_asks_the_ranks_again():
    source = opened()
    source.deliver(A, 0, b"x")
    source.poll(1.0)
    source.restore({})
    source.poll(0.0)
    assert source.offered(A, 0) is DeltaState.WANTED
    assert source.deliver(A, 0, b"x")
    assert source.poll(1.0)[0].payload == b"x"


def test_deltas_that_no_rank_has_any_more_are_counted_as_lost():
    source = opened({A: 2})
    assert source.deliver(A, 5, b"x")
    assert source.messages_lost == 3
    source.poll(1.0)
    assert source.positions() == {A: 6}


def test_poll_wakes_for_a_delivery_and_ends_at_its_deadline():
    source = opened()
    threading.Timer(0.05, lambda: source.deliver(A, 0, b"x")).start()
    assert len(source.poll(20.0)) == 1
    started = time.monotonic()
    assert source.poll(0.05) == []
    assert time.monotonic() - started < 10
    source.close()
    source.close()
    with pytest.raises(StreamError):
        source.poll(0.0)
    assert source.offered(A, 1) is DeltaState.NOT_YET


def test_partitions_of_replaced_processes_are_dropped_after_a_while_and_those_that_train_never():
    source = opened({A: 3, B: 4, partition_of("a0", 0, "old"): 9}, forget_seconds=0.05)
    time.sleep(0.1)
    assert source.positions() == {A: 3, B: 4}
    source.alive([A])
    time.sleep(0.1)
    assert source.positions() == {A: 3}


def test_nothing_is_dropped_while_no_rank_is_there():
    source = TapSource(forget_seconds=0.01)
    source.restore({A: 3})
    source.poll(0.0)
    time.sleep(0.05)
    assert source.positions() == {A: 3}, "a rank that nobody has replaced may still come back with delta 2"
