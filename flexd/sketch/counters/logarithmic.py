"""Logarithmic counters: an approximate count of 3, 4 or 8 bits for every row."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.errors import SketchError
from flexd.sketch.counters import logarithmic_kernels as kernels

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

BASES = {3: 1.4, 4: 1.25, 8: 1.04}
"""Ratio of the steps of two successive levels, by bits of a counter."""
CHECK_IDS = 8_192
"""Ids counted between two checks of the number of rows at the top level."""
TOP_SHARE = 1 / 32
"""Share of the rows that may be at the top level before the step is doubled."""


def relative_error(bits: int) -> float:
    """Return the relative standard error of a counter's estimate, sqrt((base - 1) / 2).

    Morris, *Counting large numbers of events in small registers*, CACM 1978; Flajolet, *Approximate counting: a
    detailed analysis*, BIT 1985.
    """
    return math.sqrt((BASES[bits] - 1) / 2)


@cache
def level_values(bits: int) -> Float64Array:
    """Return the value of each level in steps, (base^level - 1) / (base - 1), as read-only float64[2^bits]."""
    values: Float64Array = (BASES[bits] ** np.arange(1 << bits, dtype=np.float64) - 1) / (BASES[bits] - 1)
    values.flags.writeable = False
    return values


class LogCounter:
    """Unbiased approximate counts: an access of weight w moves a row from the level of value v to the level at or below
    v + w, or to the next one, at random so that the mean is v + w.

    The levels are those of Morris's counter, times ``step`` units. The step doubles once more than ``TOP_SHARE`` of the
    rows have reached the top level; every counter is then rounded, up or down at random, to the new levels. Units of a
    row beyond the top level are not counted by row, but ``total_units`` is exact for all accesses.

    Random numbers are a function of the number of draws made (``logarithmic_kernels``), which is saved: equal streams
    in equal order give equal bits, across a restart too.

    Args:
        rows: rows of the table; ids outside are not counted.
        bits: 3, 4 or 8.
        seed: of the random numbers.

    Raises:
        SketchError: unsupported number of bits.
    """

    def __init__(self, rows: int, bits: int, seed: int) -> None:
        if bits not in BASES:
            raise SketchError(f"logarithmic counters of {bits} bits", remedy="use 3, 4 or 8")
        self.rows = rows
        self.bits = bits
        self.total_units = 0
        """Units added to all rows together."""
        self.step = 0.0
        """Units of the first level; 0 before any access."""
        self._draws = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
        self._packed: UInt8Array = np.zeros(packed_bytes(rows, bits), dtype=np.uint8)
        self._counts: Int64Array = np.zeros(1 << bits, dtype=np.int64)
        self._counts[0] = rows

    @property
    def top_rows(self) -> int:
        """Rows at the top level."""
        return int(self._counts[-1])

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    @property
    def values(self) -> Float64Array:
        """Units of each level, float64[2^bits]."""
        return level_values(self.bits) * self.step

    def add(self, rows: npt.NDArray[np.int32] | Int64Array, units: int) -> tuple[int, int]:
        """Add ``units`` to each row in ``rows``, once for every occurrence.

        Args:
            rows: int32[n] or int64[n], contiguous; ids outside the table are not counted.
            units: 0 or more.

        Returns:
            (ids below 0, ids beyond the table).
        """
        if units and not self.step:
            self.step = float(units)
        readonly = rows.view()
        readonly.flags.writeable = False
        negative, outside = 0, 0
        weight = units / self.step if units else 0.0
        for start in range(0, len(rows), CHECK_IDS):
            end = min(start + CHECK_IDS, len(rows))
            below, beyond = kernels.add(
                readonly, start, end, np.uint64(self.rows), self._packed, self._counts, self.bits,
                level_values(self.bits), weight, np.uint64(self._draws),
            )  # fmt: skip
            self._skip_draws(end - start)
            negative += below
            outside += beyond
            if self.top_rows > self._top_allowed():
                self._double_step_if_crowded()
                weight = units / self.step
        self.total_units += units * (len(rows) - negative - outside)
        return negative, outside

    def add_weights(self, rows: Int64Array, units: Float64Array, total_units: int) -> None:
        """Add to each row its own number of units, with the same mean as access by access and less variance.

        Args:
            rows: int64[n] rows of the table, without repeats.
            units: float64[n], 0 or more.
            total_units: added to the exact total.
        """
        self.total_units += total_units
        if not self.step:
            self.step = float(units[units > 0].min(initial=np.inf))
            if not math.isfinite(self.step):
                self.step = 0.0
                return
        for start in range(0, len(rows), CHECK_IDS):
            part = np.ascontiguousarray(rows[start : start + CHECK_IDS], dtype=np.int64)
            weights = units[start : start + CHECK_IDS] / self.step
            kernels.add_weights(
                part, weights, self._packed, self._counts, self.bits, level_values(self.bits), np.uint64(self._draws)
            )
            self._skip_draws(len(part))
            self._double_step_if_crowded()

    def rescale(self, bits: int) -> None:
        """Divide all counters by ``2^bits``. The levels do not change; the value of each does."""
        if bits > 0:
            self.step = math.ldexp(self.step, -bits) if self.step else 0.0
            self.total_units = (self.total_units + (1 << (bits - 1))) >> bits

    def levels(self, rows: Int64Array) -> UInt8Array:
        """Return the levels of int64[n] rows of the table as uint8[n]."""
        out = np.empty(len(rows), dtype=np.uint8)
        kernels.read(self._packed, np.ascontiguousarray(rows, dtype=np.int64), self.bits, out)
        return out

    def histogram(self) -> Int64Array:
        """Return the number of rows at each level, int64[2^bits]."""
        return self._counts.copy()

    def rows_of_levels(self, room: Int64Array) -> Int64Array:
        """Return row ids by level, highest level first, ascending within a level.

        Args:
            room: int64[2^bits], rows to return of each level, at most as many as it has.
        """
        ends = np.cumsum(room[::-1])[::-1]
        rows = np.empty(int(room.sum()), dtype=np.int64)
        kernels.collect(self._packed, self.rows, self.bits, ends - room, ends, rows)
        return rows

    def level_errors(self, units: float, *, equal: bool) -> Float64Array:
        """Return the relative standard error of the estimate of each level, float64[2^bits].

        An access of u steps, at a level whose gap to the next is g, adds (g - u) u to the variance while u < g, and
        g^2 / 6 on average if it is wider. The gap is linear in the count, so this is integrated up to the level. High
        levels approach ``relative_error``.

        Args:
            units: of a typical access.
            equal: all accesses have the same weight, so that steps as wide as one are exact.
        """
        values = level_values(self.bits)
        weight = units / self.step if self.step and units > 0 else 1.0
        gaps = np.append(np.diff(values), (values[-1] - values[-2]) * BASES[self.bits])
        growth = np.maximum(gaps - weight, 0.0 if equal else gaps**2 / (6 * weight))
        if not equal:
            growth = np.minimum(growth, gaps)
        variance = np.append(0.0, np.cumsum(np.diff(values) * (growth[:-1] + growth[1:]) / 2))
        # The first gap adds no variance if one access crosses it.
        variance -= variance[1] if equal and weight >= 1 else 0.0
        errors: Float64Array = np.sqrt(np.maximum(variance, 0.0)) / np.maximum(values, 1.0)
        return errors

    def state(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Return a copy of everything: (JSON-able values, {``levels``: uint8, packed})."""
        meta = {
            "bits": self.bits,
            "step": self.step.hex(),
            "total_units": self.total_units,
            "draws": f"{self._draws:x}",
        }
        return meta, {"levels": self._packed.copy()}

    def load(self, meta: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Replace everything by what ``state`` returned.

        Raises:
            SketchError: it is of another table or number of bits, or inconsistent.
            KeyError, TypeError, ValueError: fields are missing or malformed.
        """
        packed, step, total = arrays["levels"], float.fromhex(meta["step"]), int(meta["total_units"])
        draws = int(meta["draws"], 16)
        fits = (
            packed.dtype == np.uint8
            and packed.shape == self._packed.shape
            and int(meta["bits"]) == self.bits
            and 0 <= step < math.inf
            and total >= 0
            and 0 <= draws < 2**64
            and (step > 0 or not packed.any())
        )
        if not fits:
            raise SketchError(
                f"saved counters do not fit {self.rows} rows of {self.bits} bits", remedy="start from empty counters"
            )
        self._packed, self.step, self.total_units, self._draws = packed.copy(), step, total, draws
        self._count_levels()

    def _top_allowed(self) -> int:
        return max(1, int(self.rows * TOP_SHARE))

    def _double_step_if_crowded(self) -> None:
        while self.top_rows > self._top_allowed():
            self._set_step(2 * self.step)

    def _set_step(self, step: float) -> None:
        values = level_values(self.bits)
        kernels.relevel(self._packed, self.rows, self.bits, values * (self.step / step), values, np.uint64(self._draws))
        self._skip_draws(self.rows)
        self.step = step
        self._count_levels()

    def _count_levels(self) -> None:
        self._counts = np.zeros(1 << self.bits, dtype=np.int64)
        kernels.histogram(self._packed, self.rows, self.bits, self._counts)

    def _skip_draws(self, draws: int) -> None:
        self._draws = (self._draws + draws) % 2**64


def packed_bytes(rows: int, bits: int) -> int:
    """Return the memory of the counters of a table."""
    return (rows * bits + 7) // 8 + 1


def warm_up() -> None:
    """Compile the kernels (or load them from numba's cache)."""
    for bits in BASES:
        for rows in (np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.int64)):
            counter = LogCounter(64, bits, 0)
            counter.add(rows, 1)
        counter.add_weights(np.arange(4, dtype=np.int64), np.ones(4), 4)
        counter._set_step(2 * counter.step)
        counter.levels(counter.rows_of_levels(counter.histogram()))
