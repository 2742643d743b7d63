"""Frequency curves read from counters: the hottest rows individually, the rest in bins of similar frequency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

BINS = 256
"""8 bins an octave: the rows of a bin differ by less than 12.5 % in frequency; values below 16 have a bin each."""
TAIL_BINS = 32


@numba.njit(cache=True, nogil=True, inline="always")
def _bin(value: Any) -> Any:
    v = np.uint32(value)
    shift = 0
    if v >> np.uint32(20):
        v = np.uint32(v >> np.uint32(16))
        shift = 16
    if v >> np.uint32(12):
        v = np.uint32(v >> np.uint32(8))
        shift += 8
    if v >> np.uint32(8):
        v = np.uint32(v >> np.uint32(4))
        shift += 4
    if v >> np.uint32(6):
        v = np.uint32(v >> np.uint32(2))
        shift += 2
    if v >> np.uint32(5):
        v = np.uint32(v >> np.uint32(1))
        shift += 1
    if v >> np.uint32(4):
        v = np.uint32(v >> np.uint32(1))
        shift += 1
    return 8 * shift + np.int64(v)


@numba.njit(cache=True, nogil=True)
def _histogram(low: Any, counts: Any, sums: Any) -> None:
    for i in range(low.size):
        value = low[i]
        if value:
            b = _bin(value)
            counts[b] += 1
            sums[b] += np.float64(value)


@numba.njit(cache=True, nogil=True)
def _collect(low: Any, lowest: Any, rows: Any) -> int:
    n = 0
    for i in range(low.size):
        if low[i] >= lowest:
            rows[n] = i
            n += 1
    return n


@dataclass(frozen=True)
class RowCurve:
    """The counters of one table by row, in units.

    Attributes:
        hot_rows: int64[h] row ids, most frequent first (equal ones by id).
        hot_units: float64[h].
        bin_rows, bin_units: float64[k]: rows in each bin of the other rows, and the units of one such row.
        distinct_rows: rows with a counter above zero.
        total_units: of all rows.
    """

    hot_rows: Int64Array
    hot_units: Float64Array
    bin_rows: Float64Array
    bin_units: Float64Array
    distinct_rows: int
    total_units: float


def enumerate_rows(
    low: npt.NDArray[np.uint32], high_rows: Int64Array, high_units: Int64Array, max_hot_rows: int
) -> RowCurve:
    """Read exact counters in two passes.

    Args:
        low: uint32[rows] units below 2^31, 0 for rows of the side list.
        high_rows, high_units: int64[h], rows of 2^31 units and more: hotter than any of ``low``.
    """
    counts = np.zeros(BINS, dtype=np.int64)
    sums = np.zeros(BINS, dtype=np.float64)
    _histogram(low, counts, sums)
    from_top = np.cumsum(counts[::-1])[::-1]
    wanted = min(max(0, max_hot_rows - len(high_rows)), int(from_top[0]))
    order = np.lexsort((high_rows, -high_units))
    hot_rows, hot_units = high_rows[order], high_units[order].astype(np.float64)
    spilled = hot_units[max_hot_rows:]
    hot_rows, hot_units = hot_rows[:max_hot_rows], hot_units[:max_hot_rows]
    if wanted:
        lowest_bin = int(np.flatnonzero(from_top >= wanted)[-1])
        rows = np.empty(int(from_top[lowest_bin]), dtype=np.int64)
        _collect(low, np.uint32(bin_floor(lowest_bin)), rows)
        units = low[rows]
        if len(rows) > wanted:
            chosen = np.argpartition(units, len(rows) - wanted)[len(rows) - wanted :]
            left = len(rows) - wanted
            left_sum = float(units.sum(dtype=np.float64)) - float(units[chosen].sum(dtype=np.float64))
            rows, units = rows[chosen], units[chosen]
        else:
            left, left_sum = 0, 0.0
        counts[lowest_bin:], sums[lowest_bin:] = 0, 0.0
        counts[lowest_bin], sums[lowest_bin] = left, left_sum
        # One sort of 64-bit keys, descending by units, then by row: row ids fit 32 bits, because larger tables are not
        # counted exactly.
        order = np.argsort((np.int64(2**31) - units.astype(np.int64) << 32) | rows)
        hot_rows = np.concatenate([hot_rows, rows[order]])
        hot_units = np.concatenate([hot_units, units[order].astype(np.float64)])
    filled = np.flatnonzero(counts)[::-1]
    bin_rows = counts[filled].astype(np.float64)
    bin_sums = sums[filled]
    bin_units = bin_sums / bin_rows
    if len(spilled):
        bin_rows = np.concatenate([np.ones(len(spilled)), bin_rows])
        bin_units = np.concatenate([spilled, bin_units])
    total = float(hot_units.sum() + spilled.sum() + bin_sums.sum())
    distinct = int(from_top[0]) + len(high_rows)
    return RowCurve(hot_rows, hot_units, bin_rows, bin_units, distinct, total)


def bin_floor(index: int) -> int:
    """Return the lowest value of a bin."""
    if index < 16:
        return index
    shift = (index - 8) // 8
    return (index - 8 * shift) << shift


def tail_curve(units: Float64Array, tail_units: float, max_rows: float) -> tuple[Float64Array, Float64Array]:
    """Return the frequency curve of rows known only by a sample of their accesses.

    The quantiles of frequency *weighted by access* divide the sample into bins of equal mass; a bin with A units
    at f units a row has A / f rows.

    Args:
        units: float64[n] > 0: units of the row of each sampled access.
        tail_units: units of all such rows together.
        max_rows: most rows that the curve may have.

    Returns:
        (float64[k] rows, float64[k] units of one row), most frequent first.
    """
    if not len(units) or tail_units <= 0 or max_rows <= 0:
        return np.empty(0), np.empty(0)
    ranks = np.arange(1, TAIL_BINS) * len(units) // TAIL_BINS
    edges = np.unique(np.sort(units)[ranks])
    where = np.searchsorted(edges, units, side="left")
    size = np.bincount(where, minlength=len(edges) + 1)
    inverse = np.bincount(where, weights=1.0 / units, minlength=len(edges) + 1)
    filled = np.flatnonzero(size)[::-1]
    mass = tail_units * size[filled] / len(units)
    rows = mass * inverse[filled] / size[filled]
    # Estimates are rather too high, but sampling can still give more rows than exist.
    rows *= min(1.0, max_rows / float(rows.sum()))
    return rows, mass / rows


def warm_up() -> None:
    """Compile the kernels (or load them from numba's cache)."""
    none = np.empty(0, dtype=np.int64)
    enumerate_rows(np.arange(3, dtype=np.uint32), none, none, 1)
