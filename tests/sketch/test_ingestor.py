"""The ingest thread: exactly-once counting across crashes, full disks, failing sources, faults at any stage and
messages that kill their reader; rejections by reason, arrival, skew and rates; concurrent readers."""

import base64
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from flexd.core.errors import SketchError, SnapshotError, StreamError
from flexd.core.keyspace import TableSpec
from flexd.core.supervision import UnsafeStateError
from flexd.sketch import ingestor as ingestor_module
from flexd.sketch import sketch_set
from flexd.sketch.dead_letters import SAMPLES_OF_EACH_REASON, DeadLetterFile
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.ingestor import (
    RATE_SECONDS,
    SKEW_SECONDS,
    Ingestor,
    MessageCounter,
    RateMeter,
)
from flexd.sketch.sketch_set import AccessCounts, SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import AccessSample, SketchSettings, TableSketch
from flexd.stream.codec import decode, encode_arrow
from flexd.stream.file_log.log import FileLogSource
from flexd.stream.types import AccessBatch, OffsetsInWork, StreamMessage
from tests.support.ingest_fakes import (
    DEADLINE,
    LOG,
    SETTINGS,
    T0,
    FakeSource,
    Killed,
    assert_same_state,
    kill_at,
    make_ingestor,
    make_message,
    run_to_the_end,
    state_of,
    uninterrupted_state,
)
from tests.support.reading import write
from tests.support.until import until


@pytest.mark.parametrize(
    "point",
    ["thread.ingest", *(f"snapshot.{step}" for step in ("begin", "copied", "written", "renamed", "committed"))],
)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_access_is_counted_once_after_a_kill_at_any_step(tmp_path, monkeypatch, point, n):
    expected = uninterrupted_state()
    kill_at(monkeypatch, point, n)
    kills = 0
    for _ in range(2):
        source = FakeSource(LOG)
        # A snapshot after every poll: each step is reached often.
        ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2), snapshot_interval_seconds=0.0)
        try:
            run_to_the_end(ingestor, source)
        except Killed:
            kills += 1
    assert kills == 1
    assert_same_state(state_of(ingestor), expected)
    assert source.restored is not None or n == 1


def test_a_full_disk_is_counted_and_retried_while_ingest_continues(tmp_path):
    class FullStore(SnapshotStore):
        full = True

        def save(self, meta, arrays):
            if self.full:
                raise SnapshotError("no space left", remedy="free some")
            return super().save(meta, arrays)

    store, source = FullStore(tmp_path, 2), FakeSource(LOG)
    ingestor = make_ingestor(source, store, snapshot_interval_seconds=0.01)
    ingestor.start()
    until(lambda: ingestor.failures["snapshots"] >= 3 and ingestor.counter.messages == 24)
    assert source.committed == [], "nothing may be committed before it is durable"
    ((part, problem),) = ingestor.problems()
    assert part == "snapshots", "the source has no problem"
    assert "no space left" in problem
    store.full = False
    until(lambda: ingestor.snapshots.saved >= 1 and not ingestor.problems())
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p0": 12, "p1": 12}


def test_source_errors_are_retried_and_do_not_end_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(ingestor_module, "_BACKOFF_SECONDS", (0.001, 0.01))
    source = FakeSource(LOG)
    errors = [StreamError("unreachable"), ValueError("odd"), MemoryError(), OSError(5, "io")]
    source.on_poll = Mock(side_effect=itertools.chain(errors, itertools.repeat(None)))
    source.commit_failure = "broker gone"
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2), snapshot_interval_seconds=0.01)
    monkeypatch.setattr(ingestor, "_restore_positions", Mock(side_effect=[StreamError("not yet"), None]))
    ingestor.start()
    until(lambda: ingestor.counter.messages == 24 and ingestor.snapshots.commit_failures > 0)
    assert ingestor.running
    assert (ingestor.failures["stream"], ingestor.problems()) == (5, [])
    assert ingestor.stop(DEADLINE)
    assert not ingestor.running


