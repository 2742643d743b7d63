"""The sketch of a table with a logarithmic counter for every row; the sample orders the hottest rows."""

import math
from functools import cache
from typing import Any

import numpy as np

from flexd.core.arrays import Arrays, Float64Array, Int64Array, RowArray, UInt8Array
from flexd.core.keyspace import TableSpec
from flexd.sketch import logarithmic_kernels as kernels
from flexd.sketch.decay import UNIT_BITS, ForwardDecay
from flexd.sketch.profile import TableProfile
from flexd.sketch.table_sketch import TableChoice, TableSketch, readonly

# Ratio of the steps of two successive levels, by bits of a counter.
BASES = {3: 1.4, 4: 1.25, 8: 1.04}
# Ids counted between two checks of the number of rows at the top level.
CHECK_IDS = 8_192
# Share of the rows that may be at the top level before the step is doubled.
TOP_SHARE = 1 / 32


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


# Standard deviations within which half of the estimates of a normal error lie. The planner promotes and keeps a row by
# these bounds. With wider ones, and counters this coarse, it would keep rows at home that are worth a copy. A counter's
# error stays the same from profile to profile until its row is accessed, so narrow bounds do not make a row flap.
QUARTILE = 0.6745


def packed_bytes(rows: int, bits: int) -> int:
    """Return the memory of the counters of a table."""
    return (rows * bits + 7) // 8 + 1


