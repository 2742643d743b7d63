"""The ingest thread: exactly-once counting across crashes, full disks, failing sources, and concurrent readers."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from flexd.core.errors import SnapshotError, StreamError
from flexd.sketch import ingestor as ingestor_module
from flexd.sketch.snapshot import SnapshotStore
from flexd.stream.codec import encode_arrow
from flexd.stream.types import AccessBatch
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
    wait_until,
)


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
    wait_until(lambda: ingestor.failures["snapshots"] >= 3 and ingestor.counter.messages == 24)
    assert source.committed == [], "nothing may be committed before it is durable"
    ((part, problem),) = ingestor.problems()
    assert part == "snapshots", "the source has no problem"
    assert "no space left" in problem
    store.full = False
    wait_until(lambda: ingestor.snapshots.saved >= 1 and not ingestor.problems())
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p0": 12, "p1": 12}


def test_source_errors_are_retried_and_do_not_end_the_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(ingestor_module, "_BACKOFF_SECONDS", (0.001, 0.01))
    source = FakeSource(LOG)
    fail = iter([StreamError("unreachable"), ValueError("odd"), MemoryError(), OSError(5, "io")])

    def on_poll() -> None:
        if error := next(fail, None):
            raise error

    source.on_poll = on_poll
    source.commit_failure = "broker gone"
    restores = iter([StreamError("not yet"), None])
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2), snapshot_interval_seconds=0.01)
    real = ingestor._restore_positions

    def restore() -> None:
        if error := next(restores, None):
            raise error
        real()

    monkeypatch.setattr(ingestor, "_restore_positions", restore)
    ingestor.start()
    wait_until(lambda: ingestor.counter.messages == 24 and ingestor.snapshots.commit_failures > 0)
    assert ingestor.running
    assert ingestor.failures["stream"] == 5
    assert ingestor.problems() == []
    assert ingestor.stop(DEADLINE)
    assert not ingestor.running


def test_profiles_while_ingesting_are_consistent(tmp_path):
    source = FakeSource({"p": [make_message(i) for i in range(24)] * 6})
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


def test_ingest_continues_while_a_snapshot_is_written_and_positions_are_those_of_the_copy(tmp_path):
    written = threading.Event()

    class SlowStore(SnapshotStore):
        def save(self, meta, arrays):
            written.wait(DEADLINE)
            return super().save(meta, arrays)

    source = FakeSource({"p": [make_message(i) for i in range(60)]}, per_poll=2)
    gate = threading.Event()
    source.on_poll = lambda: source.next["p"] < 20 or gate.wait(DEADLINE)
    store = SlowStore(tmp_path, 5)
    ingestor = make_ingestor(source, store)
    ingestor.snapshots.background = True
    ingestor.snapshots.request()
    ingestor.start()
    wait_until(lambda: source.next["p"] >= 20)
    assert source.committed == [], "nothing is committed before it is durable"
    written.set()
    gate.set()
    wait_until(lambda: source.lag() == 0 and source.committed)
    assert source.committed[0]["p"] < 20
    assert ingestor.stop(DEADLINE)
    assert source.committed[-1] == {"p": 60}


def test_an_idle_stream_decays_in_reads_and_not_in_the_counters(tmp_path, monkeypatch):
    monkeypatch.setattr(ingestor_module, "IDLE_AFTER_SECONDS", 0.05)
    settings = dataclasses.replace(SETTINGS, half_life_seconds=0.2)
    batch = AccessBatch("small", np.array([3], dtype=np.int32), 0, T0)
    source = FakeSource({"p": [encode_arrow([batch])]})
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 1), settings=settings)
    ingestor.start()
    wait_until(lambda: ingestor.table_profile("small").weight > 0)
    wait_until(lambda: ingestor.idle_seconds > 0.4)
    assert 0 < ingestor.table_profile("small").weight < 0.3
    assert ingestor.profile().tables[0].weight < 0.3
    source.problem = "broker away"
    assert ingestor.table_profile("small").weight == 1.0, "an outage is not idleness"
    source.problem = None
    assert ingestor.stop(DEADLINE)
