"""Distinct rows by HyperLogLog registers."""

from __future__ import annotations

import numpy as np
import pytest

from flexd.sketch.counters.countmin import BLOCK_IDS, CountMin
from flexd.sketch.distinct import RELATIVE_STANDARD_ERROR, DistinctRows


def _fill(distinct: DistinctRows, rows: np.ndarray) -> None:
    counter, start = CountMin(2**40, 8), 0
    while start < len(rows):
        buffer = np.empty(len(rows) + BLOCK_IDS, dtype=np.int64)
        start, _, _, _ = counter.add(rows, start, 1, distinct.registers, 2**62, buffer, 0)


@pytest.mark.parametrize("rows", [0, 1, 10, 1000, 30_000, 1_000_000])
def test_distinct_rows_within_its_error(rows):
    distinct = DistinctRows()
    ids = np.arange(rows, dtype=np.int64) * 7919 + 13
    for _ in range(2):
        _fill(distinct, ids)
    assert abs(distinct.estimate() - rows) <= 5 * RELATIVE_STANDARD_ERROR * rows
