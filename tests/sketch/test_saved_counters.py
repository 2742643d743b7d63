"""Counters as arrays: what is saved is loaded again, and what is damaged or of other tables is refused."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.errors import SketchError
from flexd.core.keyspace import TableSpec
from flexd.sketch import kinds, saved_counters, saved_state
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.touch_counts import TableTouches
from flexd.sketch.types import SketchSettings

TABLES = (TableSpec("users", 50, 4), TableSpec("items", 80, 4))
SETTINGS = SketchSettings(memory_bytes=100_000, half_life_seconds=60.0, max_hot_rows=10)


@pytest.fixture
def counted() -> SketchSet:
    sketches = SketchSet.of(TABLES, SETTINGS)
    sketches.ingest("users", np.array([3, 3, 7]), 0, 100.0)
    sketches.ingest("items", np.array([1]), 0, 101.0, sequence_lengths=np.array([5, 9]))
    return sketches


def test_each_table_is_loaded_from_its_own_arrays(counted: SketchSet) -> None:
    meta, arrays = counted.state()
    saved = saved_state.parse(meta)
    clock = ForwardDecay(SETTINGS.half_life_seconds, SETTINGS.max_future_seconds)
    saved_counters.load_clock(clock, saved.decay)
    assert clock.newest_seconds == 101.0
    found = []
    for table in saved.tables:
        sketch = kinds.make_table(table.spec, table.choice, 0, SETTINGS.conservative)
        lengths = saved_counters.load_table(sketch, table, arrays)
        found.append((sketch.samples, None if lengths is None else lengths.quantiles([1.0]).tolist()))
        rows = np.arange(table.spec.rows)
        assert np.array_equal(sketch.query(rows, clock), counted.query(table.spec.name, rows))
    assert found == [(3, None), (1, [9.0])]


def test_what_is_damaged_is_refused(counted: SketchSet) -> None:
    meta, arrays = counted.state()
    table = saved_state.parse(meta).tables[1]
    sketch = kinds.make_table(table.spec, table.choice, 0, SETTINGS.conservative)
    touches = TableTouches(table.spec.rows, 100)
    for name in [name for name in arrays if name.startswith("1/")]:
        damaged = {**arrays, name: np.zeros(3, dtype=np.uint8)}
        if name.startswith("1/touch_"):
            with pytest.raises(SketchError, match=r"damaged|not fit"):
                saved_counters.load_touches(touches, table, damaged)
            continue
        with pytest.raises(SketchError, match=r"damaged|not fit"):
            saved_counters.load_table(sketch, table, damaged)
    with pytest.raises(SketchError, match="clock is damaged"):
        saved_counters.load_clock(ForwardDecay(60.0, 0.0), {"newest": "soon"})
