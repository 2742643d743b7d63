"""The status of the stream, and of snapshots, from the counters of the ingest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flexd.api.daemon import snapshot_status
from flexd.api.stream import stream_status
from flexd.ingest.stats import IngestStats
from flexd.sketch.snapshot import SnapshotStore
from tests.support.components import CONFIG


def test_counters_are_shown_as_they_are() -> None:
    stats = IngestStats(
        messages=3, accesses=20, bytes=99, messages_lost={"corrupt": 2}, newest_event_seconds=1.5, problem="gone",
    )  # fmt: skip
    shown = stream_status(CONFIG, stats)
    assert (shown.source, shown.messages, shown.accesses, shown.bytes) == ("tap", 3, 20, 99)
    assert shown.messages_lost == {"corrupt": 2, "not_kept": 0, "retention": 0, "truncated": 0}
    assert shown.positions_lost == {"out_of_range": 0, "retention": 0, "truncated": 0}
    assert (shown.newest_event_unix_seconds, shown.problem) == (1.5, "gone")


def test_the_newest_snapshot_is_measured_and_a_problem_is_one_of_snapshots(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 3)
    for size in (10, 30, 20):
        newest = store.save({"job": "j"}, {"counts": np.zeros(size)})
    stats = IngestStats(snapshots=3, snapshot_failures=0, snapshot_age_seconds=4.0, problem="broker")
    shown = snapshot_status(stats, store)
    assert (shown.bytes, shown.written, shown.age_seconds, shown.problem) == (newest.stat().st_size, 3, 4.0, None)
    failed = snapshot_status(
        IngestStats(snapshot_failures=1, problem="disk full"), SnapshotStore(tmp_path / "none", 3, read_only=True)
    )
    assert (failed.bytes, failed.age_seconds, failed.problem) == (0, None, "disk full")
