"""The ingest thread: counting once across crashes, bad input, full disks, and readers beside it."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from flexd.core.errors import CodecError, SnapshotError, StreamError
from flexd.core.keyspace import TableSpec
from flexd.ingest import GENERATION_RESERVE, Ingestor
from flexd.ingest.dead_letters import SAMPLES_OF_EACH_REASON, DeadLetterFile
from flexd.sketch.set_types import SketchSettings
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.codecs.codec import decode, encode_arrow
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from flexd.stream.types import AccessBatch, Message

TABLES = [TableSpec("small", 200, 4), TableSpec("large", 400_000, 4)]
SETTINGS = SketchSettings(memory_bytes=1_000_000, half_life_seconds=40.0, max_future_seconds=1e9, max_hot_rows=100)
T0 = 1.7e9
DEADLINE = 20.0


class Killed(BaseException):
    """The process dies here: nothing of it may be handled."""


class FakeSource:
    """Two partitions of ready messages; ``at`` is called with the name of every step, and may kill."""

    def __init__(
        self, log: Mapping[str, list[bytes]], at: Callable[[str], None] = lambda step: None, per_poll: int = 3
    ):
        self.log = log
        self.at = at
        self.per_poll = per_poll
        self.next = dict.fromkeys(log, 0)
        self.restored: dict[str, int] | None = None
        self.committed: list[dict[str, int]] = []
        self.commit_failure: str | None = None
        self.problem: str | None = None
        self.messages_lost = 0
        self.closed = False
        self.drained = threading.Event()

    def poll(self, timeout_seconds: float) -> list[Message]:
        self.at("poll")
        taken = []
        for partition in sorted(self.log, key=lambda p: self.next[p] / max(1, len(self.log[p]))):
            while len(taken) < self.per_poll and self.next[partition] < len(self.log[partition]):
                offset = self.next[partition]
                taken.append(Message(partition, offset, self.log[partition][offset]))
                self.next[partition] += 1
        if not taken:
            self.drained.set()
            time.sleep(0.001)
        return taken

    def restore(self, positions: Mapping[str, int]) -> None:
        self.restored = dict(positions)
        self.next.update(positions)

    def positions(self) -> dict[str, int]:
        return dict(self.next)

    def lag(self) -> int:
        return sum(len(self.log[p]) - self.next[p] for p in self.log)

    def commit(self, positions: Mapping[str, int]) -> str | None:
        self.at("commit")
        self.committed.append(dict(positions))
        self.at("committed")
        return self.commit_failure

    def close(self) -> None:
        self.closed = True


class KillingStore(SnapshotStore):
    def __init__(self, directory, keep, at: Callable[[str], None]) -> None:
        super().__init__(directory, keep)
        self.at = at

    def save(self, meta, arrays):
        self.at("save")
        path = super().save(meta, arrays)
        self.at("saved")
        return path


def _message(i: int) -> bytes:
    random = np.random.default_rng(i)
    batches = [
        AccessBatch(
            table.name, (random.zipf(1.3, 400) % (table.rows + 9)).astype(np.int64) - 4, i % 4, T0 + 7.0 * i + j, None
        )
        for j, table in enumerate(TABLES)
    ]
    return encode_arrow(batches)


LOG = {"p0": [_message(i) for i in range(0, 24, 2)], "p1": [_message(i) for i in range(1, 24, 2)]}
LOG["p1"][4] = b"garbage"


def _ingestor(source, store, **more) -> Ingestor:
    more.setdefault("snapshot_interval_seconds", 3600.0)
    more.setdefault("save_in_background", False)
    return Ingestor(source, TABLES, SETTINGS, store, poll_seconds=0.01, **more)


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def _state(ingestor: Ingestor) -> tuple[dict, dict[str, np.ndarray]]:
    with ingestor._counters.frozen() as state:
        return state()


def _run_to_the_end(ingestor: Ingestor, source: FakeSource) -> None:
    """In this thread, so that a kill comes through."""

    def stop_when_drained(step: str, before=source.at) -> None:
        before(step)
        if step == "poll" and source.lag() == 0:
            ingestor._stop.set()

    source.at = stop_when_drained
    ingestor.run()


def _uninterrupted(tmp_path) -> tuple[dict, dict[str, np.ndarray]]:
    source = FakeSource(LOG)
    ingestor = _ingestor(source, SnapshotStore(tmp_path / "uninterrupted", 2))
    _run_to_the_end(ingestor, source)
    return _state(ingestor)


def _assert_same(got, expected) -> None:
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    for name, array in expected[1].items():
        assert np.array_equal(got[1][name], array), name


class KillAt:
    """Kills at the n-th occurrence of a step, once."""

    def __init__(self, step: str, n: int) -> None:
        self.step, self.left = step, n

    def __call__(self, step: str) -> None:
        if step == self.step:
            self.left -= 1
            if self.left == 0:
                raise Killed


@pytest.mark.parametrize("step", ["poll", "save", "saved", "commit", "committed"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_killed_anywhere_and_restarted_counts_every_access_once(tmp_path, step, n):
    expected = _uninterrupted(tmp_path)
    kill = KillAt(step, n)
    kills = 0
    for _ in range(20):
        source = FakeSource(LOG, kill)
        store = KillingStore(tmp_path / "state", 2, kill)
        # A snapshot after every poll: each step is reached often.
        ingestor = _ingestor(source, store, snapshot_interval_seconds=0.0)
        try:
            _run_to_the_end(ingestor, source)
            break
        except Killed:
            kills += 1
    assert kills == 1
    _assert_same(_state(ingestor), expected)
    assert source.restored is not None or n == 1 or step == "poll"


def test_killed_again_and_again(tmp_path):
    expected = _uninterrupted(tmp_path)
    random = np.random.default_rng(5)
    for _ in range(200):
        kill = KillAt(str(random.choice(["poll", "save", "saved", "commit", "committed"])), int(random.integers(1, 4)))
        source = FakeSource(LOG, kill)
        ingestor = _ingestor(source, KillingStore(tmp_path / "state", 2, kill), snapshot_interval_seconds=0.0)
        try:
            _run_to_the_end(ingestor, source)
            break
        except Killed:
            pass
    else:
        pytest.fail("never reached the end")
    _assert_same(_state(ingestor), expected)


def test_snapshot_carries_what_the_caller_gave_and_profiles_keep_counting(tmp_path):
    source = FakeSource(LOG)
    ingestor = _ingestor(source, SnapshotStore(tmp_path, 2), save_with=lambda: {"plan": 17})
    assert ingestor.restored == {}
    assert [ingestor.profile().generation for _ in range(3)] == [1, 2, 3]
    _run_to_the_end(ingestor, source)
    assert source.closed
    assert source.committed == [{"p0": 12, "p1": 12}]
    after = FakeSource(LOG)
    again = _ingestor(after, SnapshotStore(tmp_path, 2))
    assert again.restored == {"plan": 17}
    assert again.profile().generation == 3 + GENERATION_RESERVE + 1
    assert again.profile().samples == ingestor.profile().samples > 0


def test_state_of_other_tables_is_reported_and_not_mixed_in(tmp_path):
    source = FakeSource(LOG)
    _run_to_the_end(_ingestor(source, SnapshotStore(tmp_path, 2)), source)
    other = Ingestor(FakeSource(LOG), TABLES[:1], SETTINGS, SnapshotStore(tmp_path, 2))
    assert "other tables" in other.stats().restore_problems[0]
    assert other.profile().samples == 0
    other._stop.set()
    other.run()
    assert other._source.restored is None


def test_damaged_newest_snapshot_is_reported_and_the_previous_continued(tmp_path):
    expected = _uninterrupted(tmp_path)
    source = FakeSource(LOG, KillAt("poll", 4))
    store = SnapshotStore(tmp_path / "state", 3)
    with pytest.raises(Killed):
        _run_to_the_end(_ingestor(source, store, snapshot_interval_seconds=0.0), source)
    newest = store.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-5])
    source = FakeSource(LOG)
    ingestor = _ingestor(source, SnapshotStore(tmp_path / "state", 3))
    _run_to_the_end(ingestor, source)
    assert str(newest) in ingestor.stats().restore_problems[0]
    _assert_same(_state(ingestor), expected)


def test_only_damaged_snapshots_start_empty_from_the_earliest_message(tmp_path):
    expected = _uninterrupted(tmp_path)
    store = SnapshotStore(tmp_path / "state", 3)
    store.save({}, {}).write_bytes(b"junk")
    source = FakeSource(LOG)
    ingestor = _ingestor(source, store)
    _run_to_the_end(ingestor, source)
    assert ingestor.stats().restore_problems
    _assert_same(_state(ingestor), expected)


def test_full_disk_is_counted_and_retried_while_ingest_goes_on(tmp_path):
    class FullStore(SnapshotStore):
        full = True

        def save(self, meta, arrays):
            if self.full:
                raise SnapshotError("no space left", remedy="free some")
            return super().save(meta, arrays)

    store, source = FullStore(tmp_path, 2), FakeSource(LOG)
    ingestor = _ingestor(source, store, snapshot_interval_seconds=0.01)
    ingestor.start()
    _wait(lambda: ingestor.stats().snapshot_failures >= 3 and ingestor.stats().messages == 24)
    stats = ingestor.stats()
    assert source.committed == [], "nothing may be committed before it is durable"
    assert "no space left" in stats.problem
    store.full = False
    _wait(lambda: ingestor.stats().snapshots >= 1 and ingestor.stats().problem is None)
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p0": 12, "p1": 12}


def test_a_merge_that_breaks_off_is_never_saved(tmp_path, monkeypatch):
    """Half of another daemon's counts without its positions would be counted again: the last snapshot is right."""
    store = SnapshotStore(tmp_path, 2)
    ingestor = _ingestor(FakeSource(LOG), store)
    other, tally = _ingestor(FakeSource({}), None).cut()
    ingestor.start()
    _wait(lambda: ingestor.stats().lag_messages == 0 and ingestor.stats().messages == 24)
    ingestor.save_soon()
    _wait(lambda: ingestor.stats().snapshots == 1)
    settled = []
    monkeypatch.setattr(type(other), "merge", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        ingestor.absorb(other, tally, lambda: settled.append(1))
    _wait(lambda: not ingestor.stats().running)
    assert not settled
    assert "half merged" in ingestor.stats().problem
    assert len(list(tmp_path.glob("snapshot-*"))) == 1
    assert ingestor.stats().snapshots == 1


def test_source_errors_are_tried_again_and_nothing_ends_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("flexd.ingest.backoff._BACKOFF_SECONDS", (0.001, 0.01))
    source = FakeSource(LOG)
    fail = iter([StreamError("unreachable"), ValueError("odd"), MemoryError(), OSError(5, "io")])

    def at(step: str) -> None:
        if step == "poll" and (error := next(fail, None)):
            raise error

    source.at = at
    source.commit_failure = "broker gone"
    restores = iter([StreamError("not yet"), None])
    SnapshotStore(tmp_path, 2)
    ingestor = _ingestor(source, SnapshotStore(tmp_path, 2), snapshot_interval_seconds=0.01)
    real = ingestor._restore_positions

    def restore() -> None:
        if error := next(restores, None):
            raise error
        real()

    monkeypatch.setattr(ingestor, "_restore_positions", restore)
    ingestor.start()
    _wait(lambda: ingestor.stats().messages == 24 and ingestor.stats().commit_failures > 0)
    stats = ingestor.stats()
    assert stats.running
    assert stats.source_failures == 5
    assert stats.problem is None
    assert ingestor.stop(DEADLINE)
    assert not ingestor.stats().running


def test_bad_input_is_counted_by_reason_and_sampled(tmp_path):
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
    ingestor = _ingestor(source, SnapshotStore(tmp_path, 1), decode=odd, max_message_bytes=4096, dead_letters=letters)
    _run_to_the_end(ingestor, source)
    stats = ingestor.stats()
    assert stats.messages == 9
    assert stats.bytes == sum(len(message) for message in log["p"])
    assert stats.rejected_messages == {"internal_error": 1, "truncated": 1, "bad_json": 2, "too_large": 1, "empty": 1}
    assert stats.rejected_accesses == {"unknown_table": 5, "negative_row": 2, "row_out_of_range": 2}
    assert stats.accesses == 4
    assert ingestor.query("small", np.array([3])).tolist() == pytest.approx([4.0])
    lines = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert stats.dead_letters == len(lines) == 11
    large = next(line for line in lines if line["reason"] == "too_large")
    assert (large["partition"], large["offset"], large["size"]) == ("p", 5, 5000)
    assert base64.b64decode(large["first_bytes"]) == b"x" * 64
    assert (tmp_path / "dead.jsonl").stat().st_mode & 0o777 == 0o600


def test_messages_that_arrive_rarely_leave_a_rate_until_the_next(tmp_path, monkeypatch):
    window = 0.2
    monkeypatch.setattr("flexd.ingest.rate.WINDOW_SECONDS", window)
    source = FakeSource({"p0": []})
    ingestor = _ingestor(source, SnapshotStore(tmp_path, 2))
    ingestor.start()
    rates = []
    try:
        for i in range(3):
            source.log["p0"].append(_message(2 * i))
            end = time.monotonic() + 6 * window
            while time.monotonic() < end:
                time.sleep(window / 4)
                rates.append(ingestor.stats().accesses_per_second)
    finally:
        ingestor.stop(DEADLINE)
    # The mean of a second is some 600 accesses a message / 1.2 s: it is shown while nothing arrives.
    assert min(rates[-24:]) > 100


def test_reasons_are_bounded(tmp_path):
    def fail(payload, limit):
        raise CodecError("no", reason=bytes(payload).decode())

    source = FakeSource({"p": [str(i).encode() for i in range(200)]})
    ingestor = _ingestor(source, SnapshotStore(tmp_path, 1), decode=fail)
    _run_to_the_end(ingestor, source)
    rejected = ingestor.stats().rejected_messages
    assert len(rejected) == 65
    assert sum(rejected.values()) == 200


def test_dead_letters_are_bounded_and_rare_reasons_survive(tmp_path):
    path = tmp_path / "deep" / "dead.jsonl"
    letters = DeadLetterFile(path, 40_000, 100)
    for i in range(10_000):
        letters.record("frequent", "x" * 1000, Message("p", i, bytes(5000)))
    letters.record("rare", "", Message("p", 1, memoryview(b"abc")))
    files = list(path.parent.iterdir())
    assert sum(file.stat().st_size for file in files) <= 40_000
    reasons = [json.loads(line)["reason"] for file in files for line in file.read_text().splitlines()]
    assert letters.written == SAMPLES_OF_EACH_REASON + len([7, 8, 9, 10, 11, 12, 13]) + 1
    assert reasons.count("rare") == 1
    for i in range(3000):
        letters.record(f"r{i}", "x" * 200, Message("p", i, bytes(100)))
    assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 40_000
    unwritable = DeadLetterFile(path / "no-directory", 40_000, 100)
    unwritable.record("r", "", Message("p", 0, b""))
    assert (unwritable.written, unwritable.failures) == (0, 1)
    none = DeadLetterFile(tmp_path / "none", 0, 100)
    none.record("r", "", Message("p", 0, b""))
    assert not (tmp_path / "none").exists()


def test_profiles_while_ingesting_are_consistent(tmp_path):
    source = FakeSource({"p": [_message(i) for i in range(24)] * 20})
    ingestor = _ingestor(source, SnapshotStore(tmp_path, 1), snapshot_interval_seconds=0.01)
    ingestor.start()
    profiles = []
    while source.lag():
        profiles.append(ingestor.profile(100.0))
    assert ingestor.stop(DEADLINE)
    assert len(profiles) > 1, "a backlog does not keep readers out"
    generations = [profile.generation for profile in profiles]
    assert generations == sorted(set(generations))
    samples = [profile.samples for profile in profiles]
    assert samples == sorted(samples)
    for profile in profiles:
        for table in profile.tables:
            total = table.hot_share.sum() + (table.bin_share * table.bin_rows).sum()
            assert table.weight == 0 or total == pytest.approx(1, abs=0.1)


def test_file_log_to_sketches_and_on_after_a_restart(tmp_path):
    def write(messages: list[bytes]) -> None:
        sink = FileLogSink(tmp_path / "log", "p0")
        for message in messages:
            sink.send(message)
        sink.flush(DEADLINE)
        sink.close()

    messages = [_message(i) for i in range(20)]
    write(messages[:12])
    seen = 0
    for expected in (12, 8):
        ingestor = _ingestor(
            FileLogSource(tmp_path / "log"), SnapshotStore(tmp_path / "state", 2), snapshot_interval_seconds=0.05
        )
        ingestor.start()
        _wait(lambda ingestor=ingestor, expected=expected: ingestor.stats().messages == expected)
        assert ingestor.stop(DEADLINE)
        seen += ingestor.stats().accesses
        write(messages[12:])
    whole = _ingestor(source := FakeSource({"p0": messages}), SnapshotStore(tmp_path / "whole", 2))
    _run_to_the_end(whole, source)
    assert seen == whole.stats().accesses
    _assert_same(_state(ingestor), _state(whole))
