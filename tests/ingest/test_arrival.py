"""Arrival by the broker's or the daemon's clock, and the skew of event times against it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.ingest.message_counter import ArrivalClock, MessageCounter, decode_message
from flexd.ingest.stats import SKEW_SECONDS
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.types import AccessBatch, Message

NOW = 1.7e9


def appended(seconds: float | None, partition: str = "t/0") -> Message:
    return Message(partition, 0, b"", seconds)


def test_a_broker_whose_clock_is_ahead_moves_no_arrival_beyond_now():
    clock = ArrivalClock(lambda: NOW)
    assert clock.arrival(appended(NOW + 86_400)) == NOW
    assert clock.arrival(appended(NOW - 10)) == NOW, "a partition's time does not go back"


@pytest.mark.parametrize("appended_seconds", [None, NOW - 50.0])
def test_messages_are_counted_by_their_arrival(appended_seconds):
    sketches = SketchSet([TableSpec("t", 8, 4)], SketchSettings(2**20, 3600.0, 300.0))
    counter = MessageCounter(sketches, None, 10_000, decode_message, arrivals=ArrivalClock(lambda: NOW))
    arrival = NOW if appended_seconds is None else appended_seconds
    for time in (arrival - 5, arrival + 250, arrival + 86_400):
        payload = encode_arrow([AccessBatch("t", np.array([1], np.int32), 0, time)])
        counter.count(Message("p", 0, payload, appended_seconds))
    assert counter.accesses.future_clamped == 1
    assert counter.accesses.accepted == 3
    assert sketches.newest_event_seconds == arrival + 250
    counter.skew.update(0.0)
    assert (counter.skew.least_seconds, counter.skew.most_seconds) == (-5.0, 86_400.0)
    counter.skew.update(SKEW_SECONDS)
    assert math.isnan(counter.skew.most_seconds), "that of the last window alone"
