"""Exact choice of the rows to replicate under the slots of every rank, for one tier at a time.

A replica takes a slot on every rank of its set (a rail for NODE, the world for DEVICE) except its home. So rank r of
the set holds (rows chosen) - (rows chosen whose home is r): with T rows chosen in all, the slots s_r ask that at least
T - s_r of them are at home on r. For a given T the best choice is therefore the best T - s_r rows of every home, and
then the best of all the others; the value is concave in T, so T is found by bisection. This is exact, in O(n log n).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def best_within_slots(gains: Float64Array, homes: Int64Array, slots: Int64Array) -> BoolArray:
    """Choose the rows of the largest summed gain.

    Args:
        gains: float64[n], above 0. Equal gains are taken in the order given.
        homes: int64[n], home of each row as an index into ``slots``.
        slots: int64[r], r >= 2, at least 0: free slots of each rank of the set.

    Returns:
        bool[n].
    """
    rows = len(gains)
    sizes = np.bincount(homes, minlength=len(slots))
    if bool((rows - sizes <= slots).all()):
        return np.ones(rows, np.bool_)
    order = np.argsort(-gains, kind="stable")
    place = np.empty(rows, np.int64)
    place[order] = np.arange(rows)
    # Rows by home, best first; (home, place) as one number makes counts of all homes one binary search.
    # (16 bit integers are sorted by radix.)
    small = homes.astype(np.uint16) if len(slots) <= 2**16 else homes
    by_home = order[np.argsort(small[order], kind="stable")]
    code = homes[by_home] * rows + place[by_home]
    starts = np.cumsum(sizes) - sizes
    prefix = np.concatenate([[0.0], np.cumsum(gains[by_home])])
    ranks = np.arange(len(slots), dtype=np.int64)

    def among_best(count: int) -> Int64Array:
        """int64[r]: how many of the ``count`` best rows each home has."""
        found: Int64Array = np.searchsorted(code, ranks * rows + count) - starts
        return found

    def choose(total: int) -> Int64Array:
        """int64[r]: rows of each home in the best choice of ``total`` rows."""
        quota = np.maximum(total - slots, 0)
        low, high = 0, total
        while low < high:
            middle = (low + high) // 2
            enough = int(np.maximum(among_best(middle), quota).sum()) >= total
            low, high = (low, middle) if enough else (middle + 1, high)
        chosen: Int64Array = np.maximum(among_best(low), quota)
        return chosen

    def value(total: int) -> float:
        return float((prefix[starts + choose(total)] - prefix[starts]).sum())

    def fits(total: int) -> bool:
        quota = np.maximum(total - slots, 0)
        return bool((quota <= sizes).all()) and int(quota.sum()) <= total

    # What fits is an interval from 0: a quota grows with T at least as fast as T itself.
    low, high = min(int(slots.min(initial=0)), rows), rows
    most = low
    while most < high:
        middle = (most + high + 1) // 2
        most, high = (middle, high) if fits(middle) else (most, middle - 1)
    while low < most:
        middle = (low + most) // 2
        low, most = (middle + 1, most) if value(middle + 1) > value(middle) else (low, middle)
    count = choose(low)
    result = np.zeros(rows, np.bool_)
    result[by_home] = np.arange(rows) - np.repeat(starts, sizes) < np.repeat(count, sizes)
    return result
