"""Restoring the newest usable snapshot."""

from __future__ import annotations

import pytest

from flexd.core.errors import UnusableStateError
from flexd.core.keyspace import TableSpec
from flexd.ingest import GENERATION_RESERVE, Ingestor
from flexd.sketch.snapshot import SnapshotStore
from tests.support.ingest_fakes import (
    LOG,
    SETTINGS,
    FakeSource,
    KillAt,
    Killed,
    assert_same_state,
    make_ingestor,
    run_to_the_end,
    state_of,
    uninterrupted_state,
)


def test_a_snapshot_restores_the_extra_state_and_profile_numbers_continue(tmp_path):
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


def test_unusable_state_is_renamed_where_the_daemon_may_start_empty(tmp_path):
    source = FakeSource(LOG)
    run_to_the_end(make_ingestor(source, SnapshotStore(tmp_path, 2)), source)
    store = SnapshotStore(tmp_path, 2)
    source = FakeSource(LOG)
    other = Ingestor(source, [TableSpec("other", 200, 4)], SETTINGS, store, poll_seconds=0.01, start_empty=True)
    assert other.profile().samples == 0
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot-000000000001.flexd.unusable"]
    run_to_the_end(other, source)
    assert source.restored is None


def test_damaged_newest_snapshot_is_reported_and_the_previous_continued(tmp_path):
    expected = uninterrupted_state(tmp_path)
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
    assert newest.with_name(f"{newest.name}.unusable").exists()
    assert_same_state(state_of(ingestor), expected)


def test_only_damaged_snapshots_are_refused_or_start_empty_from_the_earliest_message(tmp_path):
    expected = uninterrupted_state(tmp_path)
    store = SnapshotStore(tmp_path / "state", 3)
    store.save({}, {}).write_bytes(b"junk")
    source = FakeSource(LOG)
    with pytest.raises(UnusableStateError, match="flexd state reset"):
        make_ingestor(source, store)
    ingestor = make_ingestor(source, store, start_empty=True)
    assert store.paths() == []
    run_to_the_end(ingestor, source)
    assert ingestor.stats().restore_problems
    assert_same_state(state_of(ingestor), expected)
