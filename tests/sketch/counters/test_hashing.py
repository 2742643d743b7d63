"""Hash positions and registers equal those of the DataSketches library."""

from __future__ import annotations

import datasketches
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexd.sketch.counters.countmin import BLOCK_IDS, DEPTH, CountMin
from flexd.sketch.distinct import RELATIVE_STANDARD_ERROR, DistinctRows
from tests.support.count_min import cell_values

ROWS = 100_000
HLL_REGISTERS_AT = 40
"""Offset of the registers in an updatable HLL_8 image."""


def counted(ids: np.ndarray) -> tuple[CountMin, DistinctRows]:
    counter, distinct = CountMin(ROWS, 9), DistinctRows()
    counter.add(ids, 0, 1, distinct.registers, 2**62, np.empty(BLOCK_IDS, dtype=np.int64), 0)
    return counter, distinct


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=20))
def test_cells_of_a_row_are_those_of_the_library(rows):
    for row in rows:
        counter, _ = counted(np.array([row, row], dtype=np.int64))
        library = datasketches.count_min_sketch(DEPTH, 512)
        library.update(row)
        library.update(row)
        cells = np.frombuffer(library.serialize()[-8 * DEPTH * 512 :], dtype=np.float64)
        assert np.array_equal(cell_values(counter).reshape(-1), cells)


def test_registers_are_those_of_the_library():
    assert [round(counted(np.arange(few))[1].estimate()) for few in (0, 1, 10)] == [0, 1, 10]
    for rows in (1_000, 50_000):
        ids = np.arange(rows, dtype=np.int64)
        _, distinct = counted(ids)
        library = datasketches.hll_sketch(12, datasketches.tgt_hll_type.HLL_8)
        for row in ids.tolist():
            library.update(row)
        image = library.serialize_updatable()
        assert image[HLL_REGISTERS_AT : HLL_REGISTERS_AT + 4096] == distinct.registers.tobytes()
        assert abs(distinct.estimate() / rows - 1) < 4 * RELATIVE_STANDARD_ERROR
        assert abs(library.get_estimate() / distinct.estimate() - 1) < 0.03
