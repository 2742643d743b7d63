"""Ids of a table of unbounded ids in a stream: how many there are, how many are new, and how many rows they deserve.

The table's own policy is run on a sample: its sets of 64 slots decide apart from one another, so that some of them, at
equal distances, show what all do, with half, all and twice of the rows (miniature simulation: C. Waldspurger et al.,
Cache Modeling and Optimization using Miniature Simulations, USENIX ATC 2017). Look-ups take the place of steps, which a
stream does not have, and ids are admitted at once.

Whether a hot id is among the sampled ones says nothing of the others: misses are scaled by the share of the sets, and
look-ups that are missing count as hits (SHARDS-adj: C. Waldspurger et al., Efficient MRC Construction with SHARDS, FAST
2015).

Distinct ids are counted by adaptive sampling (P. Flajolet, On Adaptive Sampling, Computing 43, 1990): of those whose
hash ends with so many zeros all are kept, with the time at which they were seen first; one more zero when there are
too many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from flexd.core.arrays import RowArray
from flexd.sketch.kernel_parts import mix

SLOTS = 64
"""Most slots of a set, as of the table's."""
SETS = 64
_PLACES = 1 << 16
"""Places for sampled ids; up to half of them are taken."""
_HOUR_SECONDS = 3600.0
_SIZES = (0.5, 1.0, 2.0)
_U = np.uint64


@numba.njit(cache=True, nogil=True)
def _place(hashes: Any, key: Any) -> Any:
    """Return the place of a hash, or the free one where it belongs."""
    place = (key >> _U(32)) & _U(_PLACES - 1)
    while hashes[place] != _U(0) and hashes[place] != key:
        place = (place + _U(1)) & _U(_PLACES - 1)
    return place


@numba.njit(cache=True, nogil=True)
def _thin(hashes: Any, firsts: Any, uses: Any, zeros: Any) -> Any:
    """Keep only hashes that end with so many zeros; return how many those are."""
    old, old_firsts, old_uses = hashes.copy(), firsts.copy(), uses.copy()
    hashes[:] = _U(0)
    kept = 0
    for i in range(_PLACES):
        if old[i] != _U(0) and old[i] & ((_U(1) << _U(zeros)) - _U(1)) == _U(0):
            place = _place(hashes, old[i])
            hashes[place], firsts[place], uses[place] = old[i], old_firsts[i], old_uses[i]
            kept += 1
    return kept


@numba.njit(cache=True, nogil=True)
def _add(
    rows: Any, seconds: float, clock: int, slots: Any, strides: Any, ids: Any, scores: Any, uses: Any, counts: Any,
    hashes: Any, firsts: Any, seen: Any, sample: Any,
) -> None:  # fmt: skip
    """Look ids up, one after another.

    Args:
        clock: look-ups before.
        slots, strides: int64 [sizes]: slots of the table, and the distance between simulated sets.
        ids, scores, uses: int64 [sizes, 2 x sets x 64] of the simulated slots; scores of free ones are -1.
        counts: int64 [sizes, 2], look-ups of ids without a slot, and evictions, in simulated sets.
        hashes, firsts, seen: [places], sampled ids, seconds of their first look-up, and look-ups.
        sample: int64 [2], zeros with which hashes end, and how many are kept.
    """
    for at in range(len(rows)):
        key = mix(_U(np.int64(rows[at])))
        if key & ((_U(1) << _U(sample[0])) - _U(1)) == _U(0) and key != _U(0):
            place = _place(hashes, key)
            if hashes[place] == _U(0):
                hashes[place], firsts[place], seen[place] = key, seconds, 0
                sample[1] += 1
            seen[place] += 1
            if 2 * sample[1] >= _PLACES:
                sample[0] += 1
                sample[1] = _thin(hashes, firsts, seen, sample[0])
        now = clock + at + 1
        for size in range(len(slots)):
            sets = (slots[size] + SLOTS - 1) // SLOTS
            number = np.int64((key >> _U(1)) % _U(sets))
            if number % strides[size]:
                continue
            first = number // strides[size] * SLOTS
            end = first + (slots[size] - number + sets - 1) // sets
            worst, chosen, found = np.int64(2**63 - 1), first, False
            for slot in range(first, end):
                score = scores[size, slot]
                if score >= 0 and ids[size, slot] == rows[at]:
                    chosen, found = slot, True
                    break
                if score < 0:
                    worst, chosen = score, slot
                    break
                if score < worst:
                    worst, chosen = score, slot
            if found:
                uses[size, chosen] += 1
            else:
                counts[size, 0] += 1
                counts[size, 1] += worst >= 0
                ids[size, chosen], uses[size, chosen] = rows[at], 1
            weight, left = 0, uses[size, chosen] >> 1
            while left:
                weight, left = weight + 1, left >> 1
            scores[size, chosen] = now + 2 * slots[size] * weight