def test_ingest_continues_while_a_snapshot_is_written_and_positions_are_those_of_the_copy(tmp_path):
    written = threading.Event()

    class SlowStore(SnapshotStore):
        def save(self, meta, arrays):
            written.wait(DEADLINE)
            return super().save(meta, arrays)

    source = FakeSource({"p": [make_message(i) for i in range(60)]}, per_poll=2)
    gate = threading.Event()
    source.on_poll = lambda: source.next["p"] < 20 or gate.wait(DEADLINE)
    ingestor = make_ingestor(source, SlowStore(tmp_path, 5))
    ingestor.snapshots.background = True
    ingestor.snapshots.request()
    ingestor.start()
    until(lambda: source.next["p"] >= 20)
    assert source.committed == [], "nothing is committed before it is durable"
    written.set()
    gate.set()
    until(lambda: source.lag() == 0 and source.committed)
    assert source.committed[0]["p"] < 20
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p": 60}


def test_an_idle_stream_decays_in_reads_and_not_in_the_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(ingestor_module, "IDLE_AFTER_SECONDS", 0.05)
    settings = dataclasses.replace(SETTINGS, half_life_seconds=0.2)
    source = FakeSource({"p": [encode_arrow([AccessBatch("small", np.array([3], dtype=np.int32), 0, T0)])]})
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 1), settings=settings)
    ingestor.start()
    until(lambda: ingestor.table_profile("small").weight > 0)
    until(lambda: ingestor.idle_seconds > 0.4)
    assert 0 < ingestor.table_profile("small").weight < 0.3
    assert ingestor.profile().tables[0].weight < 0.3
    source.problem = "broker away"
    assert ingestor.table_profile("small").weight == 1.0, "an outage is not idleness"
    source.problem = None
    assert ingestor.stop(DEADLINE)


def test_bad_input_is_counted_by_reason_and_sampled(tmp_path, monkeypatch):
    def odd(payload, limit):
        if payload == b"crash":
            raise RuntimeError("a bug")
        return decode(payload, limit)

    good = [AccessBatch("small", np.array([-1, 3, 200, 3], dtype=np.int32), 0, T0)]
    unknown = [AccessBatch("who", np.arange(5, dtype=np.int32), 0, T0)]
    bad = [b"crash", b"\xff\xff\xff\xff\x10", b"bad", encode_arrow(unknown), b"x" * 5000, b"", b"bad"]
    log = {"p": [encode_arrow(good), *bad, encode_arrow(good)]}
    source = FakeSource(log)
    letters = DeadLetterFile(tmp_path / "dead.jsonl", 100_000, 64)
    monkeypatch.setattr(ingestor_module, "decode_message", odd)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 1), max_message_bytes=4096, dead_letters=letters)
    run_to_the_end(ingestor, source)
    counter = ingestor.counter
    assert (counter.messages, counter.bytes) == (9, sum(len(message) for message in log["p"]))
    assert counter.rejected == {"internal_error": 1, "corrupt": 1, "not_arrow_or_json": 2, "too_large": 1, "empty": 1}
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
    DeadLetterFile(tmp_path / "none", 0, 100).record("r", "", StreamMessage("p", 0, b""))
    assert not (tmp_path / "none").exists()


ROWS, MESSAGES = np.arange(-1, 9, dtype=np.int64), 6
"""Each message has three batches of them, so nine accepted accesses and one negative row in each batch."""
ERRORS = {"memory": MemoryError("no memory"), "sketch": SketchError("malformed")}

STAGES: list[tuple[Any, str]] = [
    (sketch_set.SketchSet, "ingest"),
    (ForwardDecay, "admit"),
    (TableSketch, "fit_unit"),
    (TableSketch, "add"),
    (AccessSample, "add"),
    (sketch_set, "_access_counts"),
    (ingestor_module, "_ingest"),
    (MessageCounter, "_reject"),
    (MessageCounter, "_arrival"),
    (DeadLetterFile, "_record"),
]


def batches(payload: Any, _: int) -> list[AccessBatch]:
    """Decode message i: two batches of one table around one of another."""
    number = int(bytes(payload))
    lengths = np.array([4, 6], dtype=np.int32)
    return [AccessBatch(table, ROWS, 0, T0 + number, lengths) for table in ("small", "large", "small")]


