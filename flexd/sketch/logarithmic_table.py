"""The sketch of a table with a logarithmic counter for every row; the sample orders the hottest rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flexd.core.keyspace import TableSpec
from flexd.sketch.counters.logarithmic import LogCounter
from flexd.sketch.decay import UNIT_BITS, ForwardDecay
from flexd.sketch.profile import TableProfile
from flexd.sketch.table_sketch import Arrays, RowArray, TableSketch
from flexd.sketch.types import TableChoice

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

QUARTILE = 0.6745
"""Standard deviations within which half of the estimates of a normal error lie. The planner promotes and keeps a row by
these bounds. With wider ones, and counters this coarse, it would keep rows at home that are worth a copy. A counter's
error stays the same from profile to profile until its row is accessed, so narrow bounds do not make a row flap."""


@dataclass(frozen=True)
class _Excess:
    """The units of rows at the top level beyond that level.

    Attributes:
        rows: int64[k], the sampled rows at the top level, ascending.
        units: float64[k], excess of each of ``rows``.
        sampled: int64[k], accesses of each of ``rows`` in the sample.
        rest: excess of each other row at the top level.
        units_an_access: excess that one sampled access represents.
    """

    rows: Int64Array
    units: Float64Array
    sampled: Int64Array
    rest: float
    units_an_access: float

    def of(self, rows: Int64Array) -> tuple[Float64Array, Int64Array]:
        """Return (float64[n] excess, int64[n] sampled accesses) of int64[n] rows at the top level."""
        if not len(self.rows):
            return np.full(len(rows), self.rest), np.zeros(len(rows), dtype=np.int64)
        at = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        found = self.rows[at] == rows
        return np.where(found, self.units[at], self.rest), np.where(found, self.sampled[at], 0)


class LogTable(TableSketch):
    """Logarithmic counters of one table.

    The units beyond the top level are known in total, because all accesses together are counted exactly. They are
    shared among the rows at the top level in proportion to the sample.
    """

    unit_bits = UNIT_BITS
    coarsest_units = 1

    def __init__(self, spec: TableSpec, choice: TableChoice, seed: int) -> None:
        super().__init__(spec, choice, seed)
        self._counter = LogCounter(spec.rows, choice.counter_bits, seed)

    @property
    def counter_bytes(self) -> int:
        return self._counter.nbytes

    def rescale(self, bits: int) -> None:
        self._counter.rescale(bits)

    def row_units(self, rows: Int64Array) -> Float64Array:
        """Return the estimated units of int64[n] rows as float64[n]: unbiased up to the top level."""
        counter = self._counter
        levels, values = counter.levels(rows), counter.values
        units: Float64Array = values[levels]
        at_top = np.flatnonzero(levels == len(values) - 1)
        if len(at_top):
            units[at_top] += self._excess(counter.histogram()).of(rows[at_top])[0]
        return units

    def _excess(self, histogram: Int64Array) -> _Excess:
        """Divide the units beyond the top level among its rows.

        Rows never sampled get together the share of the accesses whose row was sampled once (Good, *The population
        frequencies of species*, Biometrika 1953). The sampled rows divide the rest as they do the sample.
        """
        counter = self._counter
        beyond = max(0.0, float(counter.total_units) - float(histogram @ counter.values))
        top_rows = int(histogram[-1])
        sampled = self._sample.rows()
        rows, times = np.unique(sampled[counter.levels(sampled) == len(histogram) - 1], return_counts=True)
        accesses = int(times.sum())
        others = top_rows - len(rows)
        unseen = (int((times == 1).sum()) / accesses if accesses else 1.0) if others else 0.0
        return _Excess(
            rows,
            beyond * (1 - unseen) * times / max(1, accesses),
            times,
            beyond * unseen / others if others else 0.0,
            beyond / max(1, accesses),
        )

    def _read_profile(self, decay: ForwardDecay, max_hot_rows: int) -> TableProfile:
        counter = self._counter
        total = float(counter.total_units)
        if total == 0:
            return self._empty_profile()
        histogram, values = counter.histogram(), counter.values
        top = len(values) - 1
        excess = self._excess(histogram)
        # All rows at the top level are read, because their order is only decided here.
        above = np.cumsum(histogram[::-1])[::-1] - histogram
        room = np.clip(max_hot_rows - above, 0, histogram)
        room[0], room[top] = 0, histogram[top]
        rows = counter.rows_of_levels(room)
        level = np.repeat(np.arange(top, -1, -1), room[::-1])
        units, half = values[level], QUARTILE * self._level_errors(decay)[level]
        lower, upper = units * np.exp(-half), units * np.exp(half)
        first = int(histogram[top])
        beyond, sampled = excess.of(rows[:first])
        # Of counts with a power-law tail, a fifth to a quarter of those at the top level are lower in truth (Bayes,
        # prior 1 / x^2, errors of half an octave), so the top level is their lower quartile.
        lower[:first] = units[:first]
        units[:first] += beyond
        upper[:first] += excess.units_an_access * (sampled + 1 + QUARTILE * np.sqrt(sampled + 1))
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
            hot_lower=np.minimum(lower[listed] / whole, share),
            hot_upper=np.clip(upper[listed] / whole, share, 1.0),
            bin_share=bin_units / whole,
            bin_rows=bin_rows,
            distinct_rows=float(self.spec.rows - histogram[0]),
            coverage=min(1.0, explained / whole),
        )

    def _level_errors(self, decay: ForwardDecay) -> Float64Array:
        access_units = float(self.access_units(decay.newest_seconds, decay))
        if decay.half_life_seconds is None:
            return self._counter.level_errors(access_units, equal=True)
        # An access of a steady stream weighs half of one made now on average.
        return self._counter.level_errors(access_units / 2, equal=False)

    def _count(self, rows: RowArray, time: float, decay: ForwardDecay) -> tuple[int, int]:
        return self._counter.add(rows, self.access_units(time, decay))

    def _count_times(self, rows: Int64Array, times: Int64Array, units: int) -> None:
        self._counter.add_weights(rows, times.astype(np.float64) * units, int(times.sum()) * units)

    def _crowded(self) -> bool:
        return False

    def _state(self) -> tuple[dict[str, Any], Arrays]:
        return self._counter.state()

    def _load(self, meta: dict[str, Any], arrays: Arrays) -> None:
        self._counter.load(meta, arrays)