@numba.njit(cache=True, nogil=True)
def hashed_rows(ids: Any, rows: int) -> Any:
    """Return int64 [n], a row for each of [n] ids: by its hash, as of a table that has no policy."""
    found = np.empty(len(ids), np.int64)
    for at in range(len(ids)):
        found[at] = np.int64(mix(_U(np.int64(ids[at]))) % _U(rows))
    return found


@dataclass(frozen=True)
class IdsSeen:
    """Ids of a table in a stream; shares are of about the newest half of the look-ups.

    Attributes:
        distinct: ids, within about 1 %.
        new_per_hour: of event time, over the last hour or what there is of it.
        once_share: share of the distinct ids that were seen once.
        own_share: look-ups of ids that have a row of their own as a share of all; the same with half and twice of the
            rows.
        evictions_per_1000: look-ups, with all the rows.
    """

    look_ups: int
    distinct: float
    new_per_hour: float
    once_share: float
    own_share_of_half_the_rows: float
    own_share: float
    own_share_of_twice_the_rows: float
    evictions_per_1000: float


class IdStream:
    """Not thread-safe. About 2 MB.

    Args:
        rows: of the table, with the one that ids share which have none.
        simulated_sets: of each size, or up to twice as many.
    """

    def __init__(self, rows: int, simulated_sets: int = SETS) -> None:
        self.rows = rows
        self._slots = np.array([max(1, round(size * rows) - 1) for size in _SIZES], dtype=np.int64)
        sets = -(-self._slots // SLOTS)
        self._strides = np.maximum(1, sets // simulated_sets)
        self._share_of_sets = -(-sets // self._strides) / sets
        shape = len(_SIZES), (2 * simulated_sets + 1) * SLOTS
        self._ids, self._uses = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        self._scores = np.full(shape, -1, dtype=np.int64)
        self._counts = np.zeros((len(_SIZES), 2), dtype=np.int64)
        # Look-ups and counts at their last two doublings.
        self._bases = [(0, self._counts.copy())] * 2
        self._doubles_at = 1 << 16
        self._hashes = np.zeros(_PLACES, dtype=np.uint64)
        self._firsts, self._seen = np.zeros(_PLACES), np.zeros(_PLACES, dtype=np.int64)
        self._sample = np.zeros(2, dtype=np.int64)
        self._look_ups, self._began, self._newest = 0, np.inf, -np.inf

    def add(self, ids: RowArray, seconds: float) -> None:
        """Count int64 or int32 [n] ids that were looked up at that event time."""
        self._began, self._newest = min(self._began, seconds), max(self._newest, seconds)
        _add(
            ids, seconds, self._look_ups, self._slots, self._strides, self._ids, self._scores, self._uses, self._counts,
            self._hashes, self._firsts, self._seen, self._sample,
        )  # fmt: skip
        self._look_ups += len(ids)
        if self._look_ups >= self._doubles_at:
            self._doubles_at *= 2
            self._bases = [self._bases[1], (self._look_ups, self._counts.copy())]

    def seen(self) -> IdsSeen:
        kept = self._hashes != 0
        scale = float(2 ** int(self._sample[0]))
        hours = min(_HOUR_SECONDS, max(self._newest - self._began, 1.0)) / _HOUR_SECONDS
        # Everything is new to a stream that has just begun: the first tenth of that time does not count.
        since = self._newest - 0.9 * hours * _HOUR_SECONDS
        new = int((kept & (self._firsts > since)).sum()) * scale / (0.9 * hours)
        before, counted = self._bases[0]
        expected = max(self._look_ups - before, 1) * self._share_of_sets
        misses, evictions = ((self._counts - counted) / expected[:, None]).T
        # Each size has a sample of its own; more rows never do worse.
        half, own, twice = np.maximum.accumulate(np.clip(1 - misses, 0.0, 1.0)).tolist()
        return IdsSeen(
            self._look_ups, int(kept.sum()) * scale, new, float(np.mean(self._seen[kept] == 1)) if kept.any() else 0.0,
            half, own, twice, 1000 * float(evictions[1]),
        )  # fmt: skip
