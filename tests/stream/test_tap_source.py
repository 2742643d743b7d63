"""The tap source: its contract with its reader, and the states that it returns to the control channel."""

import threading

import pytest

from flexd.core.errors import StreamError
from flexd.stream.tap_source import TapCountsState, TapSource, partition_of
from flexd.stream.types import Source

A, B = partition_of("a1", 0, "s0"), partition_of("a1", 1, "s1")


def opened(positions: dict[str, int] | None = None, **options: float) -> TapSource:
    source = TapSource(**options)
    source.restore(positions or {})
    assert source.poll(0.0) == []
    source.set_live([A, B])
    return source


def test_nothing_is_accepted_before_the_saved_positions_are_restored():
    source = TapSource()
    assert isinstance(source, Source)
    assert (source.record_offer(A, 4), source.deliver(A, 4, b"early")) == (TapCountsState.UNKNOWN, False)
    source.restore({A: 5})
    assert source.record_offer(A, 4) is TapCountsState.UNKNOWN
    source.poll(0.0)
    assert source.record_offer(A, 4) is TapCountsState.DURABLE, "the snapshot holds it: it must not be counted again"


def test_counts_are_missing_then_received_then_durable():
    source = opened()
    assert (source.record_offer(A, 0), source.lag()) == (TapCountsState.MISSING, 1)
    assert source.deliver(A, 0, b"x")
    assert source.record_offer(A, 0) is TapCountsState.RECEIVED, "queued, not polled"
    assert (source.deliver(A, 0, b"x"), source.queued_bytes) == (False, 1)
    (message,) = source.poll(1.0)
    assert (message.partition, message.offset, message.payload) == (A, 0, b"x")
    assert (source.positions(), source.lag()) == ({A: 1}, 0)
    assert (source.deliver(A, 0, b"x"), source.poll(0.0)) == (False, [])
    assert source.record_offer(A, 0) is TapCountsState.RECEIVED, "polled, in no snapshot"
    assert (source.durable_before(A), source.commit({A: 1})) == (0, None)
    assert (source.record_offer(A, 0), source.durable_before(A)) == (TapCountsState.DURABLE, 1)


def test_counts_that_no_rank_keeps_are_reported_as_lost():
    source = opened({A: 2})
    assert source.deliver(A, 5, b"x")
    assert sum(source.losses().messages.values()) == 3
    source.poll(1.0)
    assert source.positions() == {A: 6}


def test_poll_returns_on_a_delivery_and_at_its_deadline():
    source = opened()
    threading.Timer(0.05, lambda: source.deliver(A, 0, b"x")).start()
    assert len(source.poll(20.0)) == 1
    assert source.poll(0.05) == []
    source.close()
    source.close()
    with pytest.raises(StreamError):
        source.poll(0.0)
    assert source.record_offer(A, 1) is TapCountsState.UNKNOWN


def test_partitions_of_replaced_processes_are_dropped_after_a_while_and_live_ones_never():
    source = opened({A: 3, B: 4, partition_of("a0", 0, "old"): 9}, forget_seconds=0.0)
    assert source.positions() == {A: 3, B: 4}
    source.set_live([A])
    assert source.positions() == {A: 3}
