"""The ingest thread: exactly-once counting across crashes, full disks, failing sources, and concurrent readers."""

from __future__ import annotations

import pytest

from flexd.core.errors import SnapshotError, StreamError
from flexd.sketch.snapshot import SnapshotStore
from tests.support.ingest_fakes import (
    DEADLINE,
    LOG,
    FakeSource,
    KillAt,
    Killed,
    KillingStore,
    assert_same_state,
    make_ingestor,
    make_message,
    run_to_the_end,
    state_of,
    uninterrupted_state,
    wait_until,
)


@pytest.mark.parametrize("step", ["poll", "save", "saved", "commit", "committed"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_access_is_counted_once_after_a_kill_at_any_step(tmp_path, step, n):
    expected = uninterrupted_state(tmp_path)
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
    assert_same_state(state_of(ingestor), expected)
    assert source.restored is not None or n == 1 or step == "poll"


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
    wait_until(lambda: ingestor.stats().snapshot_failures >= 3 and ingestor.stats().messages == 24)
    stats = ingestor.stats()
    assert source.committed == [], "nothing may be committed before it is durable"
    assert "no space left" in stats.problem
    assert stats.not_ready == (f"snapshots: {stats.problem}",)
    assert stats.connected, "the source has no problem"
    store.full = False
    wait_until(lambda: ingestor.stats().snapshots >= 1 and ingestor.stats().problem is None)
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p0": 12, "p1": 12}


def test_source_errors_are_retried_and_do_not_end_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr("flexd.ingest.ingestor._BACKOFF_SECONDS", (0.001, 0.01))
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
