"""Sketches as they were saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flexd.core.arrays import Arrays
from flexd.core.keyspace import TableSpec
from flexd.sketch import snapshot
from flexd.sketch.restore import restore_tables
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.snapshot import SnapshotStore
from flexd.sketch.table_sketch import SketchSettings


def array_bytes(value: Any) -> int:
    """Return the memory of the arrays that an object and its parts hold."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts = value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else ()
    return sum(map(array_bytes, parts))


def counter_bytes(sketches: Any) -> int:
    """Return the memory of the counters of all tables of a ``SketchSet``, without touches."""
    return sum(array_bytes(table.sketch) for table in sketches._tables.values())


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


def save_sketches(directory: Path, sketches: SketchSet) -> SnapshotStore:
    """Save a snapshot without positions."""
    meta, arrays = sketches.state()
    store = SnapshotStore(directory, 20)
    store.save({"sketches": meta, "positions": {}, "generation": 1, "saved": {}}, arrays)
    return store
