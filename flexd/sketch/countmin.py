"""Count-min counters for tables too large to count row by row: never too low, too high by a known bound."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from flexd.errors import SketchError

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

DEPTH = 4
MIN_LOG2_WIDTH = 8
MAX_LOG2_WIDTH = 30
FAILURE_PROBABILITY = math.exp(-DEPTH)
"""Of one estimate exceeding ``error_share`` (Cormode and Muthukrishnan 2005, theorem 1)."""
BLOCK_IDS = 128
"""A candidate buffer needs room for one more block."""
CANDIDATE_BUFFER = 65_536
ADMISSION_BAND = 2
"""Accesses past the admission threshold for which a row is still reported as a candidate."""


@numba.njit(cache=True, nogil=True, inline="always")
def _hash(x: Any) -> Any:
    """The 64-bit finaliser of MurmurHash3 (Appleby, public domain) over a salted id."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@numba.njit(cache=True, nogil=True, inline="always")
def _rehash(h: Any) -> Any:
    g = h * np.uint64(0xD6E8FEB86659FD93)
    return g ^ (g >> np.uint64(32))


@numba.njit(cache=True, nogil=True)
def _add(
    rows: Any,
    start: int,
    limit: Any,
    cells: Any,
    log2_width: int,
    units: Any,
    conservative: bool,
    registers: Any,
    threshold: Any,
    candidates: Any,
    candidate_count: int,
) -> tuple[int, int, int, int]:
    one = np.uint64(1)
    half = np.uint64(32)
    width = one << np.uint64(log2_width)
    mask = width - one
    register_mask = np.uint64(registers.size - 1)
    band = threshold + np.uint64(2) * units
    index = np.empty((128, 4), np.uint64)
    kept = np.empty(128, np.int64)
    negative = 0
    outside = 0
    n = rows.size
    while start < n and candidate_count + 128 <= candidates.size:
        end = min(start + 128, n)
        count = 0
        # Hashing apart from counting lets the processor have several rows' cells under way at once.
        for i in range(start, end):
            row = rows[i]
            key = np.uint64(np.int64(row))
            if key < limit:
                h = _hash(key)
                g = _rehash(h)
                at = np.uint64(count)
                index[at, 0] = h & mask
                index[at, 1] = width + ((h >> half) & mask)
                index[at, 2] = width + width + (g & mask)
                index[at, 3] = width + width + width + ((g >> half) & mask)
                kept[at] = np.int64(row)
                count += 1
                # A register holds 1 + the most trailing zeros seen; it grows only if that many bits are all zero.
                mixed = (h >> np.uint64(7)) ^ (g << np.uint64(11))
                register = h >> np.uint64(52) & register_mask
                rank = registers[register]
                if (mixed & ((one << np.uint64(rank)) - one)) == 0 and rank < 52:
                    zeros = np.uint8(rank)
                    while zeros < 51 and (mixed >> np.uint64(zeros)) & one == 0:
                        zeros += 1
                    registers[register] = zeros + 1
            elif row < 0:
                negative += 1
            else:
                outside += 1
        for j in range(count):
            at = np.uint64(j)
            a = index[at, 0]
            b = index[at, 1]
            c = index[at, 2]
            d = index[at, 3]
            va = cells[a]
            vb = cells[b]
            vc = cells[c]
            vd = cells[d]
            before = min(min(va, vb), min(vc, vd))
            after = before + units
            if conservative:
                cells[a] = max(va, after)
                cells[b] = max(vb, after)
                cells[c] = max(vc, after)
                cells[d] = max(vd, after)
            else:
                cells[a] = va + units
                cells[b] = vb + units
                cells[c] = vc + units
                cells[d] = vd + units
            if before < band and after >= threshold:
                candidates[candidate_count] = kept[at]
                candidate_count += 1
        start = end
    return start, negative, outside, candidate_count


@numba.njit(cache=True, nogil=True)
def _query(rows: Any, cells: Any, log2_width: int, out: Any) -> None:
    half = np.uint64(32)
    width = np.uint64(1) << np.uint64(log2_width)
    mask = width - np.uint64(1)
    for i in range(rows.size):
        h = _hash(np.uint64(rows[i]))
        g = _rehash(h)
        out[i] = min(
            min(cells[h & mask], cells[width + ((h >> half) & mask)]),
            min(cells[width + width + (g & mask)], cells[width + width + width + ((g >> half) & mask)]),
        )


