"""Restoring the newest usable snapshot; another configuration or version keeps every count that still fits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flexd.core.errors import UnusableStateError
from flexd.core.keyspace import TableSpec
from flexd.sketch import snapshot
from flexd.sketch.restore import GENERATION_RESERVE
from flexd.sketch.snapshot import SnapshotStore
from tests.support.ingest_fakes import (
    LOG,
    SETTINGS,
    TABLES,
    FakeSource,
    Killed,
    assert_same_state,
    kill_at,
    make_ingestor,
    run_to_the_end,
    state_of,
    uninterrupted_state,
)


def test_profile_numbers_continue_after_a_restart(tmp_path):
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2))
    assert [ingestor.profile().generation for _ in range(3)] == [1, 2, 3]
    run_to_the_end(ingestor, source)
    assert source.closed
    assert source.committed == [{"p0": 12, "p1": 12}]
    after = FakeSource(LOG)
    again = make_ingestor(after, SnapshotStore(tmp_path, 2))
    assert again.profile().generation == 3 + GENERATION_RESERVE + 1
    assert again.profile().samples == ingestor.profile().samples > 0


def test_unusable_state_is_renamed_where_the_daemon_may_start_empty(tmp_path):
    source = FakeSource(LOG)
    run_to_the_end(make_ingestor(source, SnapshotStore(tmp_path, 2)), source)
    store = SnapshotStore(tmp_path, 2)
    source = FakeSource(LOG)
    other = make_ingestor(source, store, [TableSpec("other", 200, 4)], start_empty=True)
    assert other.profile().samples == 0
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-000000000001.flexd.unusable"]
    run_to_the_end(other, source)
    assert source.restored is None


def test_damaged_newest_snapshot_is_reported_and_the_previous_continued(tmp_path, monkeypatch):
    expected = uninterrupted_state()
    kill_at(monkeypatch, "thread.ingest", 5)
    source = FakeSource(LOG)
    store = SnapshotStore(tmp_path / "state", 3)
    with pytest.raises(Killed):
        run_to_the_end(make_ingestor(source, store, snapshot_interval_seconds=0.0), source)
    newest = store.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-5])
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path / "state", 3))
    run_to_the_end(ingestor, source)
    assert str(newest) in ingestor.restored.problems[0]
    assert newest.with_name(f"{newest.name}.unusable").exists()
    assert_same_state(state_of(ingestor), expected)


def test_only_damaged_snapshots_are_refused_or_start_empty_from_the_earliest_message(tmp_path):
    expected = uninterrupted_state()
    store = SnapshotStore(tmp_path / "state", 3)
    store.save({}, {}).write_bytes(b"junk")
    source = FakeSource(LOG)
    with pytest.raises(UnusableStateError, match="flexd state reset"):
        make_ingestor(source, store)
    ingestor = make_ingestor(source, store, start_empty=True)
    assert store.paths() == []
    run_to_the_end(ingestor, source)
    assert ingestor.restored.problems
    assert_same_state(state_of(ingestor), expected)


ROWS = np.arange(200, dtype=np.int64)


@pytest.fixture
def counted(tmp_path):
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2))
    run_to_the_end(ingestor, source)
    return ingestor


def restarted(tmp_path, tables=TABLES, settings=SETTINGS, keep=2):
    return make_ingestor(FakeSource(LOG), SnapshotStore(tmp_path, keep), tables, settings)


def test_a_snapshot_of_a_newer_format_is_refused_and_stays(tmp_path, counted):
    store = SnapshotStore(tmp_path, 2)
    meta, arrays = snapshot.read(store.paths()[0])
    meta["sketches"]["format"] += 1
    newest = store.save(meta, arrays)
    with pytest.raises(UnusableStateError, match="newer flexd"):
        restarted(tmp_path)
    assert newest.exists()
    # Told to start without it, the daemon continues from the snapshot before it.
    after = make_ingestor(FakeSource(LOG), store, start_empty=True)
    assert after.sketches.samples_by_table() == counted.sketches.samples_by_table()
    assert newest.with_name(f"{newest.name}.unusable").exists()


def test_a_table_whose_counters_changed_starts_empty_alone_and_says_so(tmp_path, counted, caplog):
    tables = [dataclasses.replace(table, rows=table.rows + (table.name == "small")) for table in TABLES]
    after = restarted(tmp_path, tables)
    assert np.array_equal(after.sketches.query("large", ROWS), counted.sketches.query("large", ROWS))
    assert after.sketches.samples_by_table() == (0, counted.sketches.samples_by_table()[1])
    assert {outcome.table: outcome.outcome for outcome in after.restored.outcomes} == {
        "small": "emptied",
        "large": "kept",
    }
    assert "table small starts empty: its counters changed" in caplog.text
    run_to_the_end(after, after.source)
    assert after.source.restored == {"p0": 12, "p1": 12}, "the positions stay: nothing is counted twice"


def test_weights_are_those_of_the_whole_stream_and_samples_those_read(counted):
    profile = counted.profile()
    counted.source.read_share = 0.25
    scaled = counted.profile()
    for before, after in zip(profile.tables, scaled.tables, strict=True):
        assert after.weight == pytest.approx(4 * before.weight)
        assert np.array_equal(after.hot_share, before.hot_share)
        assert counted.table_profile(after.table).weight == after.weight
    assert scaled.samples == profile.samples == sum(counted.sketches.samples_by_table())