class FaultAt:
    """Raises ``error`` instead of the n-th call of a function, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, n: int, error: Exception) -> None:
        original, calls = getattr(owner, name), [0]

        def call(*args: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == n:
                raise error
            return original(*args, **more)

        monkeypatch.setattr(owner, name, call)
        self.calls = calls


def run_all(tmp_path: Any) -> tuple[Any, bool]:
    """Run an ingest to the end of the stream or of itself; return it, and whether it ended because it had to."""
    source = FakeSource({"p": [str(number).encode() for number in range(MESSAGES)]})
    ingestor = make_ingestor(
        source, SnapshotStore(tmp_path / "state", 2), snapshot_interval_seconds=0.0,
        dead_letters=DeadLetterFile(tmp_path / "dead.jsonl", 100_000, 64),
    )  # fmt: skip
    try:
        run_to_the_end(ingestor, source)
    except UnsafeStateError:
        return ingestor, True
    return ingestor, False


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("owner", "name"), STAGES, ids=[f"{name}" for _, name in STAGES])
def test_a_fault_at_any_stage_counts_each_message_wholly_or_not_at_all(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, n: int, error: Exception
) -> None:
    monkeypatch.setattr(ingestor_module, "decode_message", batches)
    with monkeypatch.context() as patch:
        fault = FaultAt(patch, owner, name, n, error)
        ingestor, ended = run_all(tmp_path)
        reached = fault.calls[0] >= n
    if ended:
        ingestor, again = run_all(tmp_path)
        assert not again
    samples = ingestor.sketches.samples_by_table()
    counter = ingestor.counter
    skipped = sum(counter.rejected.values())
    assert samples == ((MESSAGES - skipped) * 2 * 9, (MESSAGES - skipped) * 9)
    assert skipped <= (1 if reached and not ended else 0)
    if not ended:
        assert (counter.messages, counter.accesses.accepted) == (MESSAGES, sum(samples))
        assert counter.accesses.negative_row == (MESSAGES - skipped) * 3


def count(state: Path) -> None:
    """Count all messages in a child process, which one of them kills."""
    decode_message = ingestor_module.decode_message

    def decode(payload, limit):
        if bytes(payload) == b"poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return decode_message(payload, limit)

    ingestor_module.decode_message = decode
    ingestor = Ingestor(
        FileLogSource(state / "log"), [TableSpec("t", 20, 4)], SketchSettings(2**20, None),
        SnapshotStore(state / "snapshots", 2), dead_letters=DeadLetterFile(state / "dead", 10_000, 100),
        snapshot_interval_seconds=0.01, poll_seconds=0.01, work=OffsetsInWork(state),
    )  # fmt: skip
    ingestor.start()
    until(lambda: ingestor.counter.messages >= 20)
    ingestor.stop(20)
    counts = ingestor.sketches.query("t", np.arange(20)).tolist()
    (state / "result").write_text(json.dumps([counts, ingestor.counter.rejected]))


def test_a_message_that_kills_its_reader_twice_is_skipped_counted_and_kept_as_a_dead_letter(tmp_path):
    messages = [encode_arrow([AccessBatch("t", np.array([number], np.int32), 0, 1e9)]) for number in range(20)]
    messages[7] = b"poison"
    write(tmp_path / "log", messages)
    ends = []
    for _ in range(3):
        process = multiprocessing.get_context("fork").Process(target=count, args=(tmp_path,))
        process.start()
        process.join(100)
        ends.append(process.exitcode)
    assert ends == [-signal.SIGKILL, -signal.SIGKILL, os.EX_OK]
    counts, rejected = json.loads((tmp_path / "result").read_text())
    assert rejected == {"poison_offset": 1}
    assert counts == [1.0] * 7 + [0.0] + [1.0] * 12
    letter = json.loads((tmp_path / "dead").read_text())
    assert (letter["reason"], letter["partition"], letter["offset"]) == ("poison_offset", "p", 7)
