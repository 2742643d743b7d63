"""Writes the files of a state directory with the classes of one commit, and what they contain.

Run it in a checkout of that commit: ``PYTHONPATH=CHECKOUT python tests/state/formats/write_files.py DIRECTORY``.
The written files are kept for ever: every later flexd must read them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flexd.control.daemon.journal import JournalledMigration, PlacementJournal, Segment
from flexd.control.daemon.migration import Migration, MigrationMetadata
from flexd.control.daemon.migration_events import MigrationEvent
from flexd.control.daemon.migration_states import TransitionEvent
from flexd.core.keyspace import TableSpec
from flexd.core.placement import Delta, Placement
from flexd.ingest import Ingestor
from flexd.operations.decisions import DecisionFile, Pause, RequestedRollback, ThrottleOverride
from flexd.operations.history.history import MigrationHistory
from flexd.operations.history.records import ActionRecord
from flexd.operations.plan_log import PlanLog
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.types import SketchSettings
from flexd.stream.codecs.codec import encode_arrow
from flexd.stream.file_log.log import FileLogSink, FileLogSource
from flexd.stream.types import AccessBatch

TABLES = [
    TableSpec("users", 500, 8, "float32", "adam"),
    TableSpec("items", 20_000, 8),
    TableSpec("clicks", 3_000_000, 16),
]
SETTINGS = {
    "logarithmic": SketchSettings(memory_bytes=180_000, half_life_seconds=600.0, max_hot_rows=50),
    "plain": SketchSettings(memory_bytes=200_000, half_life_seconds=None, max_hot_rows=64, conservative=False,
                            logarithmic=False),
}  # fmt: skip
T0 = 1.75e9
MESSAGES = 12


def message(number: int) -> bytes:
    """Return message ``number``: 300 accesses of each table, one with sequence lengths."""
    random = np.random.default_rng(number)
    batches = []
    for index, table in enumerate(TABLES):
        rows = ((random.zipf(1.2, 300) * 7 + index) % table.rows).astype(np.int64)
        lengths = np.full(30, 10, dtype=np.int32) if table.name == "clicks" else None
        batches.append(AccessBatch(table.name, rows, number % 4, T0 + 20.0 * number, lengths))
    return encode_arrow(batches)


def counts(sketches: SketchSet) -> dict[str, Any]:
    """Return what a reader of the counters sees: estimates of 60 rows of each table, and their accesses."""
    rows = np.arange(0, 120, 2, dtype=np.int64)
    return {
        "samples": list(sketches.samples_by_table()),
        "newest": sketches.newest_event_seconds,
        "estimates": {table.name: [float(x).hex() for x in sketches.query(table.name, rows)] for table in TABLES},
        "kinds": [choice.kind for choice in sketches.choices()],
        "lengths": [float(x) for x in sketches.sequence_length_quantiles("clicks", [0.5])],
    }


def write_snapshot(directory: Path, settings: SketchSettings) -> dict[str, Any]:
    log = directory / "log"
    sink = FileLogSink(log, "p0")
    for number in range(MESSAGES):
        sink.send(message(number))
    sink.flush(10.0)
    sink.close()
    ingestor = Ingestor(
        FileLogSource(log), TABLES, settings, SnapshotStore(directory / "snapshots", 2), poll_seconds=0.05,
        snapshot_interval_seconds=3600.0, extra_state=lambda: {"live_plan_id": "plan-7", "drift_reference": {}},
    )  # fmt: skip
    ingestor.profile()
    ingestor.start()
    while ingestor.stats().messages < MESSAGES:
        pass
    if not ingestor.stop(20.0):
        raise SystemExit("the ingest did not end")
    positions = ingestor._source.positions()
    content = {**counts(ingestor._sketches.sketches), "positions": positions, "generation": 1}
    for path in sorted(log.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    log.rmdir()
    return content


def write_journal(directory: Path) -> dict[str, Any]:
    journal = PlacementJournal(directory)
    base = Placement.of(np.arange(0, 200, 2), np.ones(100, np.uint8), 5)
    journal.begin(Segment("run-1", 3, "0123abcd"), base)
    keys = np.arange(1, 41, 2)
    first = JournalledMigration("m-1", "plan-1", 5)
    journal.append(6, Delta(keys, np.zeros(20, np.uint8), np.full(20, 2, np.uint8)), first)
    back = JournalledMigration("m-2", "plan-0", 6, 5)
    journal.append(7, Delta(keys[:10], np.full(10, 2, np.uint8), np.zeros(10, np.uint8)), back)
    journal.close()
    live = journal.placement_at(7)
    return {"version": 7, "keys": live.keys.tolist(), "tiers": live.tiers.tolist(), "attempt": "run-1"}


def write_history(path: Path) -> dict[str, Any]:
    history = MigrationHistory(path, 100)
    history.start()
    chunks = [Delta(np.arange(30), np.zeros(30, np.uint8), np.ones(30, np.uint8))]
    migration = Migration("plan-1", chunks, metadata=MigrationMetadata("m-1", "plan-0", "manual", "ada", "by hand"))
    migration.observe(lambda moved, transition: history.record_migration(MigrationEvent(moved, transition)))
    migration.fire(TransitionEvent.START, "ranks are ready")
    migration.fire(TransitionEvent.FAIL, "a rank left")
    history.record_migration(MigrationEvent(migration, None))
    history.record_action(ActionRecord.of(T0, "pause", "ada", "night", "held"))
    if not history.flush(20.0) or not history.stop(20.0):
        raise SystemExit("the history was not written")
    return {"state": history.newest(5)[0].state, "transitions": len(history.find("m-1")[1])}


def main(directory: Path) -> None:
    expected: dict[str, Any] = {"snapshots": {}}
    for name, settings in SETTINGS.items():
        expected["snapshots"][name] = write_snapshot(directory / name, settings)
    expected["journal"] = write_journal(directory / "placement")
    expected["history"] = write_history(directory / "migrations.sqlite")
    decisions = DecisionFile(directory / "decisions.json")
    decisions.update(
        pause=Pause(reason="night", who="ada", unix_seconds=T0),
        throttle=ThrottleOverride(bytes_per_step=4096, configured="{}"),
        rollback=RequestedRollback(migration_ids=("m-1",)),
    )
    PlanLog(directory / "plans.jsonl").append({"plan_id": "plan-1", "unix_seconds": T0, "rows": 30})
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
