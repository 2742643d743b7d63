"""Division of a rank's fast memory, in cache slots of home rows, between its dim-groups.

The misses of a dim-group are a convex curve of its cache slots, so the best division gives each dim-group the cache
slots that save more than one price per byte, at which the budget is spent (Everett: Generalized Lagrange multiplier
method, Operations Research 11(3), 1963). The curves are made of straight segments: taken in the order of their slopes
until the bytes are spent they give that price exactly, without a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexd.core.arrays import Float64Array, Int64Array

CACHE_SLOT_BYTES = 64
"""Of a cache slot beside its row and state: what finds it, and its score."""


@dataclass(frozen=True)
class CacheSlotCurve:
    """Misses of a dim-group's home rows on a rank, by their cache slots.

    Attributes:
        cache_slots: float64[s], of each segment, above 0; together at most ``home_rows``.
        saved: float64[s], misses of a step that each cache slot of the segment saves, descending, at least 0.
        home_rows: most cache slots that there is a row for.
        cache_slot_bytes: of one cache slot.
        cold: misses of a step whatever the cache slots.
    """

    cache_slots: Float64Array
    saved: Float64Array
    home_rows: int
    cache_slot_bytes: int
    cold: float = 0.0

    def misses(self, cache_slots: float) -> float:
        """Return the expected rows that a step reads from slow memory."""
        if cache_slots >= self.home_rows:
            return 0.0
        before = np.cumsum(self.cache_slots) - self.cache_slots
        return self.cold + float(self.saved @ (self.cache_slots - np.clip(cache_slots - before, 0.0, self.cache_slots)))


def proportional_cache_slots(budget_bytes: float, rows: Sequence[int], cache_slot_bytes: Sequence[int]) -> list[int]:
    """Return the cache slots of each dim-group, in proportion to the bytes of its rows; at least one each.

    Args:
        rows: home rows of a rank in each dim-group.
        cache_slot_bytes: of one cache slot of each, with its state and ``CACHE_SLOT_BYTES``.
    """
    whole = sum(n * size for n, size in zip(rows, cache_slot_bytes, strict=True))
    share = min(1.0, budget_bytes / max(1, whole))
    return [min(n, max(1, int(n * share))) for n in rows]


def divide_cache_slots(curves: Sequence[CacheSlotCurve], budget_bytes: float) -> list[int]:
    """Return the cache slots of each dim-group that miss least by these curves; at least one each.

    Bytes that would save nothing go to cache slots in proportion to the rows that are in none, in case the curves are
    wrong. Never worse by the curves than cache slots in proportion to rows, where these keep to the budget: a cache
    slot for each dim-group can be more than their share.

    Args:
        budget_bytes: of cache slots on a rank; with one that does not hold a cache slot for each dim-group, each has
            one.
    """
    unit = np.array([curve.cache_slot_bytes for curve in curves], dtype=np.float64)
    most = np.array([curve.home_rows for curve in curves], dtype=np.int64)
    filled = _filled(curves, unit, most, budget_bytes)
    by_rows = proportional_cache_slots(budget_bytes, most.tolist(), [curve.cache_slot_bytes for curve in curves])
    if np.dot(by_rows, unit) <= budget_bytes and total_misses(curves, by_rows) < total_misses(curves, filled):
        return by_rows
    return filled


def total_misses(curves: Sequence[CacheSlotCurve], cache_slots: Sequence[int]) -> float:
    return sum(curve.misses(count) for curve, count in zip(curves, cache_slots, strict=True))


def _filled(curves: Sequence[CacheSlotCurve], unit: Float64Array, most: Int64Array, budget_bytes: float) -> list[int]:
    """Fill the budget segment by segment; whole cache slots, the rest cache slot by cache slot."""
    groups = len(curves)
    of = np.repeat(np.arange(groups), [len(curve.cache_slots) for curve in curves])
    cache_slots = np.concatenate([curve.cache_slots for curve in curves])
    worth = np.concatenate([curve.saved / curve.cache_slot_bytes for curve in curves])
    order = np.argsort(-worth, kind="stable")
    order = order[worth[order] > 0]
    of, size = of[order], (cache_slots * unit[of])[order]
    # Every dim-group has a cache slot, which its own best segments pay for first.
    first = np.zeros(len(order))
    for group in range(groups):
        mine = np.flatnonzero(of == group)
        first[mine] = np.diff(np.minimum(np.cumsum(size[mine]), unit[group]), prepend=0.0)
    rest = max(0.0, budget_bytes - float(unit.sum()))
    ends = np.cumsum(size - first)
    taken = first + np.clip(rest - (ends - (size - first)), 0.0, size - first)
    whole = np.floor(np.bincount(of, weights=taken, minlength=groups) / unit + 1e-9).astype(np.int64)
    whole = np.minimum(np.maximum(whole, 1), most)
    left = _round_up(curves, whole, most, unit, budget_bytes - float(whole @ unit))
    missing = most - whole
    if left > 0 and missing.any():
        whole += np.floor(missing * min(1.0, left / float(missing @ unit))).astype(np.int64)
    return [int(count) for count in whole]


def _round_up(
    curves: Sequence[CacheSlotCurve], whole: Int64Array, most: Int64Array, unit: Float64Array, left: float
) -> float:
    """Add single cache slots where they save most per byte, as long as one fits. In place; return the bytes left."""

    def worth(group: int) -> float:
        count = int(whole[group])
        saved = curves[group].misses(count) - curves[group].misses(count + 1) if count < most[group] else 0.0
        return saved / float(unit[group])

    found = [worth(group) for group in range(len(curves))]
    for _ in range(2 * len(curves)):
        group = max(range(len(curves)), key=lambda at: found[at] if unit[at] <= left else 0.0)
        if found[group] <= 0 or unit[group] > left:
            break
        whole[group] += 1
        left -= float(unit[group])
        found[group] = worth(group)
    return left
