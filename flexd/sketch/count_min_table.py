"""The sketch of a table counted by a count-min, with the rows that may be hot, a sample and a distinct count."""

import math
from typing import Any

import numpy as np

from flexd.core.arrays import Arrays, Float64Array, Int64Array, RowArray, UInt8Array, UInt32Array, first_of_run
from flexd.core.keyspace import TableSpec
from flexd.sketch import count_min_kernels as kernels
from flexd.sketch.decay import ForwardDecay
from flexd.sketch.profile import TableProfile
from flexd.sketch.table_sketch import TableChoice, TableSketch, readonly

MIN_LOG2_WIDTH = 8
MAX_LOG2_WIDTH = 30
# Probability that one estimate exceeds its bound (Cormode and Muthukrishnan 2005, theorem 1).
FAILURE_PROBABILITY = math.exp(-kernels.DEPTH)
LOG2_REGISTERS = 12
# Relative standard error of the distinct count, 1.6 % (Flajolet et al. 2007).
DISTINCT_ERROR = 1.04 / math.sqrt(2**LOG2_REGISTERS)
_TAIL_BINS = 32
# Bits examined for leading zeros: a register holds 0 to 63, as in DataSketches.
_HASH_BITS = 62


def error_share(log2_width: int) -> float:
    """Return the error, as a share of all accesses, that one row's estimate exceeds with ``FAILURE_PROBABILITY``."""
    return math.e / (1 << log2_width)


def bytes_of(log2_width: int, hot_rows: int) -> int:
    """Return the memory of cells, hot rows with their buffer, and registers."""
    size: int = (kernels.DEPTH * 4 << log2_width) + 8 * (2 * hot_rows + _buffer_rows(hot_rows)) + 2**LOG2_REGISTERS
    return size


def _buffer_rows(hot_rows: int) -> int:
    return min(65_536, max(2 * kernels.BLOCK_IDS, hot_rows))


