"""The cells of a count-min as numbers."""

from __future__ import annotations

import numpy as np

from flexd.sketch.counters.countmin import DEPTH, CountMin


def cell_values(counter: CountMin) -> np.ndarray:
    """Return the units in each cell, int64[4, 2^k]; both cells of a joined pair have its value."""
    pairs = counter.cells().astype(np.int64).reshape(-1, 2)
    halves = pairs & (2**31 - 1)
    joined = halves[:, 1] << 31 | halves[:, 0]
    return np.where(pairs >> 31, joined[:, None], pairs).reshape(DEPTH, -1)
