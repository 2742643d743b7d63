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


ROWS = np.arange(200, dtype=np.int64)


@pytest.fixture
def counted(tmp_path):
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2))
    run_to_the_end(ingestor, source)
    return ingestor


def restarted(tmp_path, tables=TABLES, settings=SETTINGS, keep=2):
    return make_ingestor(FakeSource(LOG), SnapshotStore(tmp_path, keep), tables, settings)


@pytest.mark.parametrize(
    ("kind", "match"),
    [("damaged", "flexd state reset"), ("newer", "newer flexd"), ("of other tables", "none of its tables")],
)
def test_unusable_state_is_refused_unchanged_or_renamed_where_the_daemon_may_start_without_it(
    tmp_path, counted, kind, match
):
    store, tables = SnapshotStore(tmp_path, 3), TABLES
    (newest,) = store.paths()
    if kind == "damaged":
        newest.write_bytes(b"junk")
    elif kind == "newer":
        meta, arrays = snapshot.read(newest)
        meta["sketches"]["format"] += 1
        newest = store.save(meta, arrays)
    else:
        tables = [TableSpec("other", 200, 4)]
    before = [path.name for path in store.paths()]
    with pytest.raises(UnusableStateError, match=match):
        make_ingestor(FakeSource(LOG), store, tables)
    assert [path.name for path in store.paths()] == before
    source = FakeSource(LOG)
    after = make_ingestor(source, store, tables, start_empty=True)
    assert [path.name for path in store.paths()] == before[1:], "the one before it is continued"
    assert newest.with_name(f"{newest.name}.unusable").exists()
    assert after.restored.problems
    assert after.sketches.samples == (counted.sketches.samples if kind == "newer" else 0)
    run_to_the_end(after, source)
    assert source.restored == ({"p0": 12, "p1": 12} if kind == "newer" else None)
    assert after.sketches.samples == (0 if kind == "of other tables" else counted.sketches.samples)


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
