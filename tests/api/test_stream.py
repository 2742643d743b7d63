"""The status of the stream, and of snapshots, from the counters of the ingest."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flexd.api.status import snapshot_status
from flexd.api.stream import stream_status
from flexd.sketch.ingestor import Ingestor
from flexd.sketch.snapshot import SnapshotStore
from tests.support.components import CONFIG
from tests.support.ingest_fakes import LOG, FakeSource, make_ingestor, run_to_the_end


@pytest.fixture
def counted(tmp_path: Path) -> Ingestor:
    source = FakeSource(LOG)
    ingestor = make_ingestor(source, SnapshotStore(tmp_path, 3))
    run_to_the_end(ingestor, source)
    return ingestor


def test_counters_are_shown_as_they_are(counted: Ingestor) -> None:
    counted.source.lost.add("p0", 5, 7, "corrupt")
    counted.source.problem = "gone"
    counted.failures["snapshots"] += 3
    shown = stream_status(CONFIG, counted)
    assert (shown.source, shown.messages, shown.bytes) == ("tap", 24, sum(map(len, LOG["p0"] + LOG["p1"])))
    assert shown.accesses + sum(shown.rejected_accesses.values()) == 23 * 800
    assert shown.rejected_messages["not_arrow_or_json"] == 1
    assert set(shown.adjusted_accesses) == {"future_clamped", "late"}
    assert shown.messages_lost == {"corrupt": 2, "not_kept": 0, "retention": 0, "truncated": 0}
    assert shown.positions_lost == {"out_of_range": 0, "retention": 0, "truncated": 0}
    assert (shown.problem, shown.connected, shown.source_failures) == ("gone", False, 0)
    assert shown.newest_event_unix_seconds == counted.sketches.newest_event_seconds


def test_the_newest_snapshot_is_measured_and_a_problem_is_one_of_snapshots(counted: Ingestor, tmp_path: Path) -> None:
    newest = SnapshotStore(tmp_path, 3).paths()[0]
    counted.source.problem = "broker"
    counted.snapshots.saved_at = time.monotonic() - 4.0
    shown = snapshot_status(counted)
    assert (shown.bytes, shown.written, shown.problem) == (newest.stat().st_size, 1, None)
    assert shown.age_seconds == pytest.approx(4.0, abs=1.0)
    counted._problems["snapshots"] = "disk full"
    again = make_ingestor(FakeSource(LOG), SnapshotStore(tmp_path, 3))
    assert (snapshot_status(again).bytes, snapshot_status(again).written) == (shown.bytes, 0)
    assert snapshot_status(counted).problem == "disk full"
