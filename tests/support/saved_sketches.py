"""Sketches as they were saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexd.core.arrays import Arrays
from flexd.core.keyspace import TableSpec
from flexd.sketch import snapshot
from flexd.sketch.restore import restore_tables
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings


def newest_snapshot(directory: Path) -> tuple[dict[str, Any], Arrays]:
    """Return (meta, arrays). Raises SnapshotError if it is damaged, IndexError if there is none."""
    return snapshot.read(SnapshotStore(directory, 1, read_only=True).paths()[0])


def loaded_sketches(
    tables: Sequence[TableSpec], settings: SketchSettings, meta: Mapping[str, Any], arrays: Arrays
) -> SketchSet:
    """Return the sketches that a state describes, every table of which is kept."""
    sketches, outcomes = restore_tables(meta, arrays, tables, settings)
    assert {outcome.outcome for outcome in outcomes} <= {"kept"}, outcomes
    return sketches