class CountMin:
    """4 x 2^k cells of whole units (64-bit: a cell of a heavy stream passes 2^32 within minutes).

    An estimate is never below the row's units, and exceeds them by more than ``error_share * total units`` with
    probability at most ``e^-4`` for a given row (Cormode and Muthukrishnan, *An Improved Data Stream Summary*, J.
    Algorithms 2005). Conservative update (Estan and Varghese, SIGCOMM 2002) raises only the cells that hold the
    minimum: the same bound, smaller errors in practice. Both survive ``merge`` and ``rescale``, which rounds up.

    The same pass feeds the registers of a HyperLogLog (``flexd.sketch.distinct``) and reports the rows whose estimate
    passes an admission threshold (``flexd.sketch.hotset``), since hash and estimate are at hand.

    Args:
        rows: rows of the table; ids outside are not counted.
        log2_width: k, 8 to 30.
        conservative: see above.

    Raises:
        SketchError: width out of range.
    """

    def __init__(self, rows: int, log2_width: int, *, conservative: bool = True) -> None:
        if not MIN_LOG2_WIDTH <= log2_width <= MAX_LOG2_WIDTH:
            raise SketchError(
                f"count-min of width 2^{log2_width}", remedy=f"use 2^{MIN_LOG2_WIDTH} to 2^{MAX_LOG2_WIDTH}"
            )
        self.rows = rows
        self.log2_width = log2_width
        self.conservative = conservative
        self.total_units = 0
        """Units added, by all rows together."""
        self._cells: UInt64Array = np.zeros(DEPTH << log2_width, dtype=np.uint64)

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes

    @property
    def error_share(self) -> float:
        """Over-estimate as a share of all accesses that one row's estimate exceeds with probability at most e^-4."""
        return math.e / (1 << self.log2_width)

    def add(
        self,
        rows: npt.NDArray[np.int32] | Int64Array,
        start: int,
        units: int,
        registers: npt.NDArray[np.uint8],
        threshold: int,
        candidates: Int64Array,
        candidate_count: int,
    ) -> tuple[int, int, int, int]:
        """Counts ``rows[start:]`` as far as the candidate buffer lasts.

        Args:
            rows: int32[n] or int64[n], contiguous.
            start: first id to count.
            units: of each access, 0 to 2^40.
            registers: uint8[2^p] HyperLogLog registers, p <= 12, updated.
            threshold: rows that pass this many units are reported, while within ``ADMISSION_BAND`` accesses of it.
            candidates: int64[b] buffer, b >= 128; ``candidate_count`` of it are taken.

        Returns:
            (next id to count, ids below 0, ids beyond the table, candidates in the buffer).
        """
        readonly = rows.view()
        readonly.flags.writeable = False
        end, negative, outside, candidate_count = _add(
            readonly,
            start,
            np.uint64(self.rows),
            self._cells,
            self.log2_width,
            np.uint64(units),
            self.conservative,
            registers,
            np.uint64(threshold),
            candidates,
            candidate_count,
        )
        self.total_units += units * (end - start - negative - outside)
        return end, negative, outside, candidate_count

    def query(self, rows: Int64Array) -> Int64Array:
        """int64[n] ids -> int64[n] estimated units."""
        out = np.empty(len(rows), dtype=np.uint64)
        _query(np.ascontiguousarray(rows, dtype=np.int64), self._cells, self.log2_width, out)
        return out.astype(np.int64)

    def noise(self, samples: int = 4096) -> tuple[float, float]:
        """(mean, upper bound) in units of what an estimate owes to other rows.

        Measured on ids beyond the table, which nobody accesses, so that all of their estimate is error; the bound is
        exceeded with probability e^-4, as ``error_share`` is, and is never larger than it. It holds for any row of
        plain counters; with conservative update it is on the safe side for rows that are accessed.
        """
        absent = np.arange(self.rows, self.rows + samples, dtype=np.int64)
        estimates = self.query(absent)
        bound = float(np.quantile(estimates, 1 - FAILURE_PROBABILITY, method="higher"))
        return float(estimates.mean()), min(bound, self.error_share * self.total_units)

    def rescale(self, bits: int) -> None:
        """Divides all counters by ``2^bits``, rounding up so that no estimate falls below its row's units."""
        if bits <= 0:
            return
        if bits > 62:
            self._cells[:] = 0
            self.total_units = 0
            return
        up = np.uint64((1 << bits) - 1)
        self._cells += up
        self._cells >>= np.uint64(bits)
        self.total_units = (self.total_units + int(up)) >> bits

    def merge(self, other: CountMin) -> None:
        """Adds the other's cells, which must be at the same scale.

        Raises:
            SketchError: another shape.
        """
        if (other.rows, other.log2_width) != (self.rows, self.log2_width):
            raise SketchError(
                f"count-min of {self.rows} rows x 2^{self.log2_width} and {other.rows} x 2^{other.log2_width} "
                "cannot be merged",
                remedy="give all daemons of a job the same tables and sketch memory",
            )
        self._cells += other._cells
        self.total_units += other.total_units

    def copy(self) -> CountMin:
        twin = CountMin(self.rows, MIN_LOG2_WIDTH, conservative=self.conservative)
        twin.log2_width, twin.total_units, twin._cells = self.log2_width, self.total_units, self._cells.copy()
        return twin

    def cells(self) -> UInt64Array:
        """A copy of the cells: uint64[4 * 2^k], row by row."""
        return self._cells.copy()

    def load(self, cells: npt.NDArray[Any], total_units: int) -> None:
        """Takes over saved cells. Raises SketchError if they are of another shape."""
        if cells.shape != self._cells.shape or cells.dtype != np.uint64 or total_units < 0:
            raise SketchError(f"saved cells do not fit 4 x 2^{self.log2_width}", remedy="start from empty counters")
        self._cells, self.total_units = cells.copy(), total_units


def warm_up() -> None:
    """Compiles the kernels (or loads them from numba's cache)."""
    for rows in (np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.int64)):
        counter = CountMin(4, MIN_LOG2_WIDTH)
        registers = np.zeros(16, dtype=np.uint8)
        counter.add(rows, 0, 1, registers, 0, np.empty(BLOCK_IDS, dtype=np.int64), 0)
        counter.query(np.zeros(4, dtype=np.int64))
