"""The ingest thread: exactly-once counting across crashes, full disks, failing sources, and concurrent readers."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from flexd.core.errors import SnapshotError, StreamError
from flexd.sketch import ingestor as ingestor_module
from flexd.sketch import snapshot
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.codec import decode, encode_arrow
from flexd.stream.types import AccessBatch
from tests.support.ingest_fakes import (
    DEADLINE,
    LOG,
    SETTINGS,
    T0,
    TABLES,
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

UNDECAYED = dataclasses.replace(SETTINGS, half_life_seconds=None, memory_bytes=6_000_000, logarithmic=False)


def _log(partitions: int, messages: int) -> dict[str, list[bytes]]:
    def message(i: int) -> bytes:
        random = np.random.default_rng(i)
        lengths = np.array([300, 100], dtype=np.int32)
        return encode_arrow(
            [AccessBatch(t.name, random.zipf(1.3, 400) % (t.rows + 3) - 1, i % 4, T0 + i, lengths) for t in TABLES]
        )

    return {f"p{p}": [message(p * 1000 + i) for i in range(messages)] for p in range(partitions)}


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
    wait_until(lambda: ingestor.counter.messages == 24 and ingestor.snapshots.commit_failures > 0)
    assert ingestor.running
    assert ingestor.failures["stream"] == 5
    assert ingestor.problems() == []
    assert ingestor.stop(DEADLINE)
    assert not ingestor.running


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


def test_positions_of_a_snapshot_are_those_of_its_counters(tmp_path):
    source = FakeSource(_log(4, 6), per_poll=4)
    store = SnapshotStore(tmp_path, 50)
    ingestor = make_ingestor(source, store, settings=UNDECAYED, snapshot_interval_seconds=0.0)
    ingestor.start()
    wait_until(lambda: source.lag() == 0)
    assert ingestor.stop(DEADLINE)
    seen = set()
    for path in store.paths():
        meta, _ = snapshot.read(path)
        accesses = sum(entry["samples"] for entry in meta["sketches"]["sketches"])
        messages = sum(meta["positions"].values())
        seen.add(messages)
        assert accesses == sum(
            _accepted(source.log[p][i]) for p, end in meta["positions"].items() for i in range(end)
        ), f"{messages} messages"
    assert len(seen) > 3


def _accepted(message: bytes) -> int:
    sketches = SketchSet(TABLES, SketchSettings(2**24, None))
    return sum(sketches.ingest(b.table, b.rows, 0, b.event_time_seconds).accepted for b in decode(message, 2**20))


def test_ingest_continues_while_a_snapshot_is_written_and_positions_are_those_of_the_copy(tmp_path):
    written = threading.Event()

    class SlowStore(SnapshotStore):
        def save(self, meta, arrays):
            written.wait(DEADLINE)
            return super().save(meta, arrays)

    source = FakeSource({"p": _log(1, 60)["p0"]}, per_poll=2)
    gate = threading.Event()
    source.at = lambda step: gate.wait(DEADLINE) if step == "poll" and source.next["p"] >= 20 else None
    store = SlowStore(tmp_path, 5)
    ingestor = make_ingestor(source, store, settings=UNDECAYED)
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
