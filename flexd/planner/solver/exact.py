"""Exact choice among the few rows about which prices leave doubt: a mixed integer program (HiGHS through scipy).

Rows far from every threshold are where they belong at any good price; what a price cannot do is to pack the last slots
of ranks whose limits differ (a multi-dimensional knapsack). So all rows but the *core* keep their tiers, and
the core is chosen anew in the slots that this leaves. With all rows in the core the choice is optimal, the bound tight.
Quotas say how many more rows fit into the slots of their ranks.
"""

from __future__ import annotations

import numpy as np

from flexd.core.arrays import BoolArray, Float64Array, Int64Array, UInt8Array
from flexd.core.placement import RankLayout


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


_MAX_CORE_ROWS = 192
_MAX_CORE_ENTRIES = 3_072
"""Core rows x limits: with many ranks fewer rows are chosen anew, so that it stays a matter of milliseconds."""
_MIN_CORE_ROWS = 24
_MAX_NODES = 16
"""Of the search tree: a limit of time would make plans depend on the machine."""
_SCALE = 1e5
"""Of the largest gain: HiGHS stops within 1e-6 of the optimum."""
_SLACK = 1e-9
"""By which a bound of HiGHS may be too tight, as a share of the gain."""


def core_rows(limits: int) -> int:
    """Rows that are chosen exactly with so many limits; 0: too many limits."""
    rows = min(_MAX_CORE_ROWS, _MAX_CORE_ENTRIES // max(limits, 1))
    return rows if rows >= _MIN_CORE_ROWS else 0


def best_core(
    layout: RankLayout, keys: Int64Array, decision: Float64Array, slots: Int64Array
) -> tuple[UInt8Array, float] | None:
    """(uint8[n] tiers within all limits, the most that any such tiers gain).

    The tiers are the best there are unless the search was cut off. None: it was, before it found any.

    Args:
        keys: int64[n], rows to choose tiers for.
        decision: float64[tier, n] gains; -inf where a tier is not allowed, HOME is 0.
        slots: int64[world], at least 0, that are free for them.
    """
    tier, row = np.nonzero(decision > 0)
    if not len(row):
        return np.zeros(len(keys), np.uint8), 0.0
    # Imported with the first plan: it would take an eighth of the daemon's start.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    gain = decision[tier, row]
    scale = _SCALE / float(gain.max())
    held = [layout.holds_replica(rank, keys[row], tier.astype(np.uint8)) for rank in range(layout.world_size)]
    limits = coo_matrix(np.stack(held).astype(np.float64))
    once = coo_matrix((np.ones(len(row)), (row, np.arange(len(row)))), shape=(len(keys), len(row)))
    result = milp(
        -gain * scale,
        constraints=[LinearConstraint(limits.tocsr(), ub=slots), LinearConstraint(once.tocsr(), ub=1.0)],
        integrality=np.ones(len(row)),
        bounds=Bounds(0.0, 1.0),
        options={"mip_rel_gap": 0.0, "node_limit": _MAX_NODES},
    )
    if result.x is None:
        return None
    chosen = np.round(result.x) > 0
    if bool((limits @ chosen > slots).any()) or bool((once @ chosen > 1).any()):
        return None
    tiers = np.zeros(len(keys), np.uint8)
    tiers[row[chosen]] = tier[chosen]
    total = float(gain[chosen].sum())
    bound = float("nan") if result.mip_dual_bound is None else -float(result.mip_dual_bound) / scale
    return tiers, max(bound, total) + _SLACK * total if np.isfinite(bound) else np.inf
