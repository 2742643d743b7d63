"""Count-min counters for tables too large to count row by row: never too low, too high by a known bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.sketch.counters import countmin_kernels as kernels
from flexd.sketch.counters.countmin_kernels import BLOCK_IDS as BLOCK_IDS
from flexd.sketch.counters.countmin_kernels import DEPTH as DEPTH

Int64Array = npt.NDArray[np.int64]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

MIN_LOG2_WIDTH = 8
MAX_LOG2_WIDTH = 30
FAILURE_PROBABILITY = math.exp(-DEPTH)
"""Of one estimate exceeding ``error_share`` (Cormode and Muthukrishnan 2005, theorem 1)."""
CANDIDATE_BUFFER = 65_536
MAX_UNITS = 2**60
"""Of one access: four of them still fit a pair, which stops at 2^62."""
ADMISSION_BAND = 2
"""Accesses past the admission threshold for which a row is still reported as a candidate."""


class CountMin:
    """4 x 2^k cells of whole units, 32 bits each; two neighbours share 62 bits once one is full (``countmin_kernels``).

    An estimate is never below the row's units, and exceeds them by more than ``error_share * total units`` with
    probability at most ``e^-4`` for a given row (Cormode and Muthukrishnan, *An Improved Data Stream Summary*, J.
    Algorithms 2005), as long as few pairs are joined: ``joined_share`` of the cells count as if half as wide.
    Conservative update (Estan and Varghese, SIGCOMM 2002) raises only the cells that hold the minimum: the same bound,
    smaller errors in practice. Both survive ``merge`` and ``rescale``, which rounds up. Plain counters depend on the
    order of arrival in nothing, and merge exactly (until rescaled).

    Positions are those of Apache DataSketches (``flexd.sketch.counters.hashing``).
    The same pass feeds the registers of a HyperLogLog (``flexd.sketch.distinct``) and reports the rows whose estimate
    passes an admission threshold (``flexd.sketch.counters.hot_set``), since the estimate is at hand.

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
        self._cells: UInt32Array = np.zeros(DEPTH << log2_width, dtype=np.uint32)
        self._joined_pairs = 0

    @staticmethod
    def bytes_of(log2_width: int) -> int:
        """Memory of the cells, whatever they hold."""
        return DEPTH * 4 << log2_width

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes

    @property
    def error_share(self) -> float:
        """Over-estimate as a share of all accesses that one row's estimate exceeds with probability at most e^-4."""
        return math.e / (1 << self.log2_width)

    @property
    def joined_share(self) -> float:
        """Share of the cells that share their value with a neighbour, 0-1."""
        return 2 * self._joined_pairs / len(self._cells)

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
            units: of each access, 0 to 2^60 (from 2^31 on slower).
            registers: uint8[2^p] HyperLogLog registers, p <= 16, updated.
            threshold: rows that pass this many units are reported, while within ``ADMISSION_BAND`` accesses of it.
            candidates: int64[b] buffer, b >= ``BLOCK_IDS``; ``candidate_count`` of it are taken.

        Returns:
            (next id to count, ids below 0, ids beyond the table, candidates in the buffer).

        Raises:
            SketchError: ``units`` out of range.
        """
        if not 0 <= units <= MAX_UNITS:
            raise SketchError(f"{units} units an access", remedy="rescale the counter first")
        readonly = rows.view()
        readonly.flags.writeable = False
        end, negative, outside, candidate_count, joined = kernels.add(
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
        self._joined_pairs += joined
        self.total_units += units * (end - start - negative - outside)
        return end, negative, outside, candidate_count

    def query(self, rows: Int64Array) -> Int64Array:
        """int64[n] ids -> int64[n] estimated units."""
        out = np.empty(len(rows), dtype=np.uint64)
        kernels.query(np.ascontiguousarray(rows, dtype=np.int64), self._cells, self.log2_width, out)
        return out.view(np.int64)

    def noise(self, samples: int = 4096) -> tuple[float, float]:
        """(mean, upper bound) in units of what an estimate owes to other rows.

        Measured on ids beyond the table, which nobody accesses, so that all of their estimate is error; the bound is
        exceeded with probability e^-4, as ``error_share`` is, and is never larger than it while no pairs are joined.
        It holds for any row of plain counters; with conservative update it is on the safe side for rows that are
        accessed.
        """
        absent = np.arange(self.rows, self.rows + samples, dtype=np.int64)
        estimates = self.query(absent)
        bound = float(np.quantile(estimates, 1 - FAILURE_PROBABILITY, method="higher"))
        width_share = self.error_share * (1 + self.joined_share)
        return float(estimates.mean()), min(bound, width_share * self.total_units)

    def rescale(self, bits: int) -> None:
        """Divides all counters by ``2^bits``, rounding up so that no estimate falls below its row's units."""
        if bits <= 0:
            return
        if bits > 62:
            self._cells[:] = 0
            self.total_units = self._joined_pairs = 0
            return
        self._joined_pairs = kernels.rescale(self._cells, np.uint64(bits), self.conservative)
        self.total_units = (self.total_units + (1 << bits) - 1) >> bits

    def merge(self, other: CountMin) -> None:
        """Adds the other's cells, which must be at the same scale.

        Raises:
            SketchError: another shape, or one is plain and the other conservative.
        """
        if (other.rows, other.log2_width, other.conservative) != (self.rows, self.log2_width, self.conservative):
            raise SketchError(
                f"count-min of {self.rows} rows x 2^{self.log2_width} and {other.rows} x 2^{other.log2_width} "
                "cannot be merged",
                remedy="give all daemons of a job the same tables and sketch settings",
            )
        self._joined_pairs = kernels.merge(self._cells, other._cells, self.conservative)
        self.total_units += other.total_units

    def copy(self) -> CountMin:
        twin = CountMin(self.rows, MIN_LOG2_WIDTH, conservative=self.conservative)
        twin.log2_width, twin.total_units, twin._cells = self.log2_width, self.total_units, self._cells.copy()
        twin._joined_pairs = self._joined_pairs
        return twin

    def cells(self) -> UInt32Array:
        """A copy of the words: uint32[4 * 2^k], row by row, for ``load``."""
        return self._cells.copy()

    def values(self) -> UInt64Array:
        """Units in each cell: uint64[4, 2^k]; both cells of a joined pair have its value."""
        out = np.empty(len(self._cells), dtype=np.uint64)
        kernels.values(self._cells, out)
        return out.reshape(DEPTH, -1)

    def load(self, cells: npt.NDArray[Any], total_units: int) -> None:
        """Takes over saved words. Raises SketchError if they are of another shape or make no sense."""
        fits = cells.shape == self._cells.shape and cells.dtype == np.uint32 and total_units >= 0
        joined = kernels.joined_pairs(np.ascontiguousarray(cells)) if fits else -1
        if joined < 0:
            raise SketchError(f"saved cells do not fit 4 x 2^{self.log2_width}", remedy="start from empty counters")
        self._cells, self.total_units, self._joined_pairs = cells.copy(), total_units, joined

    def load_values(self, values: UInt64Array, total_units: int) -> None:
        """Takes over units by cell: uint64[4, 2^k], each below 2^62. Raises SketchError on anything else."""
        shape = (DEPTH, 1 << self.log2_width)
        if values.shape != shape or values.dtype != np.uint64 or total_units < 0 or int(values.max()) >= 2**61:
            raise SketchError(f"cells do not fit 4 x 2^{self.log2_width} of 61 bits", remedy="give a coarser unit")
        flat = np.ascontiguousarray(values).reshape(-1)
        self._joined_pairs = kernels.store(flat, self._cells, self.conservative)
        self.total_units = total_units


def warm_up() -> None:
    """Compiles the kernels (or loads them from numba's cache)."""
    one = np.zeros(4, dtype=np.int64)
    for rows in (one.astype(np.int32), one):
        counter = CountMin(4, MIN_LOG2_WIDTH)
        counter.add(rows, 0, 1, np.zeros(16, dtype=np.uint8), 0, np.empty(BLOCK_IDS, dtype=np.int64), 0)
    counter.query(one)
    counter.merge(counter.copy())
    counter.rescale(1)
    counter.load(counter.cells(), 0)
