"""The sketch of a table that is counted exactly: 4 bytes per row, and 16 more for each of the few rows beyond them."""

import math
from typing import Any

import numba
import numpy as np

from flexd.core.arrays import Arrays, Float64Array, Int64Array, RowArray, UInt32Array, matches
from flexd.core.keyspace import TableSpec
from flexd.sketch.decay import UNIT_BITS, ForwardDecay
from flexd.sketch.kernel_parts import prefetch
from flexd.sketch.profile import TableProfile
from flexd.sketch.table_sketch import TableChoice, TableSketch, readonly

# ``low`` holds less than 2^31 units between calls; the excess is carried to ``high``.
CARRY_BITS = 31
_CARRY_MASK = np.uint32(2**CARRY_BITS - 1)
_PENDING_CARRIES = 8_192
# Ids counted between two checks of the length of the side list.
CHECK_IDS = 8_192
_BLOCK_IDS = 4096
# Ids between the one prefetched and the one counted: out-of-order execution alone covers only about ten.
_PREFETCH_IDS = 96
# 8 bins an octave: the rows of a bin differ by less than 12.5 % in frequency; values below 16 have a bin each.
BINS = 256


@numba.njit(cache=True, nogil=True)
def _add(
    rows: Any, start: int, low: Any, units: Any, block_ids: int, carries: Any, carried: int
) -> tuple[int, int, int, int]:
    limit = np.uint64(low.size)
    top = np.uint32(31)
    negative = 0
    outside = 0
    n = rows.size
    last = np.uint64(max(n - 1, 0))
    while start < n and carried + block_ids <= carries.size:
        end = min(start + block_ids, n)
        seen = np.uint32(0)
        for i in range(start, end):
            prefetch(low, np.uint64(np.int64(rows[min(np.uint64(i + _PREFETCH_IDS), last)])))
            row = rows[i]
            at = np.uint64(np.int64(row))
            if at < limit:
                value = np.uint32(low[at] + units)
                low[at] = value
                seen |= value
            elif row < 0:
                negative += 1
            else:
                outside += 1
        # The top bit serves as the carry flag, so that the loop above has no second branch.
        if seen >> top:
            for i in range(start, end):
                at = np.uint64(np.int64(rows[i]))
                if at < limit and low[at] >> top:
                    low[at] &= np.uint32(2147483647)
                    carries[carried] = np.int64(at)
                    carried += 1
        start = end
    return start, negative, outside, carried


@numba.njit(cache=True, nogil=True)
def _shift_low(low: Any, bits: int) -> None:
    # Divide by ``2^bits``; halves round down, so that a row without further accesses ends at 0.
    half = np.uint64((1 << (bits - 1)) - 1)
    for i in range(low.size):
        low[i] = np.uint32((np.uint64(low[i]) + half) >> np.uint64(bits))


@numba.njit(cache=True, nogil=True)
def _histogram(low: Any, counts: Any, sums: Any) -> None:
    """Count the rows above zero and their units by bin: exponent and first three bits of the fraction as a float."""
    number = np.empty(1, dtype=np.float64)
    bits = number.view(np.int64)
    for i in range(low.size):
        if low[i]:
            number[0] = low[i]
            b = (bits[0] >> 49) - 8 * 1023
            counts[b] += 1
            sums[b] += number[0]


