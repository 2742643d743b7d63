"""The ingest thread: counting once across crashes, bad input, full disks, and readers beside it."""

from __future__ import annotations

import base64
import json
import time

import numpy as np
import pytest

from flexd.core.errors import CodecError, SnapshotError, StreamError
from flexd.ingest import GENERATION_RESERVE, Ingestor
from flexd.ingest.dead_letters import DeadLetterFile
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.codecs.codec import decode, encode_arrow
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from flexd.stream.types import AccessBatch
from tests.support.ingest_fakes import (
    DEADLINE,
    LOG,
    SETTINGS,
    T0,
    TABLES,
    FakeSource,
    Killed,
    KillingStore,
    make_ingestor,
    make_message,
    run_to_the_end,
    state_of,
    wait_until,
)


def _uninterrupted(tmp_path) -> tuple[dict, dict[str, np.ndarray]]:
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path / "uninterrupted", 2))
    run_to_the_end(ingestor, source)
    return state_of(ingestor)


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
        ingestor = make_ingestor(source, store, snapshot_interval_seconds=0.0)
        try:
            run_to_the_end(ingestor, source)
            break
        except Killed:
            kills += 1
    assert kills == 1
    _assert_same(state_of(ingestor), expected)
    assert source.restored is not None or n == 1 or step == "poll"


def test_killed_again_and_again(tmp_path):
    expected = _uninterrupted(tmp_path)
    random = np.random.default_rng(5)
    for _ in range(200):
        kill = KillAt(str(random.choice(["poll", "save", "saved", "commit", "committed"])), int(random.integers(1, 4)))
        source = FakeSource(LOG, kill)
        ingestor = make_ingestor(source, KillingStore(tmp_path / "state", 2, kill), snapshot_interval_seconds=0.0)
        try:
            run_to_the_end(ingestor, source)
            break
        except Killed:
            pass
    else:
        pytest.fail("never reached the end")
    _assert_same(state_of(ingestor), expected)


def test_snapshot_carries_what_the_caller_gave_and_profiles_keep_counting(tmp_path):
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2), extra_state=lambda: {"plan": 17})
    assert ingestor.restored == {}
    assert [ingestor.profile().generation for _ in range(3)] == [1, 2, 3]
    run_to_the_end(ingestor, source)
    assert source.closed
    assert source.committed == [{"p0": 12, "p1": 12}]
    after = FakeSource(LOG)
    again = make_ingestor(after, SnapshotStore(tmp_path, 2))
    assert again.restored == {"plan": 17}
    assert again.profile().generation == 3 + GENERATION_RESERVE + 1
    assert again.profile().samples == ingestor.profile().samples > 0


def test_state_of_other_tables_is_reported_and_not_mixed_in(tmp_path):
    source = FakeSource(LOG)
    run_to_the_end(make_ingestor(source, SnapshotStore(tmp_path, 2)), source)
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
        run_to_the_end(make_ingestor(source, store, snapshot_interval_seconds=0.0), source)
    newest = store.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-5])
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path / "state", 3))
    run_to_the_end(ingestor, source)
    assert str(newest) in ingestor.stats().restore_problems[0]
    _assert_same(state_of(ingestor), expected)


def test_only_damaged_snapshots_start_empty_from_the_earliestmake_message(tmp_path):
    expected = _uninterrupted(tmp_path)
    store = SnapshotStore(tmp_path / "state", 3)
    store.save({}, {}).write_bytes(b"junk")
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, store)
    run_to_the_end(ingestor, source)
    assert ingestor.stats().restore_problems
    _assert_same(state_of(ingestor), expected)


def test_full_disk_is_counted_and_retried_while_ingest_goes_on(tmp_path):
    class FullStore(SnapshotStore):
        full = True

        def save(self, meta, arrays):
            if self.full:
                raise SnapshotError("no space left", remedy="free some")
            return super().save(meta, arrays)

    store, source = FullStore(tmp_path, 2), FakeSource(LOG)
    ingestor = make_ingestor(source, store, snapshot_interval_seconds=0.01)
    ingestor.start()
    wait_until(lambda: ingestor.stats().snapshot_failures >= 3 and ingestor.stats().messages == 24)
    stats = ingestor.stats()
    assert source.committed == [], "nothing may be committed before it is durable"
    assert "no space left" in stats.problem
    store.full = False
    wait_until(lambda: ingestor.stats().snapshots >= 1 and ingestor.stats().problem is None)
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p0": 12, "p1": 12}


def test_a_merge_that_breaks_off_is_never_saved(tmp_path, monkeypatch):
    """Half of another daemon's counts without its positions would be counted again: the last snapshot is right."""
    store = SnapshotStore(tmp_path, 2)
    ingestor = make_ingestor(FakeSource(LOG), store)
    other, counts = make_ingestor(FakeSource({}), None).drain()
    ingestor.start()
    wait_until(lambda: ingestor.stats().lag_messages == 0 and ingestor.stats().messages == 24)
    ingestor.request_snapshot()
    wait_until(lambda: ingestor.stats().snapshots == 1)
    committed = []
    monkeypatch.setattr(type(other), "merge", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        ingestor.merge(other, counts, lambda: committed.append(1))
    wait_until(lambda: not ingestor.stats().running)
    assert not committed
    assert "partially merged" in ingestor.stats().problem
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
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2), snapshot_interval_seconds=0.01)
    real = ingestor._restore_positions

    def restore() -> None:
        if error := next(restores, None):
            raise error
        real()

    monkeypatch.setattr(ingestor, "_restore_positions", restore)
    ingestor.start()
    wait_until(lambda: ingestor.stats().messages == 24 and ingestor.stats().commit_failures > 0)
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
    ingestor = make_ingestor(
        source, SnapshotStore(tmp_path, 1), decode=odd, max_message_bytes=4096, dead_letters=letters
    )
    run_to_the_end(ingestor, source)
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
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2))
    ingestor.start()
    rates = []
    try:
        for i in range(3):
            source.log["p0"].append(make_message(2 * i))
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
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 1), decode=fail)
    run_to_the_end(ingestor, source)
    rejected = ingestor.stats().rejected_messages
    assert len(rejected) == 65
    assert sum(rejected.values()) == 200


def test_profiles_while_ingesting_are_consistent(tmp_path):
    source = FakeSource({"p": [make_message(i) for i in range(24)] * 20})
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 1), snapshot_interval_seconds=0.01)
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

    messages = [make_message(i) for i in range(20)]
    write(messages[:12])
    seen = 0
    for expected in (12, 8):
        ingestor = make_ingestor(
            FileLogSource(tmp_path / "log"), SnapshotStore(tmp_path / "state", 2), snapshot_interval_seconds=0.05
        )
        ingestor.start()
        wait_until(lambda ingestor=ingestor, expected=expected: ingestor.stats().messages == expected)
        assert ingestor.stop(DEADLINE)
        seen += ingestor.stats().accesses
        write(messages[12:])
    whole = make_ingestor(source := FakeSource({"p0": messages}), SnapshotStore(tmp_path / "whole", 2))
    run_to_the_end(whole, source)
    assert seen == whole.stats().accesses
    _assert_same(state_of(ingestor), state_of(whole))
