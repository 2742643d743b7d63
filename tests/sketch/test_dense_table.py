"""Tables counted exactly."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.core.keyspace import TableSpec
from flexd.sketch.sketch_set import SketchSet
from flexd.sketch.types import SketchSettings

T0 = 1.7e9


def test_heavy_decayed_tables_get_a_coarser_unit_instead_of_more_memory():
    rows = 200_000
    sketches = SketchSet([TableSpec("heavy", rows, 4)], SketchSettings(3 * 2**19, 1000.0, 1e9, 10))
    sketches.ingest("heavy", np.zeros(1, dtype=np.int32), 0, T0)
    # As after a long stream; counting up to here would take billions of accesses.
    counter = sketches._tables["heavy"].sketch._counter
    unit = sketches._decay.unit_weight(sketches._tables["heavy"].sketch.exponent)
    counter._low[:] = 2**31 - 1
    largest = 0
    for _ in range(4):
        for start in range(0, rows, 5000):
            sketches.ingest("heavy", np.arange(start, start + 5000, dtype=np.int64), 0, T0)
            largest = max(largest, sketches.nbytes)
    got = sketches.query("heavy", np.arange(rows))
    assert np.allclose(got, 2**31 * unit + 4, atol=1e-2)
    assert largest <= sketches.choices()[0].bytes
    assert sketches.profile().tables[0].weight == pytest.approx(got.sum())