class CountMinTable(TableSketch):
    """4 x 2^k cells of whole units, 32 bits each; two neighbours share 62 bits once one is full
    (``count_min_kernels``).

    An estimate is never below the row's units, and exceeds them by more than ``error_share * total units`` with
    probability at most ``e^-4`` for a given row (Cormode and Muthukrishnan, *An Improved Data Stream Summary*, J.
    Algorithms 2005), as long as few pairs are joined: ``joined_share`` of the cells count as if half as wide.
    Conservative update (Estan and Varghese, SIGCOMM 2002) raises only the cells that hold the minimum: the same bound,
    smaller errors in practice. Both properties survive ``rescale``, which rounds up.

    **Hot rows**: up to twice ``hot_capacity`` candidates; when there are more, the best ``hot_capacity`` are kept.
    The threshold is the lowest estimate kept by the last trim. A row is admitted when an access raises its estimate
    past it, so a dropped row returns once it is hotter than the coldest row kept then. Candidates are a by-product of
    counting, so a cold row costs nothing.

    **Distinct rows**: the same pass fills the registers of a HyperLogLog.
    """

    # Fewer than an exact counter's: rounding up costs at most 0.1 % of a weight, less than the error of a count-min,
    # and a row's cells join, which slows counting down, 64 times later.
    unit_bits = 10
    # An access's weight is off by 0.4 % at most. From there on cells join, at no memory.
    coarsest_units = 2**8
    rounds_up = True

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        super().__init__(spec, choice, seed)
        self.log2_width = choice.log2_width
        # Units added to all rows together.
        self.total_units = 0
        self.cells: UInt32Array = np.zeros(kernels.DEPTH << choice.log2_width, dtype=np.uint32)
        self._joined_pairs = 0
        self.hot_capacity = choice.hot_rows
        # The admitted candidates, ascending.
        self.hot: Int64Array = np.empty(0, dtype=np.int64)
        self._threshold = 0
        self._buffer: Int64Array = np.empty(_buffer_rows(choice.hot_rows), dtype=np.int64)
        self._buffered = 0
        self.registers: UInt8Array = np.zeros(2**LOG2_REGISTERS, dtype=np.uint8)

    @property
    def joined_share(self) -> float:
        """Share of the cells that share their value with a neighbour, 0-1."""
        return 2 * self._joined_pairs / len(self.cells)

    def row_units(self, rows: Int64Array) -> Int64Array:
        out = np.empty(len(rows), dtype=np.uint64)
        kernels.query(np.ascontiguousarray(rows, dtype=np.int64), self.cells, self.log2_width, out)
        return out.view(np.int64)

    def noise(self) -> tuple[float, float]:
        """Return (mean, upper bound) in units of the error that other rows cause in an estimate.

        Both are measured on ids beyond the table, which have no accesses, so that all of their estimate is error. The
        bound is exceeded with probability e^-4, as ``error_share`` is, and is never larger than that while no pairs are
        joined. For accessed rows it is too high, because of the conservative update.
        """
        estimates = self.row_units(np.arange(self.spec.rows, self.spec.rows + 4096, dtype=np.int64))
        bound = float(np.quantile(estimates, 1 - FAILURE_PROBABILITY, method="higher"))
        width_share = error_share(self.log2_width) * (1 + self.joined_share)
        return float(estimates.mean()), min(bound, width_share * self.total_units)

    def distinct_rows(self) -> float:
        """Return the estimate of rows with an access, with relative standard error ``DISTINCT_ERROR``.

        Ertl's improved estimator (*New cardinality estimation algorithms for HyperLogLog sketches*, arXiv 1702.01284,
        algorithm 6): unbiased from zero up, without the empirical tables of HLL++.
        """
        m = len(self.registers)
        counts: list[int] = np.bincount(self.registers, minlength=_HASH_BITS + 2).tolist()
        if counts[0] == m:
            return 0.0
        powers = 2.0 ** np.arange(1, 64)
        # tau(x) and sigma(x) of his equations 25 and 20.
        x = 1 - counts[_HASH_BITS + 1] / m
        z = m * (1 - x - float(((1 - x ** (1 / powers)) ** 2 / powers).sum())) / 3
        for k in range(_HASH_BITS, 0, -1):
            z = 0.5 * (z + counts[k])
        x = counts[0] / m
        z += m * (x + float((x**powers * powers / 2).sum()))
        return m * m / (2 * math.log(2)) / z

    def rescale(self, bits: int) -> None:
        """Divide all counters by ``2^bits``, rounding up so that no estimate falls below its row's units."""
        if bits > 62:
            self.cells[:] = 0
            self.total_units = self._joined_pairs = self._threshold = 0
            return
        self._joined_pairs = kernels.rescale(self.cells, np.uint64(bits))
        self.total_units = (self.total_units + (1 << bits) - 1) >> bits
        self._threshold = (self._threshold + (1 << bits) - 1) >> bits

    def admit_buffered(self) -> None:
        """Admit the buffered candidates, and trim if there are too many."""
        if self._buffered:
            both = np.concatenate([self.hot, np.sort(self._buffer[: self._buffered])])
            self._buffered = 0
            # Two ascending runs: stable sorting merges them.
            both.sort(kind="stable")
            self.hot = both[first_of_run(both)]
        if len(self.hot) > 2 * self.hot_capacity:
            estimates = self.row_units(self.hot)
            best = np.argpartition(estimates, -self.hot_capacity)[-self.hot_capacity :]
            self._threshold = int(estimates[best].min())
            self.hot = np.sort(self.hot[best])

    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]:
        start, negative, outside = 0, 0, 0
        while start < len(rows):
            self.coarsen_if_crowded(time, decay)
            start, below, beyond = self.add_units(rows, self.access_units(time, decay), start)
            negative += below
            outside += beyond
        return negative, outside

    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        # One bit of the counts at a time, so that the conservative update of the one kernel holds.
        for bit in range(int(times.max()).bit_length() if len(times) else 0):
            chosen, start = rows[(times >> bit) & 1 == 1], 0
            while start < len(chosen):
                start, _, _ = self.add_units(chosen, units << bit, start)

    def add_units(self, rows: RowArray, units: int, start: int = 0) -> tuple[int, int, int]:
        """Add ``units`` (below 2^61; slower from 2^31 on) for every occurrence in ``rows[start:]``, until the buffer of
        candidates is full.

        Returns:
            (next id to count, ids below 0, ids beyond the table).
        """
        end, negative, outside, self._buffered, joined = kernels.add(
            readonly(rows), start, np.uint64(self.spec.rows), self.cells, self.log2_width, np.uint64(units),
            self.registers, np.uint64(self._threshold), self._buffer, self._buffered,
        )  # fmt: skip
        self._joined_pairs += joined
        self.total_units += units * (end - start - negative - outside)
        if self._buffered + kernels.BLOCK_IDS > len(self._buffer):
            self.admit_buffered()
        return end, negative, outside

    def _crowded(self) -> bool:
        # More cells of a decayed count-min that share a value make the unit coarser.
        return self.joined_share > 1 / 8

    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        total = float(self.total_units)
        if total == 0:
            return self._empty_profile()
        self.admit_buffered()
        units = self.row_units(self.hot)
        order = np.lexsort((self.hot, -units))[: min(max_hot_rows, self.hot_capacity)]
        rows, units = self.hot[order], units[order].astype(np.float64)
        mean_noise, noise_bound = self.noise()
        distinct = min(self.distinct_rows(), float(self.spec.rows))
        # A sampled access of a steady stream weighs half of one made now on average; without decay all weigh 1.
        access_units = 1.0 if decay.half_life_seconds is None else 0.5 / max(self._unit_weight(decay), 1e-300)
        tail_rows, tail_units = self._tail(rows, mean_noise, access_units, distinct)
        hot_share = np.minimum(units / total, 1.0)
        return TableProfile(
            table=self.spec.name,
            rows=self.spec.rows,
            weight=total * self._unit_weight(decay),
            accesses_per_step=0.0,
            hot_rows=rows,
            hot_share=hot_share,
            hot_bounds=(np.maximum(units - noise_bound, 0.0) / total, hot_share),
            bin_share=tail_units / total,
            bin_rows=tail_rows,
            distinct_rows=distinct,
        )

    def _tail(
        self, hot: Int64Array, mean_noise: float, access_units: float, distinct: float
    ) -> tuple[Float64Array, Float64Array]:
        sampled = self._sample.rows()
        cold = sampled[~np.isin(sampled, hot)]
        share = len(cold) / max(1, len(sampled))
        estimates = self.row_units(cold).astype(np.float64)
        # A row that was accessed has at least that access, whatever the noise.
        units = np.maximum(np.maximum(estimates - mean_noise, np.minimum(estimates, access_units)), 1.0)
        return tail_curve(units, share * self.total_units, max(1.0, distinct - len(hot)))

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        arrays: Arrays = {
            "cells": self.cells, "registers": self.registers, "hot_rows": self.hot,
            "hot_buffer": self._buffer[: self._buffered],
        }  # fmt: skip
        return {"total_units": self.total_units, "hot_threshold": self._threshold}, arrays

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self.cells, self.registers, self.hot = arrays["cells"], arrays["registers"], arrays["hot_rows"]
        self._joined_pairs, self.total_units = kernels.joined_pairs(self.cells), int(meta["total_units"])
        buffer = arrays["hot_buffer"]
        self._threshold, self._buffered = int(meta["hot_threshold"]), len(buffer)
        self._buffer[: self._buffered] = buffer


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
    edges = np.unique(np.sort(units)[np.arange(1, _TAIL_BINS) * len(units) // _TAIL_BINS])
    where = np.searchsorted(edges, units, side="left")
    size = np.bincount(where, minlength=len(edges) + 1)
    inverse = np.bincount(where, weights=1.0 / units, minlength=len(edges) + 1)
    filled = np.flatnonzero(size)[::-1]
    mass = tail_units * size[filled] / len(units)
    rows = mass * inverse[filled] / size[filled]
    # Estimates are rather too high, but sampling can still give more rows than exist.
    rows *= min(1.0, max_rows / float(rows.sum()))
    return rows, mass / rows