class LogTable(TableSketch):
    """Unbiased approximate counts: an access of weight w moves a row from the level of value v to the level at or below
    v + w, or to the next one, at random so that the mean is v + w.

    The levels are those of Morris's counter, times ``step`` units. The step doubles once more than ``TOP_SHARE`` of the
    rows have reached the top level; every counter is then rounded, up or down at random, to the new levels. Units of a
    row beyond the top level are not counted by row, but ``total_units`` is exact for all accesses; what lies beyond is
    shared among the rows at the top level, or that were there until the step doubled, in proportion to the sample.

    Random numbers are a function of the number of draws made (``logarithmic_kernels``), which is saved: equal streams
    in equal order give equal bits, across a restart too.
    """

    unit_bits = UNIT_BITS
    coarsest_units = 1

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        super().__init__(spec, choice, seed)
        self.bits = choice.counter_bits
        # Units added to all rows together.
        self.total_units = 0
        # Units of the first level; 0 before any access.
        self.step = 0.0
        self._draws = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64
        self._packed: UInt8Array = np.zeros(packed_bytes(spec.rows, self.bits), dtype=np.uint8)
        # Number of rows at each level.
        self.level_rows: Int64Array = np.zeros(1 << self.bits, dtype=np.int64)
        self.level_rows[0] = spec.rows

    @property
    def values(self) -> Float64Array:
        """Units of each level, float64[2^bits]."""
        return level_values(self.bits) * self.step

    def add_units(self, rows: RowArray, units: int) -> tuple[int, int]:
        """Add ``units`` to each row in ``rows``, once for every occurrence.

        Args:
            rows: int32[n] or int64[n], contiguous; ids outside the table are not counted.
            units: 0 or more.

        Returns:
            (ids below 0, ids beyond the table).
        """
        if units:
            self._fit_step(float(units))
        negative, outside, given = 0, 0, readonly(rows)
        weight = units / self.step if units else 0.0
        for start in range(0, len(rows), CHECK_IDS):
            end = min(start + CHECK_IDS, len(rows))
            below, beyond = kernels.add(
                given, start, end, np.uint64(self.spec.rows), self._packed, self.level_rows, self.bits,
                level_values(self.bits), weight, np.uint64(self._draws),
            )  # fmt: skip
            self._skip_draws(end - start)
            negative += below
            outside += beyond
            if self._double_step_if_crowded():
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
        least = float(units[units > 0].min(initial=np.inf))
        if not math.isfinite(least):
            return
        self._fit_step(least)
        for start in range(0, len(rows), CHECK_IDS):
            part = np.ascontiguousarray(rows[start : start + CHECK_IDS], dtype=np.int64)
            weights = units[start : start + CHECK_IDS] / self.step
            kernels.add_weights(
                part, weights, self._packed, self.level_rows, self.bits, level_values(self.bits), np.uint64(self._draws)
            )
            self._skip_draws(len(part))
            self._double_step_if_crowded()

    def rescale(self, bits: int) -> None:
        """Divide all counters by ``2^bits``. The levels do not change; the value of each does.

        Once all rows together are less than a unit they start anew: a step may become too small for a float.
        """
        self.step = math.ldexp(self.step, -bits)
        self.total_units = (self.total_units + (1 << (bits - 1))) >> bits
        if not self.total_units:
            self.step = 0.0
            self._packed[:] = 0
            self._count_levels()

    def levels(self, rows: Int64Array) -> UInt8Array:
        """Return the levels of int64[n] rows of the table as uint8[n]."""
        out = np.empty(len(rows), dtype=np.uint8)
        kernels.read(self._packed, np.ascontiguousarray(rows, dtype=np.int64), self.bits, out)
        return out

    def _level_errors(self, decay: ForwardDecay) -> Float64Array:
        """Return the relative standard error of the estimate of each level, float64[2^bits].

        An access of u steps, at a level whose gap to the next is g, adds (g - u) u to the variance while u < g, and
        g^2 / 6 on average if it is wider. The gap is linear in the count, so this is integrated up to the level. High
        levels approach ``relative_error``.

        Without decay all accesses have the same weight, so that steps as wide as one are exact. With it an access of a
        steady stream weighs half of one made now on average.
        """
        values, equal = level_values(self.bits), decay.half_life_seconds is None
        units = self.access_units(decay.newest_seconds, decay) / (1 if equal else 2)
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

    def _fit_step(self, units: float) -> None:
        """Make the first level as wide as an access: at first, and after a pause so long that the highest level is less
        than an exact counter would keep."""
        if not self.step:
            self.step = units
        elif units * 2.0**-UNIT_BITS > level_values(self.bits)[-1] * self.step:
            self._set_step(units)

    def _double_step_if_crowded(self) -> bool:
        before = self.step
        while self.level_rows[-1] > max(1, int(self.spec.rows * TOP_SHARE)):
            self._set_step(2 * self.step)
        return self.step != before

    def _set_step(self, step: float) -> None:
        values = level_values(self.bits)
        kernels.relevel(
            self._packed, self.spec.rows, self.bits, values * (self.step / step), values, np.uint64(self._draws)
        )
        self._skip_draws(self.spec.rows)
        self.step = step
        self._count_levels()

    def _count_levels(self) -> None:
        self.level_rows = np.zeros(1 << self.bits, dtype=np.int64)
        kernels.histogram(self._packed, self.spec.rows, self.bits, self.level_rows)

    def _skip_draws(self, draws: int) -> None:
        self._draws = (self._draws + draws) % 2**64

    def row_units(self, rows: Int64Array) -> Float64Array:
        """Return the estimated units of int64[n] rows as float64[n]: unbiased up to the top level."""
        levels, values = self.levels(rows), self.values
        units: Float64Array = values[levels]
        at_top = np.flatnonzero(levels >= self._top())
        if len(at_top):
            units[at_top] += self._beyond_top(rows[at_top])[0]
        return units

    def _top(self) -> int:
        """Return the lowest level whose rows share the units beyond the top level.

        That is the top level; when the step has doubled and no row is there again, the one down to which lie as many
        rows as made it double, which were at the top then. Errors of the levels alone are shared by no row.
        """
        last, beyond = len(self.level_rows) - 1, self.total_units - float(self.level_rows @ self.values)
        if self.level_rows[last] or beyond <= relative_error(self.bits) * self.total_units:
            return last
        at_least = np.cumsum(self.level_rows[::-1])[::-1]
        crowd = max(1, int(self.spec.rows * TOP_SHARE))
        # Times that share: so many rows may have come to the top before the step doubled, and share what lay beyond it.
        crowded = np.flatnonzero((at_least > crowd) & (at_least <= 2 * crowd))
        return max(1, int(crowded[-1])) if len(crowded) else last

    def _beyond_top(self, rows: Int64Array) -> tuple[Float64Array, Int64Array, float]:
        """Divide the units beyond the top level among its rows.

        Rows never sampled get together the share of the accesses whose row was sampled once (Good, *The population
        frequencies of species*, Biometrika 1953). The sampled rows divide the rest as they do the sample.

        Returns:
            (float64[n] units of int64[n] rows at the top level, their sampled accesses, units of one of these).
        """
        beyond = max(0.0, float(self.total_units) - float(self.level_rows @ self.values))
        sampled = self._sample.rows()
        seen, times = np.unique(sampled[self.levels(sampled) >= self._top()], return_counts=True)
        accesses = max(1, int(times.sum()))
        others = int(self.level_rows[self._top() :].sum()) - len(seen)
        unseen = (int((times == 1).sum()) / accesses if len(seen) else 1.0) if others else 0.0
        at = np.searchsorted(seen, rows)
        # No row is -1, which stands behind the last.
        found = np.append(seen, -1)[at] == rows
        accessed = np.where(found, np.append(times, 0)[at], 0)
        rest = beyond * unseen / others if others else 0.0
        units = np.where(found, beyond * (1 - unseen) * accessed / accesses, rest)
        return units, accessed, beyond / accesses

    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        total = float(self.total_units)
        if total == 0:
            return self._empty_profile()
        histogram, values = self.level_rows, self.values
        top = self._top()
        # All rows at the top level are read, because their order is only decided here.
        above = np.cumsum(histogram[::-1])[::-1] - histogram
        room = np.clip(max_hot_rows - above, 0, histogram)
        room[0], room[top:] = 0, histogram[top:]
        # Highest level first, ascending within a level.
        ends = np.cumsum(room[::-1])[::-1]
        rows = np.empty(int(room.sum()), dtype=np.int64)
        kernels.collect(self._packed, self.spec.rows, self.bits, ends - room, ends, rows)
        level = np.repeat(np.arange(len(values) - 1, -1, -1), room[::-1])
        units, half = values[level], QUARTILE * self._level_errors(decay)[level]
        lower, upper = units * np.exp(-half), units * np.exp(half)
        first = int(histogram[top:].sum())
        beyond, sampled, units_an_access = self._beyond_top(rows[:first])
        # Of counts with a power-law tail, a fifth to a quarter of those at the top level are lower in truth (Bayes,
        # prior 1 / x^2, errors of half an octave), so the top level is their lower quartile.
        lower[:first] = units[:first]
        units[:first] += beyond
        upper[:first] += units_an_access * (sampled + 1 + QUARTILE * np.sqrt(sampled + 1))
        order = np.concatenate([np.lexsort((rows[:first], -units[:first])), np.arange(first, len(rows))])
        listed, spilled = order[:max_hot_rows], units[order[max_hot_rows:]]
        left = (histogram - room)[1:]
        bin_rows, bin_units = left[left > 0][::-1].astype(np.float64), values[1:][left > 0][::-1]
        if len(spilled):
            bin_rows = np.append(float(len(spilled)), bin_rows)
            bin_units = np.append(float(spilled.mean()), bin_units)
        explained = float(units.sum() - spilled.sum() + bin_rows @ bin_units)
        # Estimates add up to a little more or less than the exact total.
        whole = max(total, explained)
        share = units[listed] / whole
        return TableProfile(
            table=self.spec.name,
            rows=self.spec.rows,
            weight=total * self._unit_weight(decay),
            accesses_per_step=0.0,
            hot_rows=rows[listed],
            hot_share=share,
            hot_bounds=(np.minimum(lower[listed] / whole, share), np.clip(upper[listed] / whole, share, 1.0)),
            bin_share=bin_units / whole,
            bin_rows=bin_rows,
            distinct_rows=float(self.spec.rows - histogram[0]),
        )

    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]:
        return self.add_units(rows, self.access_units(time, decay))

    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        self.add_weights(rows, times.astype(np.float64) * units, int(times.sum()) * units)

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        meta = {
            "bits": self.bits,
            "step": self.step.hex(),
            "total_units": self.total_units,
            "draws": f"{self._draws:x}",
        }
        return meta, {"levels": self._packed}

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._packed, self.step = arrays["levels"], float.fromhex(meta["step"])
        self.total_units, self._draws = int(meta["total_units"]), int(meta["draws"], 16)
        self._count_levels()
