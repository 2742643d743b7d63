"""A restart with another configuration or another version keeps every count that still fits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flexd.core.errors import UnusableStateError
from flexd.ingest import Ingestor
from flexd.sketch import snapshot
from flexd.sketch.snapshot import SnapshotStore
from tests.support.ingest_fakes import LOG, SETTINGS, TABLES, FakeSource, make_ingestor, run_to_the_end

ROWS = np.arange(200, dtype=np.int64)


@pytest.fixture
def counted(tmp_path):
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 2))
    run_to_the_end(ingestor, source)
    return ingestor


def restarted(tmp_path, tables=TABLES, settings=SETTINGS, keep=2):
    return Ingestor(FakeSource(LOG), tables, settings, SnapshotStore(tmp_path, keep), poll_seconds=0.01,
                    snapshot_interval_seconds=3600.0, save_in_background=False)  # fmt: skip


def test_a_snapshot_of_a_newer_format_is_refused_and_stays(tmp_path, counted):
    store = SnapshotStore(tmp_path, 2)
    meta, arrays = snapshot.read(store.paths()[0])
    meta["sketches"]["format"] += 1
    newest = store.save(meta, arrays)
    with pytest.raises(UnusableStateError, match="newer flexd"):
        restarted(tmp_path)
    assert newest.exists()
    # Told to start without it, the daemon continues from the snapshot before it.
    after = Ingestor(FakeSource(LOG), TABLES, SETTINGS, store, start_empty=True)
    assert after.sketches.samples_by_table() == counted.sketches.samples_by_table()
    assert newest.with_name(f"{newest.name}.unusable").exists()


def test_a_table_whose_counters_changed_starts_empty_alone_and_says_so(tmp_path, counted, caplog):
    tables = [dataclasses.replace(table, rows=table.rows + (table.name == "small")) for table in TABLES]
    after = restarted(tmp_path, tables)
    assert np.array_equal(after.sketches.query("large", ROWS), counted.sketches.query("large", ROWS))
    assert after.sketches.samples_by_table() == (0, counted.sketches.samples_by_table()[1])
    assert {outcome.table: outcome.outcome for outcome in after.outcomes} == {"small": "emptied", "large": "kept"}
    assert "table small starts empty: its counters changed" in caplog.text
    run_to_the_end(after, after._source)
    assert after._source.restored == {"p0": 12, "p1": 12}, "the positions stay: nothing is counted twice"


def test_counters_of_another_share_of_the_stream_start_empty_and_the_positions_stay(tmp_path, counted):
    after = restarted(tmp_path, settings=dataclasses.replace(SETTINGS, share=0.5))
    assert after.sketches.samples_by_table() == (0, 0)
    assert {outcome.detail for outcome in after.outcomes} == {"1 of the stream was counted, now 0.5"}
    run_to_the_end(after, after._source)
    assert after._source.restored == {"p0": 12, "p1": 12}


def test_weights_are_those_of_the_whole_stream_and_samples_those_read(counted):
    profile = counted.profile()
    counted._source.read_share = 0.25
    scaled = counted.profile()
    for before, after in zip(profile.tables, scaled.tables, strict=True):
        assert after.weight == pytest.approx(4 * before.weight)
        assert np.array_equal(after.hot_share, before.hot_share)
        assert counted.table_profile(after.table).weight == after.weight
    assert scaled.samples == profile.samples == sum(counted.sketches.samples_by_table())
    assert counted.stats().read_share == 1.0, "as of the last poll"
