"""Count-min counters for tables too large for a counter per row: never too low, too high by a known bound."""

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

MIN_LOG2_WIDTH = 8
MAX_LOG2_WIDTH = 30
FAILURE_PROBABILITY = math.exp(-DEPTH)
"""Probability that one estimate exceeds ``error_share`` (Cormode and Muthukrishnan 2005, theorem 1)."""
CANDIDATE_BUFFER = 65_536
MAX_UNITS = 2**60
"""Most units of one access: four of them still fit a pair, which saturates at 2^62."""


class CountMin:
    """4 x 2^k cells of whole units, 32 bits each; two neighbours share 62 bits once one is full (``countmin_kernels``).

    An estimate is never below the row's units, and exceeds them by more than ``error_share * total units`` with
    probability at most ``e^-4`` for a given row (Cormode and Muthukrishnan, *An Improved Data Stream Summary*, J.
    Algorithms 2005), as long as few pairs are joined: ``joined_share`` of the cells count as if half as wide.
    Conservative update (Estan and Varghese, SIGCOMM 2002) raises only the cells that hold the minimum: the same bound,
    smaller errors in practice. Both properties survive ``rescale``, which rounds up.

    Positions are those of Apache DataSketches (``flexd.sketch.counters.hashing``).
    The same pass updates the registers of a HyperLogLog (``flexd.sketch.distinct``) and reports the rows whose estimate
    passes an admission threshold (``flexd.sketch.counters.hot_set``).

    Args:
        rows: rows of the table; ids outside are not counted.
        log2_width: k, 8 to 30.

    Raises:
        SketchError: the width is out of range.
    """

    def __init__(self, rows: int, log2_width: int) -> None:
        if not MIN_LOG2_WIDTH <= log2_width <= MAX_LOG2_WIDTH:
            raise SketchError(
                f"count-min of width 2^{log2_width}", remedy=f"use 2^{MIN_LOG2_WIDTH} to 2^{MAX_LOG2_WIDTH}"
            )
        self.rows = rows
        self.log2_width = log2_width
        self.total_units = 0
        """Units added to all rows together."""
        self._cells: UInt32Array = np.zeros(DEPTH << log2_width, dtype=np.uint32)
        self._joined_pairs = 0

    @staticmethod
    def bytes_of(log2_width: int) -> int:
        """Return the memory of the cells."""
        return DEPTH * 4 << log2_width

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes

    @property
    def error_share(self) -> float:
        """Error, as a share of all accesses, that one row's estimate exceeds with probability at most e^-4."""
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
        """Count ``rows[start:]`` until the candidate buffer is full.

        Args:
            rows: int32[n] or int64[n], contiguous.
            start: first id to count.
            units: of each access, 0 to 2^60 (slower from 2^31 on).
            registers: uint8[2^p] HyperLogLog registers, p <= 16, updated.
            threshold: rows whose estimate passes this many units are reported, within
                ``kernels.ADMISSION_BAND`` accesses of it.
            candidates: int64[b] buffer, b >= ``BLOCK_IDS``, of which ``candidate_count`` are in use.

        Returns:
            (next id to count, ids below 0, ids beyond the table, candidates in the buffer).

        Raises:
            SketchError: ``units`` is out of range.
        """
        if not 0 <= units <= MAX_UNITS:
            raise SketchError(f"{units} units per access", remedy="rescale the counter first")
        readonly = rows.view()
        readonly.flags.writeable = False
        end, negative, outside, candidate_count, joined = kernels.add(
            readonly,
            start,
            np.uint64(self.rows),
            self._cells,
            self.log2_width,
            np.uint64(units),
            registers,
            np.uint64(threshold),
            candidates,
            candidate_count,
        )
        self._joined_pairs += joined
        self.total_units += units * (end - start - negative - outside)
        return end, negative, outside, candidate_count

    def query(self, rows: Int64Array) -> Int64Array:
        """Return the estimated units of int64[n] ids as int64[n]."""
        out = np.empty(len(rows), dtype=np.uint64)
        kernels.query(np.ascontiguousarray(rows, dtype=np.int64), self._cells, self.log2_width, out)
        return out.view(np.int64)

    def noise(self, samples: int = 4096) -> tuple[float, float]:
        """Return (mean, upper bound) in units of the error that other rows cause in an estimate.

        Both are measured on ids beyond the table, which have no accesses, so that all of their estimate is error. The
        bound is exceeded with probability e^-4, as ``error_share`` is, and is never larger than that while no pairs are
        joined. For accessed rows it is too high, because of the conservative update.
        """
        absent = np.arange(self.rows, self.rows + samples, dtype=np.int64)
        estimates = self.query(absent)
        bound = float(np.quantile(estimates, 1 - FAILURE_PROBABILITY, method="higher"))
        width_share = self.error_share * (1 + self.joined_share)
        return float(estimates.mean()), min(bound, width_share * self.total_units)

    def rescale(self, bits: int) -> None:
        """Divide all counters by ``2^bits``, rounding up so that no estimate falls below its row's units."""
        if bits <= 0:
            return
        if bits > 62:
            self._cells[:] = 0
            self.total_units = self._joined_pairs = 0
            return
        self._joined_pairs = kernels.rescale(self._cells, np.uint64(bits))
        self.total_units = (self.total_units + (1 << bits) - 1) >> bits

    def cells(self) -> UInt32Array:
        """Return a copy of the words for ``load``: uint32[4 * 2^k], row by row."""
        return self._cells.copy()

    def load(self, cells: npt.NDArray[Any], total_units: int) -> None:
        """Replace the cells by saved words.

        Raises:
            SketchError: they are of another shape or inconsistent.
        """
        fits = cells.shape == self._cells.shape and cells.dtype == np.uint32 and total_units >= 0
        joined = kernels.joined_pairs(np.ascontiguousarray(cells)) if fits else -1
        if joined < 0:
            raise SketchError(f"saved cells do not fit 4 x 2^{self.log2_width}", remedy="start from empty counters")
        self._cells, self.total_units, self._joined_pairs = cells.copy(), total_units, joined


def warm_up() -> None:
    """Compile the kernels (or load them from numba's cache)."""
    one = np.zeros(4, dtype=np.int64)
    for rows in (one.astype(np.int32), one):
        counter = CountMin(4, MIN_LOG2_WIDTH)
        counter.add(rows, 0, 1, np.zeros(16, dtype=np.uint8), 0, np.empty(BLOCK_IDS, dtype=np.int64), 0)
    counter.query(one)
    counter.rescale(1)
    counter.load(counter.cells(), 0)
