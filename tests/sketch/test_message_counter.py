"""Decoding and counting of messages, rejections by reason, arrival, skew of event times, and rates."""

from __future__ import annotations

import base64
import json
import math
import time

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.sketch import ingestor as ingestor_module
from flexd.sketch.ingestor import (
    RATE_SECONDS,
    SAMPLES_OF_EACH_REASON,
    SKEW_SECONDS,
    DeadLetterFile,
    MessageCounter,
    RateMeter,
)
from flexd.sketch.sketch_set import AccessCounts, SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings
from flexd.stream.codec import decode, encode_arrow
from flexd.stream.offsets_in_work import OffsetsInWork
from flexd.stream.types import AccessBatch, StreamMessage
from tests.support.ingest_fakes import (
    T0,
    FakeSource,
    make_ingestor,
    run_to_the_end,
)


def test_bad_input_is_counted_by_reason_and_sampled(tmp_path, monkeypatch):
    def odd(payload, limit):
        if payload == b"crash":
            raise RuntimeError("a bug")
        return decode(payload, limit)

    good = [AccessBatch("small", np.array([-1, 3, 200, 3], dtype=np.int32), 0, T0)]
    unknown = [AccessBatch("who", np.arange(5, dtype=np.int32), 0, T0)]
    bad = [b"crash", b"\xff\xff\xff\xff\x10", b"{bad", encode_arrow(unknown), b"x" * 5000, b"", b"{bad"]
    log = {"p": [encode_arrow(good), *bad, encode_arrow(good)]}
    source = FakeSource(log)
    letters = DeadLetterFile(tmp_path / "dead.jsonl", 100_000, 64)
    monkeypatch.setattr(ingestor_module, "decode_message", odd)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 1), max_message_bytes=4096, dead_letters=letters)
    run_to_the_end(ingestor, source)
    counter = ingestor.counter
    assert counter.messages == 9
    assert counter.bytes == sum(len(message) for message in log["p"])
    assert counter.rejected == {"internal_error": 1, "corrupt": 1, "bad_json": 2, "too_large": 1, "empty": 1}
    assert counter.accesses == AccessCounts(accepted=4, unknown_table=5, negative_row=2, row_out_of_range=2)
    assert ingestor.sketches.query("small", np.array([3])).tolist() == pytest.approx([4.0])
    lines = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert letters.written == len(lines) == 11
    large = next(line for line in lines if line["reason"] == "too_large")
    assert (large["partition"], large["offset"], large["size"]) == ("p", 5, 5000)
    assert base64.b64decode(large["first_bytes"]) == b"x" * 64
    assert (tmp_path / "dead.jsonl").stat().st_mode & 0o777 == 0o600


NOW = 1.7e9


@pytest.fixture
def counter(monkeypatch) -> MessageCounter:
    monkeypatch.setattr(time, "time", lambda: NOW)
    sketches = SketchSet([TableSpec("t", 8, 4)], SketchSettings(2**20, 3600.0, 300.0))
    return MessageCounter(sketches, DeadLetterFile(), 10_000, OffsetsInWork())


def test_a_broker_whose_clock_is_ahead_moves_no_arrival_beyond_now(counter):
    assert counter._arrival(StreamMessage("t/0", 0, b"", NOW + 86_400)) == NOW
    assert counter._arrival(StreamMessage("t/0", 0, b"", NOW - 10)) == NOW, "a partition's time does not go back"


@pytest.mark.parametrize("appended_seconds", [None, NOW - 50.0])
def test_messages_are_counted_by_their_arrival(counter, appended_seconds):
    arrival = NOW if appended_seconds is None else appended_seconds
    for event in (arrival - 5, arrival + 250, arrival + 86_400):
        payload = encode_arrow([AccessBatch("t", np.array([1], np.int32), 0, event)])
        counter.count(StreamMessage("p", 0, payload, appended_seconds))
    assert counter.accesses == AccessCounts(accepted=3, future_clamped=1, late=1)
    assert counter._sketches.newest_event_seconds == arrival + 250
    counter.end_window(0.0)
    assert counter.skew_seconds == (-5.0, 86_400.0)
    counter.end_window(SKEW_SECONDS)
    assert math.isnan(counter.skew_seconds[1]), "that of the last window alone"


@pytest.mark.parametrize("every_seconds", [0.1, 30.0])
def test_the_rate_is_that_of_the_last_window(every_seconds: float) -> None:
    """Of continuous streams, and of taps that send one message a rank and then nothing for half a minute."""
    meter, messages, due = RateMeter(100.0), 0, 100.0
    for tick in range(1, 4001):
        now = 100.0 + tick / 10
        while due < min(now, 300.0):
            messages, due = messages + 1, due + every_seconds
        meter.update(now, messages, 100 * messages)
        if now in (110.0, 290.0):
            assert meter.messages_per_second == pytest.approx(1 / every_seconds, rel=0.02 if now > 110.0 else 3.0)
            assert meter.accesses_per_second == pytest.approx(100 * meter.messages_per_second)
    assert now - 300.0 > RATE_SECONDS
    assert meter.accesses_per_second == 0


def test_dead_letters_are_bounded_and_rare_reasons_survive(tmp_path):
    path = tmp_path / "deep" / "dead.jsonl"
    letters = DeadLetterFile(path, 40_000, 100)
    for i in range(10_000):
        letters.record("frequent", "x" * 1000, StreamMessage("p", i, bytes(5000)))
    letters.record("rare", "", StreamMessage("p", 1, memoryview(b"abc")))
    files = list(path.parent.iterdir())
    assert sum(file.stat().st_size for file in files) <= 40_000
    reasons = [json.loads(line)["reason"] for file in files for line in file.read_text().splitlines()]
    assert letters.written == SAMPLES_OF_EACH_REASON + len([7, 8, 9, 10, 11, 12, 13]) + 1
    assert reasons.count("rare") == 1
    for i in range(3000):
        letters.record(f"r{i}", "x" * 200, StreamMessage("p", i, bytes(100)))
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 40_000
    unwritable = DeadLetterFile(path / "no-directory", 40_000, 100)
    unwritable.record("r", "", StreamMessage("p", 0, b""))
    assert (unwritable.written, unwritable.failures) == (0, 1)
    none = DeadLetterFile(tmp_path / "none", 0, 100)
    none.record("r", "", StreamMessage("p", 0, b""))
    assert not (tmp_path / "none").exists()
