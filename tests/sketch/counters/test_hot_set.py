"""The set of rows that may be hot."""

from __future__ import annotations

import numpy as np

from flexd.sketch.counters.countmin import BLOCK_IDS, CountMin
from flexd.sketch.counters.hot_set import HotSet
from flexd.sketch.distinct import DistinctRows


def _fill(counter: CountMin, distinct: DistinctRows, rows: np.ndarray, hot: HotSet | None = None) -> None:
    start = 0
    while start < len(rows):
        buffer = np.empty(len(rows) + BLOCK_IDS, dtype=np.int64) if hot is None else hot.buffer
        taken = 0 if hot is None else hot.buffered
        threshold = 2**62 if hot is None else hot.threshold
        start, _, _, taken = counter.add(rows, start, 1, distinct.registers, threshold, buffer, taken)
        if hot is not None:
            hot.buffered = taken
            hot.admit_buffered(counter.query)


def test_hot_set_follows_drift():
    hot, counter = HotSet(100), CountMin(10_000, 12)
    for first in (0, 5000):
        for _ in range(50):
            _fill(counter, DistinctRows(), np.arange(first, first + 300, dtype=np.int32), hot)
        counter.rescale(6)
        hot.rescale(6)
    _fill(counter, DistinctRows(), np.tile(np.arange(5000, 5100, dtype=np.int32), 60), hot)
    hot.admit_buffered(counter.query)
    assert np.isin(np.arange(5000, 5100), hot.rows()).all()