def enumerate_rows(
    low: UInt32Array, high_rows: Int64Array, high_units: Int64Array, max_hot_rows: int
) -> tuple[Int64Array, Float64Array, Float64Array, Float64Array, int]:
    """Read exact counters in two passes: the hottest rows individually, the rest in bins of similar frequency.

    Args:
        low: uint32[rows] units below 2^31, 0 for rows of the side list.
        high_rows, high_units: int64[h], rows of 2^31 units and more: hotter than any of ``low``.

    Returns:
        (int64[h] hot row ids, most frequent first and equal ones by id, their float64[h] units, float64[k] units of one
        row in each bin of the others, float64[k] rows in it, rows with a counter above zero).
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
        least = math.ceil(math.ldexp(8 + lowest_bin % 8, lowest_bin // 8 - 3))
        rows = np.flatnonzero(low >= np.uint32(least))
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
    bin_units = sums[filled] / bin_rows
    if len(spilled):
        bin_rows = np.concatenate([np.ones(len(spilled)), bin_rows])
        bin_units = np.concatenate([spilled, bin_units])
    return hot_rows, hot_units, bin_units, bin_rows, int(from_top[0]) + len(high_rows)


def side_rows_allowed(rows: int) -> int:
    """Return the number of rows that may exceed 31 bits before the unit of a decayed table is made coarser."""
    return max(1024, rows // 64)


def bytes_of(rows: int) -> int:
    """Return the most memory of a counter if ``side_rows_allowed`` is enforced every ``CHECK_IDS`` ids."""
    side_rows = min(rows, side_rows_allowed(rows) + _PENDING_CARRIES + CHECK_IDS)
    return 4 * rows + 16 * side_rows + 8 * _PENDING_CARRIES


class DenseTable(TableSketch):
    """Whole units per row, exact up to 2^62.

    Units are integers because a float32 counter stops counting at 2^24 equal increments and drifts long before, a
    float64 one takes twice the memory, and integer sums do not depend on the order of arrival: counters rebuilt after a
    crash are equal bit by bit. Units that do not fit 31 bits are carried to a sorted side list, which a row reaches
    once in 2^31 units (8,192 accesses or more).
    """

    unit_bits = UNIT_BITS
    # The weight of an access is off by 3 % at most then; reached at 10^12 decayed accesses of one table.
    coarsest_units = 2**4

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        super().__init__(spec, choice, seed)
        self._low: UInt32Array = np.zeros(spec.rows, dtype=np.uint32)
        self._high_rows: Int64Array = np.empty(0, dtype=np.int64)
        self._high_carries: Int64Array = np.empty(0, dtype=np.int64)
        self._pending: Int64Array = np.empty(_PENDING_CARRIES, dtype=np.int64)
        self._pending_count = 0

    def add_units(self, rows: RowArray, units: int) -> tuple[int, int]:
        """Add ``units`` (0 to 2^31 / 4096) to each row once for every occurrence; as ``add``."""
        start, negative, outside, given = 0, 0, 0, readonly(rows)
        while start < len(rows):
            start, below, beyond, self._pending_count = _add(
                given, start, self._low, np.uint32(units), _BLOCK_IDS, self._pending, self._pending_count
            )
            negative += below
            outside += beyond
            if self._pending_count + _BLOCK_IDS > _PENDING_CARRIES:
                self._apply_pending()
        return negative, outside

    def row_units(self, rows: Int64Array) -> Int64Array:
        self._apply_pending()
        units = self._low[rows].astype(np.int64)
        found, at = matches(self._high_rows, rows)
        units[found] += self._high_carries[at] << CARRY_BITS
        return units

    def rescale(self, bits: int) -> None:
        """Divide all counters by ``2^bits``, rounded to the nearest unit."""
        self._apply_pending()
        high = self._high_units()
        if bits > 32:
            self._low[:] = 0
        else:
            _shift_low(self._low, bits)
        self._set_high(self._high_rows, high + ((1 << (bits - 1)) - 1) >> bits if bits < 62 else np.zeros_like(high))

    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        self._apply_pending()
        low = self._low.copy()
        low[self._high_rows] = 0
        hot_rows, hot_units, bin_units, bin_rows, distinct = enumerate_rows(
            low, self._high_rows, self._high_units(), max_hot_rows
        )
        total = float(hot_units.sum() + bin_units @ bin_rows)
        if total == 0:
            return self._empty_profile()
        return TableProfile(
            table=self.spec.name,
            rows=self.spec.rows,
            weight=total * self._unit_weight(decay),
            accesses_per_step=0.0,
            hot_rows=hot_rows,
            hot_share=hot_units / total,
            bin_share=bin_units / total,
            bin_rows=bin_rows,
            distinct_rows=float(distinct),
        )

    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]:
        negative, outside = 0, 0
        for start in range(0, len(rows), CHECK_IDS):
            units = self.access_units(time, decay)
            below, beyond = self.add_units(rows[start : start + CHECK_IDS], units)
            negative += below
            outside += beyond
            self.coarsen_if_crowded(time, decay)
        return negative, outside

    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        sums = self._low[rows].astype(np.int64) + times * units
        self._low[rows] = (sums & int(_CARRY_MASK)).astype(np.uint32)
        carries = sums >> CARRY_BITS
        over = np.flatnonzero(carries)
        self._carry(rows[over], carries[over])

    def _crowded(self) -> bool:
        # Up to 8,192 pending carries are not in the side list yet.
        return len(self._high_rows) > side_rows_allowed(self.spec.rows)

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        self._apply_pending()
        return {}, {"low": self._low, "high_rows": self._high_rows, "high_carries": self._high_carries}

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._low, self._high_rows, self._high_carries = (arrays[name] for name in ("low", "high_rows", "high_carries"))
        self._pending_count = 0

    def _high_units(self) -> Int64Array:
        return (self._high_carries << CARRY_BITS) + self._low[self._high_rows]

    def _set_high(self, rows: Int64Array, units: Int64Array) -> None:
        self._low[rows] = (units & int(_CARRY_MASK)).astype(np.uint32)
        kept = units >> CARRY_BITS > 0
        self._high_rows, self._high_carries = rows[kept], units[kept] >> CARRY_BITS

    def _apply_pending(self) -> None:
        if self._pending_count:
            rows, times = np.unique(self._pending[: self._pending_count], return_counts=True)
            self._pending_count = 0
            self._carry(rows, times.astype(np.int64))

    def _carry(self, rows: Int64Array, times: Int64Array) -> None:
        if len(rows):
            both, where = np.unique(np.concatenate([self._high_rows, rows]), return_inverse=True)
            carries = np.zeros(len(both), dtype=np.int64)
            carries[where[: len(self._high_rows)]] = self._high_carries
            carries[where[len(self._high_rows) :]] += times
            self._high_rows, self._high_carries = both, carries
